"""What stands for a value while a model is traced.

It records what is done to it, and refuses what a graph could not repeat.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

TORCH = f"{Path(torch.__file__).parent}/"
OURS = f"{Path(__file__).parents[1]}/"
CONSTANT = "_tensor_constant"
"""How torch.fx calls the tensors that code made itself."""

# The machinery itself asks what a traced value is, and takes no harm from a plain answer.
_MACHINERY = (
    OURS,
    *(f"{TORCH}{part}" for part in ("fx/", "nn/parameter.py", "nn/modules/module.py")),
    *(f"{TORCH}{part}" for part in ("utils/", "overrides.py")),
    # What these take for a tensor they hand to C++, which crashes on anything else.
    *(f"{TORCH}{part}" for part in ("autograd/", "_functorch/")),
)


# What follows from shapes, types and devices alone, never from values or strides.
SHAPE_METHODS = {"size", "dim", "numel", "is_floating_point", "get_device"}
SHAPE_ATTRIBUTES = {"shape", "ndim", "dtype", "device", "is_cuda", "requires_grad", "layout"}


def _type_seen(proxy: Any) -> type:
    """What a traced value passes for. fx's own answers False to every `isinstance` of user code,
    and so takes one branch of it without a word."""
    file = sys._getframe(2).f_code.co_filename
    if file.startswith(_MACHINERY):
        return type(proxy)
    known: type | None = proxy._passes_for()
    if known is not None:
        return known
    raise fx.proxy.TraceError("it asks for the type of a traced value")


class Value(fx.Proxy):
    def __getattr__(self, key: str) -> Attribute:
        return Attribute(self, key)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # type: ignore[override]
        return _type_seen(self)

    def _passes_for(self) -> type | None:
        return Tensor if surely_tensor(self.node, self.tracer) else None

    # fx takes `x += y` for `x = x + y`, which leaves out what else sees the change of x.
    def __iadd__(self, other: Any) -> Any:
        return _write_in_place(self, "add", other)

    def __isub__(self, other: Any) -> Any:
        return _write_in_place(self, "sub", other)

    def __imul__(self, other: Any) -> Any:
        return _write_in_place(self, "mul", other)

    def __itruediv__(self, other: Any) -> Any:
        return _write_in_place(self, "truediv", other)


def _write_in_place(value: fx.Proxy, operation: str, other: Any) -> fx.Proxy:
    if surely_tensor(value.node, value.tracer):
        method = "div_" if operation == "truediv" else f"{operation}_"
        return value.tracer.create_proxy("call_method", method, (value, other), {})
    function = getattr(operator, operation)
    result = value.tracer.create_proxy("call_function", function, (value, other), {})
    result.node.meta["meant_in_place"] = True
    return result


def check_writes(graph: fx.Graph) -> None:
    """Refuse a graph in which `x += y` was taken for `x + y` though x may be seen again."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if not node.meta.get("meant_in_place") or _is_number(node.args[0]):
            continue
        if seen_later(node, order):
            raise fx.proxy.TraceError("it writes in place into a value that is used again")


def written_into(node: fx.Node) -> fx.Node | None:
    """The first argument of a method or function that writes into it."""
    first = node.args[0] if node.args else None
    name = str(node.target if node.op == "call_method" else getattr(node.target, "__name__", ""))
    if getattr(node.target, "__module__", "") == "_operator":  # where `and_` is `&`
        writes = name == "setitem"
    else:
        writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))
    return first if writes and isinstance(first, fx.Node) else None


def is_constant(node: fx.Node) -> bool:
    """Whether this is a tensor that code made, of nothing that was passed to it."""
    name = str(node.target).rpartition(".")[2]
    return node.op == "get_attr" and name.startswith(CONSTANT)


def seen_later(write: fx.Node, order: dict[fx.Node, int]) -> bool:
    """Whether anything shows that `write` changed its first argument, its own result aside."""
    base: Any = write.args[0]
    while _is_view(base) or written_into(base):
        base = base.args[0]
    if base.op in ("placeholder", "get_attr"):
        return True
    aliases = _aliases(base, write)
    return any(order[user] > order[write] for alias in aliases for user in alias.users)


def _aliases(base: fx.Node, write: fx.Node) -> Iterator[fx.Node]:
    """`base` and its views, but for what `write` returns."""
    yield base
    for user in base.users:
        views = _is_view(user) or written_into(user)
        if views and user is not write and user.args[0] is base:
            yield from _aliases(user, write)


def _is_number(node: fx.Node) -> bool:
    if getattr(node.target, "__name__", "") == "getitem":
        return _is_number(node.args[0])  # type: ignore[arg-type]
    return node.target in ("size", "dim", getattr)


def _is_view(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", node.target)
    return name in _VIEWS and bool(node.args) and isinstance(node.args[0], fx.Node)


_VIEWS = {"view", "reshape", "permute", "transpose", "flatten", "squeeze", "unsqueeze", "detach"}
_VIEWS |= {"expand", "narrow", "select", "unbind", "chunk", "split", "contiguous", "to", "float"}
_VIEWS |= {"getitem", "getattr", "dropout", "view_as", "reshape_as", "expand_as", "double", "half"}


class Attribute(fx.proxy.Attribute):
    def __getattr__(self, key: str) -> Attribute:
        return Attribute(self, key)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # type: ignore[override]
        return _type_seen(self)

    def _passes_for(self) -> type | None:
        return None


class TracedParameter(fx.proxy.ParameterProxy):
    """A parameter: recorded where it is used, known where only its shape is asked for."""

    def size(self, dim: int | None = None) -> Any:
        return self.param.size() if dim is None else self.param.size(dim)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # type: ignore[override]
        return _type_seen(self)

    def _passes_for(self) -> type | None:
        return nn.Parameter


def surely_tensor(node: fx.Node, tracer: fx.proxy.TracerBase) -> bool:
    if node.op == "placeholder":
        return node.type in (Tensor, "Tensor", "torch.Tensor")
    if node.op == "call_module":
        module = tracer.root.get_submodule(str(node.target))  # type: ignore[attr-defined]
        if isinstance(module, nn.MultiheadAttention):
            return False  # a pair
        home = definer(type(module), "forward").__module__.removeprefix("torch.nn.modules.")
        return home in _TENSOR_LAYERS and not getattr(module, "return_indices", False)
    name = getattr(node.target, "__name__", node.target)
    if getattr(node.target, "__module__", "") == "_operator":
        operands = [value for value in node.args if isinstance(value, fx.Node)]
        arithmetic = name in ("add", "sub", "mul", "truediv", "matmul")
        return arithmetic and any(surely_tensor(value, tracer) for value in operands)
    return name in _TENSOR_RESULTS and node.op in ("call_function", "call_method")


_TENSOR_LAYERS = {
    *("conv", "linear", "batchnorm", "dropout", "normalization", "padding", "instancenorm"),
    *("activation", "flatten", "upsampling", "pixelshuffle", "pooling", "channelshuffle"),
}

_TENSOR_RESULTS = {
    *("conv1d", "conv2d", "conv3d", "linear", "relu", "relu_", "silu", "gelu", "hardtanh", "cat"),
    *("add_", "sub_", "mul_", "div_", "batch_norm", "permute", "transpose", "reshape", "view"),
    *("flatten", "contiguous", "mean", "sigmoid", "stack", "matmul", "interpolate", "pad"),
    *("adaptive_avg_pool2d", "avg_pool2d", "max_pool2d", "dropout", "layer_norm", "softmax"),
}


def definer(kind: type, name: str) -> type:
    """The class that gives `kind` its attribute `name`; `object` if none does."""
    return next((base for base in kind.__mro__ if name in vars(base)), object)
