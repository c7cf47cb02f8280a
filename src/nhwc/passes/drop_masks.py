"""Drop `masked_fill` by a mask that the code made, and that masks nothing.

Detectors mask what was padded in a batch. For images of one size their code makes a mask without a
number.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

from ..graph import attribute, bound, erase
from ..graph.nodes.memory import exposed
from ..graph.nodes.names import is_constant
from ..graph.nodes.seen import note_new, shape_at
from ..graph.report import PassReport, Site
from ._folding_sites import name_of
from ._reporting import reported


def drop_masks(gm: fx.GraphModule) -> PassReport:
    """Let each value be read as it is, unless somebody may write into it or its copy."""
    masked = [n for n in gm.graph.nodes if n.target in ("masked_fill", torch.masked_fill)]
    if not masked:
        return reported(gm, "drop_masks", [])
    note_new(gm.graph)
    written, sites = exposed(gm.graph), []
    for node in masked:
        given = bound(node, ("input", "mask", "value"))
        value, mask = given.get("input"), given.get("mask")
        if not isinstance(value, fx.Node) or not _masks_nothing(gm, mask):
            continue
        if shape_at(value) is None or shape_at(value) != shape_at(node):
            continue
        reason = "" if written.isdisjoint((value, mask, node)) else "its value may be written to"
        sites.append(Site(name_of(node), "mask", not reason, reason))
        if not reason:
            erase(node, value)
    return reported(gm, "drop_masks", sites)


def _masks_nothing(gm: fx.GraphModule, mask: object) -> bool:
    if not isinstance(mask, fx.Node) or not is_constant(mask):
        return False
    held = attribute(gm, str(mask.target))
    return isinstance(held, Tensor) and not held.is_meta and not bool(held.any())
