"""Split torch's attention into linear layers and the attention between them.

As one call it uses torch's own matrix products. Split, each linear layer gets the kernel that is
fastest for it, and the last one can add the residual. torch has several such calls: the module,
the function that it calls, and the operators that torch.compile and torch.export make of it and of
`nn.TransformerEncoderLayer`.
"""

from __future__ import annotations

import inspect
import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ..graph import add_module, attribute, bound, clean, erase, module_of
from ..graph.leaves import opaque_by_nature
from ..graph.mended import Attention
from ..graph.report import PassReport, Site
from ._folding_sites import name_of
from .lift_functional import layer

_ATEN = torch.ops.aten
_MODULE = (
    *("query", "key", "value", "key_padding_mask", "need_weights", "attn_mask"),
    *("average_attn_weights", "is_causal"),
)
_FUNCTION = tuple(inspect.signature(F.multi_head_attention_forward).parameters)
_NATIVE = tuple(a.name for a in _ATEN._native_multi_head_attention.default._schema.arguments)
_ENCODER = tuple(a.name for a in _ATEN._transformer_encoder_layer_fwd.default._schema.arguments)
_FUNCTIONS = {
    F.multi_head_attention_forward: _FUNCTION,
    torch._native_multi_head_attention: _NATIVE,
    _ATEN._native_multi_head_attention.default: _NATIVE,
    torch._transformer_encoder_layer_fwd: _ENCODER,
    _ATEN._transformer_encoder_layer_fwd.default: _ENCODER,
}
_INPUTS = ("query", "key", "value", "src")
_MASKS = ("key_padding_mask", "attn_mask", "mask", "is_causal")


@dataclass(frozen=True)
class _Weights:
    """The matrix of queries, keys and values, that of the end, and how many heads share them."""

    heads: int
    matrix: Tensor
    bias: Tensor | None
    out_matrix: Tensor
    out_bias: Tensor | None
    batch_first: bool


def split_attention(gm: fx.GraphModule) -> PassReport:
    """Split all attention without masks whose weights are constant and whose scores are unused."""
    sites = []
    for node in list(gm.graph.nodes):
        attention = module_of(node)
        if type(attention) is nn.MultiheadAttention:
            given = bound(node, _MODULE)
            reason = _unfit_module(attention) or _unfit_call(node, given)
        elif node.op == "call_function" and node.target in _FUNCTIONS:
            given = bound(node, _FUNCTIONS[node.target])
            reason = _unfit_function(gm, given) or _unfit_call(node, given)
        else:
            continue
        layered = "src" in given
        kind = "TransformerEncoderLayer" if layered else "MultiheadAttention"
        sites.append(Site(name_of(node), kind, not reason, reason))
        if reason:
            continue
        with gm.graph.inserting_before(node):
            if layered:
                erase(node, _encoder(gm, node, given))
            else:
                sources = [given[name] for name in _INPUTS[:3]]
                weights = _weights(gm, attention, given)
                _replace_item(node, _attention(node, sources, weights))
    if any(site.applied for site in sites):
        clean(gm)
    return PassReport("split_attention", tuple(sites))


def _unfit_module(attention: nn.MultiheadAttention) -> str:
    if opaque_by_nature(attention) or "forward" in vars(attention):
        return "it has hooks or a forward of its own"
    if attention.training:
        return "it is in training mode: call model.eval() first"
    if not attention._qkv_same_embed_dim:
        return "its queries, keys and values have sizes of their own"
    if attention.bias_k is not None or attention.add_zero_attn:
        return "it adds a key of its own"
    return ""


def _unfit_function(gm: fx.GraphModule, given: Mapping[str, Any]) -> str:
    if given.get("dropout_p") and given.get("training", True):
        return "it is in training mode: call model.eval() first"
    if given.get("use_separate_proj_weight"):
        return "its queries, keys and values have sizes of their own"
    if given.get("add_zero_attn") or given.get("bias_k") is not None:
        return "it adds a key of its own"
    if any(given.get(name) is not None for name in ("static_k", "static_v")):
        return "its keys or values are given"
    for name, value in given.items():
        if name in (*_INPUTS, *_MASKS) or not isinstance(value, fx.Node):
            continue
        if value.op != "get_attr" or not isinstance(attribute(gm, str(value.target)), Tensor):
            return f"its {name} is computed while the model runs"
    return ""


def _unfit_call(node: fx.Node, given: Mapping[str, Any]) -> str:
    masks = (given.get(name) for name in _MASKS)
    if any(mask is not None and mask is not False for mask in masks):
        return "it has a mask"
    if "src" in given:
        return ""
    if not all(_is_item(user, 0) or (_is_item(user, 1) and not user.users) for user in node.users):
        return "its weights are asked for"
    return ""


def _is_item(node: fx.Node, number: int) -> bool:
    return node.target is operator.getitem and bool(node.args[1] == number)


def _weights(gm: fx.GraphModule, attention: Any, given: Mapping[str, Any]) -> _Weights:
    """The weights of a call of the module `attention`, or of a function if there is none."""
    if attention is None:
        return _of_function(gm, given)
    return _Weights(
        heads=attention.num_heads,
        matrix=attention.in_proj_weight,
        bias=attention.in_proj_bias,
        out_matrix=attention.out_proj.weight,
        out_bias=attention.out_proj.bias,
        batch_first=attention.batch_first,
    )


def _of_function(gm: fx.GraphModule, given: Mapping[str, Any]) -> _Weights:
    def tensor(*names: str) -> Any:
        """The tensor of the first of these names that the call has."""
        node = next(given[name] for name in names if name in given)
        return None if node is None else attribute(gm, str(node.target))

    return _Weights(
        heads=next(given[name] for name in ("num_heads", "num_head") if name in given),
        matrix=tensor("in_proj_weight", "qkv_weight"),
        bias=tensor("in_proj_bias", "qkv_bias"),
        out_matrix=tensor("out_proj_weight", "proj_weight"),
        out_bias=tensor("out_proj_bias", "proj_bias"),
        batch_first="in_proj_weight" not in given,
    )


def _encoder(gm: fx.GraphModule, node: fx.Node, given: Mapping[str, Any]) -> fx.Node:
    """Lay out `nn.TransformerEncoderLayer`: attention, then two linear layers, each with a norm."""

    def add(name: str, module: nn.Module, x: fx.Node) -> fx.Node:
        return add_module(gm.graph, f"{node.name}_{name}", module, (x,))

    def tensors(name: str, number: int) -> dict[str, Tensor]:
        return {
            kind: attribute(gm, str(given[f"{name}_{kind}_{number}"].target))
            for kind in ("weight", "bias")
        }

    def norm(number: int, x: fx.Node) -> fx.Node:
        options = {"normalized_shape": (given["embed_dim"],), "eps": given["eps"]}
        return add(f"norm{number}", layer(nn.LayerNorm, tensors("norm", number), options), x)

    def attend(x: fx.Node) -> fx.Node:
        return _attention(node, [x, x, x], _of_function(gm, given))

    def feed(x: fx.Node) -> fx.Node:
        wide = add("linear1", layer(nn.Linear, tensors("ffn", 1), {}), x)
        active = gm.graph.call_function(F.gelu if given["use_gelu"] else F.relu, (wide,))
        return add("linear2", layer(nn.Linear, tensors("ffn", 2), {}), active)

    x: fx.Node = given["src"]
    for number, part in ((1, attend), (2, feed)):
        if given["norm_first"]:
            x = gm.graph.call_function(operator.add, (x, part(norm(number, x))))
        else:
            x = norm(number, gm.graph.call_function(operator.add, (x, part(x))))
    return x


def _attention(node: fx.Node, sources: Sequence[fx.Node], weights: _Weights) -> fx.Node:
    """Attention in single steps, whose dimensions count from the end: a batch is optional."""
    graph, heads = node.graph, weights.heads
    # The sequence's place in [batch, sequence, 3, heads, channels], and the place it returns to.
    place, before = (-4, -3) if weights.batch_first else (0, 0)
    prefix = str(node.target).replace(".", "_") if node.op == "call_module" else node.name
    ending = _linear(weights.out_matrix, weights.out_bias)
    if len({*sources}) == 1:
        rows = add_module(graph, f"{prefix}_in0", _projection(weights, 0, 3), (sources[0],))
        mixing = Attention(heads, weights.batch_first)
        mixed = add_module(graph, f"{prefix}_mixed", mixing, (rows,))
        return add_module(graph, f"{prefix}_out", ending, (mixed,))
    parts: list[fx.Node] = []
    for source, same in itertools.groupby(sources):
        first, count = len(parts), len([*same])
        rows = add_module(
            graph, f"{prefix}_in{first}", _projection(weights, first, count), (source,)
        )
        shape = (count, heads, weights.matrix.shape[1] // heads)
        apart = graph.call_method("unflatten", (rows, -1, shape))
        moved = graph.call_method("movedim", (apart, place, -2))
        each = graph.call_method("unbind", (moved, -4))
        parts += [graph.call_function(operator.getitem, (each, i)) for i in range(count)]
    mixed = graph.call_function(F.scaled_dot_product_attention, tuple(parts))
    back = graph.call_method("movedim", (mixed, -2, before))
    flat = graph.call_method("flatten", (back, -2))
    return add_module(graph, f"{prefix}_out", ending, (flat,))


def _projection(weights: _Weights, first: int, count: int) -> nn.Linear:
    """Make the layer for `count` of queries, keys and values, starting with number `first`."""
    matrix, bias = weights.matrix, weights.bias
    if count < 3:
        width = matrix.shape[1]
        rows = slice(first * width, (first + count) * width)
        return _linear(matrix[rows], None if bias is None else bias[rows])
    return _linear(matrix, bias)


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    tensors = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    return layer(nn.Linear, tensors, {})  # type: ignore[no-any-return]


def _replace_item(node: fx.Node, result: fx.Node) -> None:
    """Put `result` in the place of the first item of what the call `node` returns."""
    for user in list(node.users):
        if _is_item(user, 0):
            erase(user, result)
        else:
            node.graph.erase_node(user)
    node.graph.erase_node(node)
