"""Join a global response norm, as ConvNeXt V2 has it, into one layer.

size = x.norm(p=2, dim=(2, 3), keepdim=True)
size = size / (size.mean(dim=1, keepdim=True) + eps)        ->    y = GlobalResponse(x)
y = x + torch.addcmul(bias, weight, x * size)

It may be spelt with sums and products, `x + bias + weight * (x * size)`, and on N, H, W, C.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..graph import add_module, attribute, bound
from ..graph.modules.mended import GlobalResponse
from ..graph.report import PassReport, Site
from ._folding_sites import name_of, written_between
from ._matching import arithmetic, averaged, beside, only_user, sum_with_number
from ._reporting import reported

_NORMS = (torch.norm, torch.linalg.vector_norm, "norm")


@dataclass(frozen=True)
class _Found:
    """What the nodes of a response norm compute; those that read come before what they read."""

    nodes: tuple[fx.Node, ...]
    weight: Tensor
    bias: Tensor
    eps: float
    last: bool
    dims: Sequence[int]
    batched: bool


def join_response_norm(gm: fx.GraphModule) -> PassReport:
    """Replace each `x + weight * (x * size / mean of sizes) + bias` by one layer."""
    sites = []
    for norm in list(gm.graph.nodes):
        pixels = _over(norm)
        if pixels is None:
            continue
        x: Any = norm.args[0]
        found = _found(gm, norm, x, pixels)
        reason = "its result is not used as that of a response norm"
        if found is not None:
            reason = written_between([x], norm, found.nodes[0])
        sites.append(Site(name_of(norm), "response norm", not reason, reason))
        if found is not None and not reason:
            _replace(gm, x, found)
    return reported(gm, "join_response_norm", sites)


def _over(node: fx.Node) -> Sequence[int] | None:
    """The dimensions that a norm over the pixels of images runs over; None if it is another."""
    if node.target not in _NORMS or not node.args or not isinstance(node.args[0], fx.Node):
        return None
    order = "ord" if node.target is torch.linalg.vector_norm else "p"
    given = bound(node, ("input", order, "dim", "keepdim"))
    # torch's own functions hand on what they were not given.
    given = {name: one for name, one in given.items() if name != "input" and one is not None}
    dims = given.pop("dim", None)
    plain = isinstance(dims, list | tuple) and all(isinstance(dim, int) for dim in dims)
    if not plain or given.pop(order, 2) != 2 or given != {"keepdim": True}:
        return None
    return dims if sorted(dim % 4 for dim in dims) in ([1, 2], [2, 3]) else None


def _found(gm: fx.GraphModule, norm: fx.Node, x: fx.Node, pixels: Sequence[int]) -> _Found | None:
    mean = next((user for user in norm.users if averaged(user) is not None), None)
    channel = averaged(mean)
    if mean is None or channel is None or {dim % 4 for dim in (channel, *pixels)} != {1, 2, 3}:
        return None
    last = channel % 4 == 3
    more = sum_with_number(mean)
    share = only_user(more[0]) if more else None
    if more is None or share is None or {*norm.users} != {mean, share}:
        return None
    if arithmetic(share) != "div" or share.args != (norm, more[0]) or share.kwargs:
        return None
    product = only_user(share)
    if product is None or not _is(product, "mul", {x, share}):
        return None
    scaled = _scaled(gm, product, x, last)
    if scaled is None:
        return None
    nodes, weight, bias = scaled
    nodes = (*nodes, product, share, more[0], mean, norm)
    batched = 4 in (weight.ndim, bias.ndim)
    dims = (*pixels, channel)
    return _Found(nodes, weight.flatten(), bias.flatten(), more[1], last, dims, batched)


def _is(node: fx.Node, kind: str, operands: set[Any]) -> bool:
    return arithmetic(node) == kind and {*node.args} == operands and not node.kwargs


def _scaled(
    gm: fx.GraphModule, product: fx.Node, x: fx.Node, last: bool
) -> tuple[tuple[fx.Node, ...], Tensor, Tensor] | None:
    """The nodes from the result to the product, with the weight and the bias."""
    node = only_user(product)
    if node is not None and node.target in (torch.addcmul, "addcmul"):
        constants = [_constant(gm, one, last) for one in node.args[:2]]
        fits = len(node.args) == 3 and node.args[2] is product and not node.kwargs
        end = only_user(node)
        if not fits or end is None or not _is(end, "add", {x, node}):
            return None
        bias, weight = constants
        return None if bias is None or weight is None else ((end, node), weight, bias)
    weight = _constant(gm, beside(node, "mul", product), last)
    nodes: tuple[fx.Node, ...] = (node,) if node is not None else ()
    bias, added = None, False
    while weight is not None and not (added and bias is not None):
        total = only_user(nodes[0])
        other = beside(total, "add", nodes[0])
        if other is x and not added:
            added = True
        elif bias is None and (held := _constant(gm, other, last)) is not None:
            bias = held
        else:
            return None
        assert total is not None
        nodes = (total, *nodes)
    return None if weight is None or bias is None else (nodes, weight, bias)


def _constant(gm: fx.GraphModule, node: Any, last: bool) -> Tensor | None:
    """A constant that has a number for each channel."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    held = attribute(gm, str(node.target))
    if not isinstance(held, Tensor) or held.is_meta:
        return None
    sides: Sequence[int] = (1, 1, 1, held.numel()) if last else (1, held.numel(), 1, 1)
    fits = tuple(held.shape) in (tuple(sides), tuple(sides[1:])) or (last and held.ndim == 1)
    return held.detach() if fits else None


def _replace(gm: fx.GraphModule, x: fx.Node, found: _Found) -> None:
    layer = GlobalResponse(len(found.weight), found.eps, found.last, found.dims, found.batched)
    layer.to(found.weight.dtype).eval()
    layer.weight = nn.Parameter(found.weight.clone(), requires_grad=False)
    layer.bias = nn.Parameter(found.bias.clone(), requires_grad=False)
    end = found.nodes[0]
    with gm.graph.inserting_before(end):
        joined = add_module(gm.graph, f"{end.name}_response", layer, (x,))
    joined.meta = dict(end.meta)
    end.replace_all_uses_with(joined)
    for node in found.nodes:
        gm.graph.erase_node(node)
