"""Split torch's attention module into linear layers and the attention between them.

As one call the module uses torch's own matrix products. Split, each linear layer gets the kernel
that is fastest for it, and the last one can add the residual.
"""

from __future__ import annotations

import itertools
import operator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx, nn

from ..graph import add_module, clean, erase, module_of
from ..graph.leaves import opaque_by_nature
from ..graph.report import PassReport, Site
from ._folding_sites import name_of
from .lift_functional import layer

_ARGUMENTS = (
    *("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask"),
    *("average_attn_weights", "is_causal"),
)


def split_attention(gm: fx.GraphModule) -> PassReport:
    """Split every `nn.MultiheadAttention` without masks whose attention weights are not used."""
    sites = []
    for node in list(gm.graph.nodes):
        attention = module_of(node)
        if type(attention) is not nn.MultiheadAttention:
            continue
        given = dict(zip(_ARGUMENTS, node.args, strict=False)) | node.kwargs
        reason = _unfit(node, attention, given)
        sites.append(Site(name_of(node), type(attention).__name__, not reason, reason))
        if not reason:
            _split(node, attention, given)
    if any(site.applied for site in sites):
        clean(gm)
    return PassReport("split_attention", tuple(sites))


def _unfit(node: fx.Node, attention: nn.MultiheadAttention, given: dict[str, Any]) -> str:
    if opaque_by_nature(attention) or "forward" in vars(attention):
        return "it has hooks or a forward of its own"
    if attention.training:
        return "it is in training mode: call model.eval() first"
    if not attention._qkv_same_embed_dim:
        return "its queries, keys and values have sizes of their own"
    if attention.bias_k is not None or attention.add_zero_attn:
        return "it adds a key of its own"
    masks = (given.get(name) for name in ("key_padding_mask", "attn_mask", "is_causal"))
    if any(mask is not None and mask is not False for mask in masks):
        return "it has a mask"
    if not all(_is_item(user, 0) or (_is_item(user, 1) and not user.users) for user in node.users):
        return "its weights are asked for"
    return ""


def _is_item(node: fx.Node, number: int) -> bool:
    return node.target is operator.getitem and bool(node.args[1] == number)


def _split(node: fx.Node, attention: nn.MultiheadAttention, given: dict[str, Any]) -> None:
    """Replace the call `node`; all steps count dimensions from the end, so a batch is optional."""
    graph, heads = node.graph, attention.num_heads
    # The sequence's place in [batch, sequence, 3, heads, channels], and the place it returns to.
    place, before = (-4, -3) if attention.batch_first else (0, 0)
    sources = [given[name] for name in _ARGUMENTS[:3]]
    parts: list[fx.Node] = []
    with graph.inserting_before(node):
        for source, same in itertools.groupby(sources):
            first, count = len(parts), len([*same])
            name = f"{node.target}_in{first}".replace(".", "_")
            rows = add_module(graph, name, _projection(attention, first, count), (source,))
            shape = (count, heads, attention.head_dim)
            apart = graph.call_method("unflatten", (rows, -1, shape))
            moved = graph.call_method("movedim", (apart, place, -2))
            each = graph.call_method("unbind", (moved, -4))
            parts += [graph.call_function(operator.getitem, (each, i)) for i in range(count)]
        mixed = graph.call_function(F.scaled_dot_product_attention, tuple(parts))
        back = graph.call_method("movedim", (mixed, -2, before))
        flat = graph.call_method("flatten", (back, -2))
        name = f"{node.target}_out".replace(".", "_")
        ending = _linear(attention.out_proj.weight, attention.out_proj.bias)
        result = add_module(graph, name, ending, (flat,))
    for user in list(node.users):
        if _is_item(user, 0):
            erase(user, result)
        else:
            graph.erase_node(user)
    graph.erase_node(node)


def _projection(attention: nn.MultiheadAttention, first: int, count: int) -> nn.Linear:
    """Make the layer for `count` of queries, keys and values, starting with number `first`."""
    weight, bias = attention.in_proj_weight, attention.in_proj_bias
    if count < 3:
        rows = slice(first * attention.embed_dim, (first + count) * attention.embed_dim)
        return _linear(weight[rows], None if bias is None else bias[rows])
    return _linear(weight, bias)


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    tensors = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    return layer(nn.Linear, tensors, {})  # type: ignore[no-any-return]
