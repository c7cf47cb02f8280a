"""Split torch's attention into linear layers and the attention between them.

As one call it uses torch's own matrix products. Split, each linear layer gets the kernel that is
fastest for it, and the last one can add the residual. torch has several such calls: the module,
the function that it calls, and the operators that torch.compile and torch.export make of it and of
`nn.TransformerEncoderLayer`. Masks are added to the scores, where a trace noted how large they are.
"""

from __future__ import annotations

import inspect
import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from ..graph import add_module, attribute, bound, erase, module_of
from ..graph.modules.leaves import unlike_class
from ..graph.modules.mended import Attention, SpelledAttention
from ..graph.nodes.seen import seen_at
from ..graph.report import Opaque, PassReport, Site
from ._attention_masks import MASKS, UNMASKED, Masks, bias_of, has_masks, masks_of
from ._folding_sites import name_of, written_between
from ._matching import is_item
from ._reporting import reported
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
_OPERATORS = tuple(target for target, names in _FUNCTIONS.items() if names is not _FUNCTION)
_INPUTS = ("query", "key", "value", "src")
_PACKED = ("in_proj_weight",)
_APART = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
_UNKNOWN = "the sizes of its mask are not known"


@dataclass(frozen=True)
class _Weights:
    """The matrices of queries, keys and values, that of the end, and how many heads share them.

    The three are one, or each stands alone, if what they are given has sizes of its own.
    """

    heads: int
    matrices: tuple[Tensor, ...]
    bias: Tensor | None
    out_matrix: Tensor
    out_bias: Tensor | None
    batch_first: bool

    @property
    def width(self) -> int:
        """Of queries, keys and values; the last layer may return another, as in CLIP's pools."""
        return self.out_matrix.size(1)


def split_attention(gm: fx.GraphModule) -> PassReport:
    """Split all attention whose weights are constant and whose scores are unused."""
    sites = []
    biases: dict[Any, fx.Node | None] = {}
    for node, given, reason in _calls(gm):
        layered = "src" in given
        kind = "TransformerEncoderLayer" if layered else "MultiheadAttention"
        sites.append(Site(name_of(node), kind, not reason, reason))
        if reason:
            continue
        with gm.graph.inserting_before(node):
            if layered:
                erase(node, _encoder(gm, node, given))
            else:
                _replace_item(node, _masked(gm, node, given, biases))
    return reported(gm, "split_attention", sites)


def attention_of_unknown_sizes(gm: fx.GraphModule) -> tuple[Opaque, ...]:
    """What this pass leaves alone only because no trace noted how large its masks are."""
    left = [node for node, _, reason in _calls(gm) if reason == _UNKNOWN]
    return tuple(Opaque(name_of(node), "MultiheadAttention", _UNKNOWN) for node in left)


def _calls(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, dict[str, Any], str]]:
    """Each call of attention, its arguments by name, and why it is left alone, if it is.

    A call is looked at once those before it may have been replaced: it may read what they returned.
    """
    for node in list(gm.graph.nodes):
        attention = module_of(node)
        if type(attention) is nn.MultiheadAttention:
            given, reason = bound(node, _MODULE), _unfit_module(attention)
        elif node.op == "call_function" and node.target in _FUNCTIONS:
            given = bound(node, _FUNCTIONS[node.target])
            reason = _unfit_function(gm, given)
        else:
            continue
        yield node, given, reason or _unfit_call(gm, node, given)


def _unfit_module(attention: nn.MultiheadAttention) -> str:
    if unlike_class(attention):
        return "it has hooks or a forward of its own"
    if attention.training:
        return "it is in training mode: call model.eval() first"
    if attention.bias_k is not None or attention.add_zero_attn:
        return "it adds a key of its own"
    return ""


def _unfit_function(gm: fx.GraphModule, given: Mapping[str, Any]) -> str:
    if given.get("dropout_p") and given.get("training", True):
        return "it is in training mode: call model.eval() first"
    if given.get("add_zero_attn") or given.get("bias_k") is not None:
        return "it adds a key of its own"
    if any(given.get(name) is not None for name in ("static_k", "static_v")):
        return "its keys or values are given"
    for name, value in given.items():
        if name in (*_INPUTS, *MASKS) or not isinstance(value, fx.Node):
            continue
        if value.op != "get_attr" or not isinstance(attribute(gm, str(value.target)), Tensor):
            return f"its {name} is computed while the model runs"
    return ""


def _unfit_call(gm: fx.GraphModule, node: fx.Node, given: Mapping[str, Any]) -> str:
    if node.target in _OPERATORS and has_masks(given):
        return "it has a mask"
    if "src" in given:
        return ""
    if not all(is_item(user, 0) or (is_item(user, 1) and not user.users) for user in node.users):
        return "its weights are asked for"
    return "" if masks_of(gm, given, module_of(node)) else _UNKNOWN


def _weights(gm: fx.GraphModule, attention: Any, given: Mapping[str, Any]) -> _Weights:
    """The weights of a call of the module `attention`, or of a function if there is none."""
    if attention is None:
        return _of_function(gm, given)
    return _Weights(
        heads=attention.num_heads,
        matrices=tuple(
            getattr(attention, name)
            for name in (_PACKED if attention._qkv_same_embed_dim else _APART)
        ),
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

    names = _APART if given.get("use_separate_proj_weight") else _PACKED
    return _Weights(
        heads=next(given[name] for name in ("num_heads", "num_head") if name in given),
        matrices=tuple(tensor(name, "qkv_weight") for name in names),
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


def _masked(
    gm: fx.GraphModule,
    node: fx.Node,
    given: Mapping[str, Any],
    biases: dict[Any, fx.Node | None],
) -> fx.Node:
    """Attention of the module or the function that `node` calls; layers share what is added."""
    attention = module_of(node)
    weights = _weights(gm, attention, given)
    sources = [given[name] for name in _INPUTS[:3]]
    masks = masks_of(gm, given, attention) or UNMASKED
    key = (masks.pairs, masks.keys, weights.heads, seen_at(sources[0]))
    bias = biases.get(key)
    if bias is None or written_between((masks.pairs, masks.keys), bias, node):
        bias = biases[key] = bias_of(gm, sources[0], masks, weights.heads)
    return _attention(node, sources, weights, masks, bias)


def _attention(
    node: fx.Node,
    sources: Sequence[fx.Node],
    weights: _Weights,
    masks: Masks = UNMASKED,
    bias: fx.Node | None = None,
) -> fx.Node:
    """Attention in single steps, whose dimensions count from the end: a batch is optional."""
    graph, heads, depth = node.graph, weights.heads, weights.width // weights.heads
    # The sequence's place in [batch, sequence, 3, heads, channels], and the place it returns to.
    place, before = (-4, -3) if weights.batch_first else (0, 0)
    prefix = str(node.target).replace(".", "_") if node.op == "call_module" else node.name
    ending = _linear(weights.out_matrix, weights.out_bias)
    if masks == UNMASKED and len({*sources}) == 1:
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
        apart = graph.call_method("unflatten", (rows, -1, (count, heads, depth)))
        moved = graph.call_method("movedim", (apart, place, -2))
        each = graph.call_method("unbind", (moved, -4))
        parts += [graph.call_function(operator.getitem, (each, i)) for i in range(count)]
    if masks.safe:
        said: dict[str, Any] = {"attn_mask": bias, "is_causal": masks.causal}
        mixed = graph.call_function(F.scaled_dot_product_attention, tuple(parts), said)
    else:
        query, keys, value = parts
        turned = graph.call_method("transpose", (keys, -2, -1))
        spelled = SpelledAttention(depth**-0.5)
        mixed = add_module(graph, f"{prefix}_mixed", spelled, (query, turned, value, bias))
    back = graph.call_method("movedim", (mixed, -2, before))
    flat = graph.call_method("flatten", (back, -2))
    return add_module(graph, f"{prefix}_out", ending, (flat,))


def _projection(weights: _Weights, first: int, count: int) -> nn.Linear:
    """Make the layer for `count` of queries, keys and values, starting with number `first`."""
    width, whole = weights.width, count == 3
    rows = slice(first * width, (first + count) * width)
    bias = weights.bias if whole or weights.bias is None else weights.bias[rows]
    if len(weights.matrices) == 1:
        return _linear(weights.matrices[0] if whole else weights.matrices[0][rows], bias)
    some = weights.matrices[first : first + count]
    return _linear(torch.cat(some) if count > 1 else some[0], bias)


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    tensors = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
    return layer(nn.Linear, tensors, {})  # type: ignore[no-any-return]


def _replace_item(node: fx.Node, result: fx.Node) -> None:
    """Put `result` in the place of the first item of what the call `node` returns."""
    for user in list(node.users):
        if is_item(user, 0):
            # What was noted of its sizes, the next attention asks for.
            result.meta = dict(user.meta)
            erase(user, result)
        else:
            node.graph.erase_node(user)
    node.graph.erase_node(node)
