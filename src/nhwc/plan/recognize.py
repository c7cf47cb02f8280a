"""Turn graph nodes into layers: say what each computes in terms that kernels are chosen by."""

from __future__ import annotations

import inspect
import re
from typing import Any

from torch import Tensor, fx, nn

from ..graph.modules.folded import (
    FoldedConv1d,
    FoldedConv2d,
    FoldedConv3d,
    FoldedLinear,
    FrozenConv2d,
    PromotedConv1d,
    PromotedConv2d,
    PromotedConv3d,
    PromotedFrozenConv2d,
    PromotedLinear,
    SummedConv2d,
)
from ..graph.modules.layers import LAYERS, BatchNorm, Fused, Spread, StatisticsNorm
from ..graph.modules.leaves import computes_as, definer, runs_hooks
from ..graph.nodes.results import only_holds
from ..operators.activations import NamedActivation, of_module
from ..operators.kinds import torchs_name
from ..shown import described
from .padding import without_pads
from .recording import Record, Seen, seen_in
from .specs import Affine, Convolution, Layer, Linear, OperatorSpec

_BATCH_NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
"""By the dimensions of what they are given: rows, signals, images and volumes."""
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_OURS = (
    *(FoldedConv1d, FoldedConv2d, FoldedConv3d, FrozenConv2d),
    *(PromotedConv1d, PromotedConv2d, PromotedConv3d, PromotedFrozenConv2d, SummedConv2d),
)


def layers_of(graph: fx.GraphModule, record: Record) -> list[Layer]:
    """The layers of `graph` in an order in which they can run.

    What a plan knows is left out, what nobody reads, as an assertion on shapes, and what only holds
    results for the caller.
    """
    known = record.fixed | record.constant
    found = [
        _layer(graph, record, node)
        for node in graph.graph.nodes
        if node.op.startswith("call_") and node.users and node not in known
        if node in record.values and not only_holds(node)
    ]
    return without_pads(graph, record, found)


def is_opaque(graph: fx.GraphModule, node: fx.Node) -> bool:
    """Whether the node calls a user's module that could not be looked into."""
    if node.op != "call_module":
        return False
    module = graph.get_submodule(str(node.target))
    module = module.module if isinstance(module, Spread) else module
    ours = isinstance(module, LAYERS) or normalizes_rows(module)
    return not (ours or type(module).__module__.startswith("torch.nn."))


def normalizes_rows(module: object) -> bool:
    """Whether it is a layer norm or one by the root mean square, or computes as its base does."""
    return computes_as(module, nn.LayerNorm) or computes_as(module, nn.RMSNorm)


def _layer(graph: fx.GraphModule, record: Record, node: fx.Node) -> Layer:
    found = None
    if node.op == "call_module" and not node.kwargs:
        found = _weighted(graph, record, node)
    return found or _operator(graph, record, node)


def _weighted(graph: fx.GraphModule, record: Record, node: fx.Node) -> Layer | None:
    """The layer of a module with constants, alone or in a `Fused` module."""
    name = str(node.target)
    module = graph.get_submodule(name)
    op, activation = module, None
    if isinstance(module, Fused):
        op, activation = module.op, of_module(module.activation)
        if module.activation is not None and activation is None:
            return None
        name = f"{name}.op"
    if any(map(_hooked, (module, *module.children()))):
        return None
    if not all(isinstance(a, fx.Node) for a in node.args):
        return None
    inputs: tuple[fx.Node, ...] = node.args  # type: ignore[assignment]
    out, tensors = record.tensor(node), [record.tensor(one) for one in inputs]
    if out is None or any(t is None or t.dtype != out.dtype for t in tensors):
        return None
    first, *residuals = [one for one in tensors if one is not None]
    if 0 in (*first.shape, *out.shape):
        # Torch answers for layers without inputs or outputs; oneDNN has no kernel for them.
        return None
    if any(p.dtype != out.dtype for p in op.parameters()):
        return None
    spec = specified(op, first, residual=len(inputs) == 2, activation=activation)
    if spec is None or {spec.output, *(one.shape for one in residuals)} != {out.shape}:
        return None
    return Layer(spec, node, inputs, name)


def specified(
    op: Any, given: Seen, *, residual: bool = False, activation: NamedActivation | None = None
) -> Convolution | Linear | Affine | None:
    """What a layer with weights computes of what it is given; None for any other layer."""
    rank = len(given.shape)
    common: dict[str, Any] = {
        "input": given.shape,
        "residual": residual,
        "activation": activation,
        "dtype": given.dtype,
        "device": given.device,
    }
    if _is_convolution(op) and rank == op.weight.ndim:
        geometry = _geometry(op)
        if geometry is None:
            return None
        weighted: dict[str, Any] = {"weight": tuple(op.weight.shape), "bias": op.bias is not None}
        return Convolution(**common, **weighted, **geometry)
    ours = isinstance(op, PromotedLinear) or (isinstance(op, FoldedLinear) and rank == 2)
    if ours or computes_as(op, nn.Linear):
        return Linear(**common, weight=tuple(op.weight.shape), bias=op.bias is not None)
    if (
        type(op) in (BatchNorm, StatisticsNorm, _BATCH_NORMS.get(rank))
        and rank in _BATCH_NORMS
        and getattr(op, "single", None) != rank
        and not op.training
        and op.running_mean is not None
    ):
        return Affine(**common) if op.running_mean.dtype == common["dtype"] else None
    return None


def _is_convolution(op: Any) -> bool:
    """Whether it is a convolution of ours, or of torch, or a subclass that computes as its base."""
    if type(op) in _OURS:
        return True
    kind = next((kind for kind in _CONVOLUTIONS if isinstance(op, kind)), None)
    return kind is not None and all(
        getattr(type(op), name) is getattr(kind, name) for name in ("forward", "_conv_forward")
    )


def _geometry(conv: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> dict[str, Any] | None:
    """Stride, padding, dilation and groups; None where the padding is not zeros."""
    padding: Any = conv.padding
    behind = None
    if conv.padding_mode != "zeros":
        return None
    if padding == "valid":
        padding = tuple(0 for _ in conv.kernel_size)
    elif padding == "same":
        total = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
        padding = tuple(t // 2 for t in total)
        # Where the number is odd, the last zero stands behind.
        behind = tuple(t - t // 2 for t in total) if any(t % 2 for t in total) else None
    return {
        "behind": behind,
        "stride": tuple(conv.stride),
        "padding": tuple(padding),
        "dilation": tuple(conv.dilation),
        "groups": conv.groups,
    }


def _operator(graph: fx.GraphModule, record: Record, node: fx.Node) -> Layer:
    inputs = record.read_by(node)
    shown = fx.node.map_arg(
        (node.args, node.kwargs), lambda n: _Shown(_show(record.values.get(n, n.name)))
    )
    if node.op == "call_module":
        name = _told(graph.get_submodule(str(node.target)))
    else:
        name = torchs_name(node.target) or str(node.target)
    seen = [tensor for tensor in map(record.tensor, node.all_input_nodes) if tensor]
    device = seen[0].device if seen else "cpu"
    args, kwargs = shown
    words = [*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())]
    return Layer(OperatorSpec(name, ", ".join(words), device), node, inputs)


def _told(module: nn.Module) -> str:
    """What a module says of itself, and what a layer of torch is set to and does not say.

    >>> _told(nn.AvgPool2d(3, ceil_mode=True))
    'AvgPool2d(kernel_size=3, stride=3, padding=0) ceil_mode=True'
    """
    told = " ".join(described(module).split())
    # A subclass that only inherits `forward` may take other arguments than it sets.
    kind = definer(type(module), "forward")
    if not kind.__module__.startswith("torch.nn."):
        return told
    changed = [told]
    for name, setting in inspect.signature(kind).parameters.items():
        value = vars(module).get(name, setting.default)
        # What has no default is said always, and more than one number too.
        plain = setting.default is not setting.empty and type(value) in (bool, int, float, str)
        if plain and value != setting.default and not re.search(rf"\b{name}=", told):
            changed.append(f"{name}={value!r}")
    return " ".join(changed)


def _show(value: Any) -> str:
    """A shape and a type for a tensor, the same within brackets for several."""
    if isinstance(value, tuple):
        return f"({', '.join(map(_show, value))})"
    return str(seen_in(value) if isinstance(value, Tensor) else value)


class _Shown(str):
    """A tensor's shape within printed arguments, without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _hooked(module: nn.Module) -> bool:
    """Whether calling the module may be more than its class's forward with stored weights."""
    return runs_hooks(module) or hasattr(module, "parametrizations")
