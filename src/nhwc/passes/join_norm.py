"""Join a layer norm that a model spells, of the channels of each pixel or of each token.

mean = x.mean(1, keepdim=True)
centred = x - mean
variance = centred.pow(2).mean(1, keepdim=True)             ->    y = SpelledNorm(x)
y = centred / torch.sqrt(variance + eps)
y = weight[:, None, None] * y + bias[:, None, None]

ConvNeXt, Segment Anything and NAFNet have it for images, Restormer for tokens. It may take the
variance from `x.var(-1, unbiased=False)`, and multiply by the inverse of the root.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..graph import add_module, attribute, bound
from ..graph.modules.mended import SpelledNorm
from ..graph.nodes.unused import erase_unused
from ..graph.report import PassReport, Site
from ._folding_sites import name_of, written_between
from ._matching import arithmetic, averaged, beside, only_user, sum_with_number
from ._reporting import reported

_VARIANCE = ("input", "dim", "unbiased", "keepdim")


@dataclass(frozen=True)
class _Normed:
    """What is normed over which dimension, and how that is spelled."""

    x: fx.Node
    dim: int
    eps: float
    variance: str
    inverse: bool


def join_norm(gm: fx.GraphModule) -> PassReport:
    """Replace each `(x - mean) / root of (variance + eps)`, weighed and shifted, by one layer."""
    sites = []
    for node in list(gm.graph.nodes):
        found = _normed(node)
        if found is None:
            continue
        end, weight, bias = _weighed(gm, node)
        reason = written_between([found.x], min(found.x.users), end)
        sites.append(Site(name_of(node), "layer norm", not reason, reason))
        if not reason:
            _replace(gm, found, end, weight, bias)
    return reported(gm, "join_norm", sites)


def _normed(node: fx.Node) -> _Normed | None:
    for centred, root, roots in _over_root(node):
        centre = _centred(centred)
        if centre is None or not isinstance(root, fx.Node) or root.target not in roots:
            continue
        if len(root.args) != 1 or root.kwargs:
            continue
        total = root.args[0]
        x, dim = centre
        for variance in total.all_input_nodes if isinstance(total, fx.Node) else ():
            how = _variance_of(variance, x, dim)
            more = sum_with_number(variance) if how else None
            if how and more and more[0] is total:
                return _Normed(x, dim, more[1], how, arithmetic(node) == "mul")
    return None


def _over_root(node: fx.Node) -> list[tuple[Any, Any, tuple[Any, ...]]]:
    """What may be divided by what root, or multiplied by the inverse of one."""
    kind = arithmetic(node)
    if kind not in ("div", "mul") or len(node.args) != 2 or node.kwargs:
        return []
    first, second = node.args
    if kind == "div":
        return [(first, second, (torch.sqrt, "sqrt"))]
    inverse = (torch.rsqrt, "rsqrt")
    return [(first, second, inverse), (second, first, inverse)]


def _centred(node: Any) -> tuple[fx.Node, int] | None:
    """The value less its mean over a dimension, and that dimension."""
    if not isinstance(node, fx.Node) or arithmetic(node) != "sub" or len(node.args) != 2:
        return None
    x, mean = node.args
    dim = averaged(mean) if isinstance(mean, fx.Node) else None
    fits = dim is not None and mean.args[0] is x and not node.kwargs  # type: ignore[union-attr]
    return (x, dim) if fits and isinstance(x, fx.Node) else None  # type: ignore[return-value]


def _variance_of(node: Any, x: fx.Node, dim: int) -> str:
    """How `node` is the variance of `x` over a dimension, by the count; empty if it is not."""
    if not isinstance(node, fx.Node):
        return ""
    if node.target in (torch.var, "var"):
        given = bound(node, _VARIANCE)
        plain = given.pop("unbiased", True) is False or given.pop("correction", 1) == 0
        return "var" if plain and given == {"input": x, "dim": dim, "keepdim": True} else ""
    squares = node.args[0] if averaged(node) == dim else None
    if not isinstance(squares, fx.Node) or squares.kwargs:
        return ""
    one, *other = squares.args
    if _centred(one) != (x, dim):
        return ""
    if squares.target in (torch.pow, operator.pow, "pow") and other == [2]:
        return "pow"
    twice = arithmetic(squares) == "mul" and other == [one]
    return "mul" if twice or squares.target in (torch.square, "square") else ""


def _weighed(gm: fx.GraphModule, node: fx.Node) -> tuple[fx.Node, Tensor | None, Tensor | None]:
    """The node behind a product with weights and a sum with a bias, as far as they follow."""
    product = only_user(node)
    weight = _constant(gm, beside(product, "mul", node))
    if product is None or weight is None:
        return node, None, None
    total = only_user(product)
    bias = _constant(gm, beside(total, "add", product))
    return (product, weight, None) if total is None or bias is None else (total, weight, bias)


def _constant(gm: fx.GraphModule, node: Any) -> Tensor | None:
    """A constant of numbers along one dimension."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    held = attribute(gm, str(node.target))
    known = isinstance(held, Tensor) and not held.is_meta and held.is_floating_point()
    return held.detach() if known and held.numel() == max((*held.shape, 1)) else None


def _replace(
    gm: fx.GraphModule, found: _Normed, end: fx.Node, weight: Tensor | None, bias: Tensor | None
) -> None:
    shapes = (None if one is None else one.shape for one in (weight, bias))
    how = (found.dim, found.eps, found.variance, found.inverse)
    layer = SpelledNorm(*how, *shapes).eval()
    for name, held in (("weight", weight), ("bias", bias)):
        if held is not None:
            setattr(layer, name, nn.Parameter(held.clone(), requires_grad=False))
    with gm.graph.inserting_before(end):
        joined = add_module(gm.graph, f"{end.name}_norm", layer, (found.x,))
    joined.meta = dict(end.meta)
    end.replace_all_uses_with(joined)
    erase_unused(end)
