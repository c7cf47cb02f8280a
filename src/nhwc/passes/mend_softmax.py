"""Softmax of what a convolution made, which torch returns in NCHW whatever it is given.

Over the channels it is that of a dense dimension in NHWC. Models that mix the heads of an attention
by a 1x1 convolution apply it to a row of "pixels": what it gives goes to the next such convolution.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from ..graph import add_module, bound, erase, module_of
from ..graph.modules.leaves import unlike_class
from ..graph.modules.ordered import Softmax
from ..graph.report import PassReport, Site
from ._folding_sites import input_of, name_of
from ._matching import is_made_of_pixels
from ._reporting import reported

_LOGARITHM = {
    **dict.fromkeys((F.softmax, torch.softmax, "softmax", nn.Softmax, nn.Softmax2d), False),
    **dict.fromkeys((F.log_softmax, torch.log_softmax, "log_softmax", nn.LogSoftmax), True),
}


def mend_softmax(gm: fx.GraphModule) -> PassReport:
    """Replace every softmax of an image that convolutions and what is pointwise made."""
    sites = []
    for node in list(gm.graph.nodes):
        module, value = module_of(node), input_of(node)
        logarithm = _LOGARITHM.get(type(module) if module is not None else node.target)
        if logarithm is None or value is None or not is_made_of_pixels(value):
            continue
        dim = _dim(node, module)
        reason = "" if type(dim) is int else "it has a type or no dimension of its own"
        if module is not None and unlike_class(module):
            reason = "it has hooks or a forward of its own"
        sites.append(Site(name_of(node), "softmax", not reason, reason))
        if not reason:
            with gm.graph.inserting_before(node):
                call = add_module(gm.graph, "softmax", Softmax(dim, logarithm), (value,))
            erase(node, call)
    return reported(gm, "mend_softmax", sites)


def _dim(node: fx.Node, module: Any) -> Any:
    if module is not None:
        return -3 if isinstance(module, nn.Softmax2d) else module.dim
    functional = node.target in (F.softmax, F.log_softmax)
    between = ("_stacklevel",) if functional else ()
    given = bound(node, ("input", "dim", *between, "dtype"))
    return given.get("dim") if given.get("dtype") is None else None
