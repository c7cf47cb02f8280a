"""Images of one pixel that are resized: torch takes them for NCHW, and fills a whole image so.

The pooling branch of ASPP (DeepLab) and of pyramids ends so. Every pixel of the result is that one.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from ..graph import add_module, bound, erase, module_of, written_into
from ..graph.modules.leaves import is_leaf
from ..graph.modules.mended import Cat, Pixel
from ..graph.nodes.ranks import rank_of
from ..graph.report import PassReport, Site
from ._folding_sites import input_of, name_of, written_between
from ._matching import activation_of, arithmetic
from ._reporting import reported

_NAMES = ("input", "size", "scale_factor", "mode")
_BETWEEN = (nn.BatchNorm2d, nn.Identity, nn.Dropout, nn.Dropout2d)


def mend_interpolate(gm: fx.GraphModule) -> PassReport:
    """Replace F.interpolate of what was pooled to one pixel, to a size that is given."""
    sites = []
    for node in list(gm.graph.nodes):
        value = input_of(node)
        if node.target is not F.interpolate or value is None or not is_one_pixel(value):
            continue
        given = bound(node, _NAMES)
        reason = _unfit(node, given)
        sites.append(Site(name_of(node), "interpolate of one pixel", not reason, reason))
        if not reason:
            size = given["size"] if isinstance(given["size"], fx.Node) else list(given["size"])
            with gm.graph.inserting_before(node):
                call = add_module(gm.graph, "pixel", Pixel(), (value, size))
            erase(node, call)
    return reported(gm, "mend_interpolate", sites)


def is_one_pixel(node: Any) -> bool:
    """Whether `node` was pooled to one pixel, and only convolved by one pixel or scaled since."""
    module: Any = module_of(node)
    if module is not None and not is_leaf(module):
        return False
    if isinstance(module, nn.AdaptiveAvgPool2d | nn.AdaptiveMaxPool2d):
        return module.output_size in (1, (1, 1))
    if not isinstance(node, fx.Node):
        return False
    if node.target in (F.adaptive_avg_pool2d, F.adaptive_max_pool2d):
        return bound(node, ("input", "size")).get("size") in (1, (1, 1), [1, 1])
    if node.target in (torch.mean, "mean"):
        given = bound(node, ("input", "dim", "keepdim"))
        dims: Any = given.get("dim")
        plain = isinstance(dims, list | tuple) and all(type(dim) is int for dim in dims)
        over_pixels = plain and sorted(dim % 4 for dim in dims) == [2, 3]
        return over_pixels and given.get("keepdim") is True and rank_of(node) == 4
    pointwise = isinstance(module, _BETWEEN) or activation_of(node) is not None
    if isinstance(module, nn.Conv2d):
        pointwise = module.kernel_size == (1, 1) and module.padding in ((0, 0), "valid", "same")
    return pointwise and is_one_pixel(input_of(node))


def _unfit(node: fx.Node, given: dict[str, Any]) -> str:
    mode, size = given.get("mode", "nearest"), given.get("size")
    if mode not in ("nearest", "nearest-exact", "bilinear", "area") or given.get("antialias"):
        return f"mode={mode!r} may not give that pixel everywhere"
    pair = isinstance(size, list | tuple) and len(size) == 2
    if not pair and not _is_pair_of_sizes(size):
        return "its size is not given as two numbers"
    strange = [user for user in node.users if not _only_reads(user)]
    if strange:
        return f"{name_of(strange[0])} may write into it, or keep it"
    return written_between([given["input"]], node, max(node.users, default=node))


def _is_pair_of_sizes(size: Any) -> bool:
    """Whether it is a part of a shape, and no number of it."""
    taken = isinstance(size, fx.Node) and size.target is operator.getitem
    return taken and isinstance(size.args[1], slice)


def _only_reads(user: fx.Node) -> bool:
    if user.op == "call_module":
        return isinstance(module_of(user), Cat | nn.Conv2d)
    adds = arithmetic(user) is not None and written_into(user) is None
    return adds or user.target in (torch.cat, torch.concat)
