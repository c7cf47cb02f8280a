"""Bool masks of attention become numbers to add to its scores, once for all layers that share one.

`F.scaled_dot_product_attention` makes them of such a mask in each call: 0 for what is seen, minus
infinity for what is not. As numbers, they are what a kernel of attention takes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import fx

from ..graph import bound
from ..graph.nodes.seen import seen_at
from ..graph.report import PassReport, Site
from ._attention_masks import mask_at, numbers_of
from ._folding_sites import name_of, written_between
from ._reporting import reported

_NAMES = ("query", "key", "value", "attn_mask")


def number_masks(gm: fx.GraphModule) -> PassReport:
    """Replace each mask that is known to be bool."""
    sites = []
    made: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
    for node in list(gm.graph.nodes):
        if node.target is not F.scaled_dot_product_attention:
            continue
        given = bound(node, _NAMES)
        mask, query = given.get("attn_mask"), seen_at(given.get("query"))
        seen = mask_at(gm, mask)
        if not isinstance(mask, fx.Node) or seen is None or query is None:
            continue
        if seen.dtype is not torch.bool:
            continue
        key = mask, query.dtype
        if key not in made or written_between([mask], made[key], node):
            with gm.graph.inserting_before(node):
                made[key] = numbers_of(gm.graph, mask, query.dtype, hidden=False)
        node.replace_input_with(mask, made[key])
        sites.append(Site(name_of(node), "mask", True))
    return reported(gm, "number_masks", sites)
