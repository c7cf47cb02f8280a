"""Images that views make of tokens, or of an image: one alone has strides that torch misreads."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from ..graph import add_module, bound, erase
from ..graph.modules.mended import FromTokens
from ..graph.report import PassReport, Site
from ._folding_sites import name_of
from ._matching import is_made_of_pixels, permutation, shape_given
from ._reporting import reported


def mend_tokens(gm: fx.GraphModule) -> PassReport:
    """Replace `x.transpose(1, 2).reshape(n, c, h, w)`, and an image's view as a batch of one."""
    sites = []
    for node in list(gm.graph.nodes):
        shape = shape_given(node)
        if shape is None or len(shape) != 4:
            continue
        alone = shape[0] == 1 and is_made_of_pixels(node.args[0])
        if not alone and not turns_tokens(node.args[0]):
            continue
        sites.append(Site(name_of(node), "image of tokens", True))
        with gm.graph.inserting_before(node):
            call = add_module(gm.graph, "image", FromTokens(), (node.args[0], shape))
        erase(node, call)
    return reported(gm, "mend_tokens", sites)


def turns_tokens(node: Any) -> bool:
    """Whether `node` brings the channels of tokens to the front."""
    if not isinstance(node, fx.Node):
        return False
    if node.target in ("transpose", torch.transpose):
        given = bound(node, ("input", "dim0", "dim1"))
        dims = given.get("dim0"), given.get("dim1")
        return set(dims) in ({1, 2}, {-1, -2}, {1, -1})
    return permutation(node) == (0, 2, 1)
