"""Traced values, which stand for tensors while a model is traced.

They record the calls made on them, and refuse those that a graph could not repeat.
"""

from __future__ import annotations

import operator
import sys
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...operators import activations
from ..modules.leaves import definer
from ..nodes.memory import destination, seen_later
from ..nodes.shapes import is_size
from ..plain import all_plain, as_plain
from .asked import Asked, asking
from .assigned import assigned
from .memos import DeviceKey, uses_as_key


class TracedValue(Asked, fx.Proxy):
    # numpy leaves `numpy.float64(2) * x` to whatever has a higher priority than its own arrays.
    __array_priority__ = Tensor.__array_priority__

    def __getattr__(self, key: str) -> Attribute:
        self._has(key, asking())
        return Attribute(self, key)

    def _passes_for(self) -> type | None:
        return Tensor if surely_tensor(self.node, self.tracer) else None

    def __setitem__(self, key: Any, value: Any) -> None:
        tracer: Any = self.tracer
        key = all_plain(key)
        by_place = type(key) in (int, slice)
        if by_place and self._passes_for() is not Tensor and may_be_list(self.node, tracer):
            raise fx.proxy.TraceError("it assigns to elements of what may be a list")
        tracer.rename(self, assigned(self, key, as_plain(value)))

    # fx takes `x += y` for `x = x + y`, so other values that share memory with x miss the change.
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
    """Refuse a graph in which `x += y` was recorded as `x + y` although x is used again."""
    order = {node: place for place, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        meant = node.meta.get("meant_in_place")
        if not meant or is_size(destination(node)):
            continue
        if [*node.users] != [meant] and seen_later(node, order):
            raise fx.proxy.TraceError("it writes in place into a value that is used again")


class Attribute(Asked, fx.proxy.Attribute):
    def __getattr__(self, key: str) -> Attribute:
        self._has(key, asking())
        return Attribute(self, key)

    def __str__(self) -> str:
        frame = sys._getframe(1)
        if object.__getattribute__(self, "attr") == "device" and uses_as_key(frame):
            return DeviceKey("a traced device")
        return self._as_text(frame)

    def _passes_for(self) -> type | None:
        owner = object.__getattribute__(self, "root")._passes_for()
        key = object.__getattribute__(self, "attr")
        return _ATTRIBUTES.get(key) if owner is Tensor else None


_ATTRIBUTES: dict[str, type] = {
    "shape": torch.Size,
    "dtype": torch.dtype,
    "device": torch.device,
    "layout": torch.layout,
    **dict.fromkeys(("T", "H", "mT", "mH", "data", "real", "imag"), Tensor),
}


class TracedParameter(Asked, fx.proxy.ParameterProxy):
    """A traced parameter: its uses are recorded, but questions for its shape get plain numbers."""

    _is_param = True  # nn.Parameter's `isinstance` reads this attribute.

    def __getattr__(self, key: str) -> Attribute:
        self._has(key, asking())
        return Attribute(self, key)

    def size(self, dim: int | None = None) -> Any:
        return self.param.size() if dim is None else self.param.size(dim)

    def __len__(self) -> int:
        return len(self.param)

    def _passes_for(self) -> type | None:
        return nn.Parameter


def surely_tensor(node: fx.Node, tracer: fx.proxy.TracerBase) -> bool:
    if node.op == "placeholder":
        believed = tracer.believed  # type: ignore[attr-defined]
        return believed and node.type in (Tensor, "Tensor", "torch.Tensor")
    if node.op == "call_module":
        module = tracer.root.get_submodule(str(node.target))  # type: ignore[attr-defined]
        if isinstance(module, nn.MultiheadAttention):
            return False  # It returns a pair.
        home = definer(type(module), "forward").__module__.removeprefix("torch.nn.modules.")
        return home in _TENSOR_LAYERS and not getattr(module, "return_indices", False)
    name = getattr(node.target, "__name__", node.target)
    if getattr(node.target, "__module__", "") == "_operator":
        operands = [value for value in node.args if isinstance(value, fx.Node)]
        arithmetic = name in ("add", "sub", "mul", "truediv", "matmul")
        return arithmetic and any(surely_tensor(value, tracer) for value in operands)
    return name in _TENSOR_RESULTS and node.op in ("call_function", "call_method")


def may_be_list(node: fx.Node, tracer: Any) -> bool:
    """Whether this comes from a part that stays a call, which may return anything, as it is.

    What is a slice of it, or was added to it, is a list if that is one.
    """
    if node.op == "call_module":
        return node.target in tracer.opaque
    if getattr(node.target, "__name__", "") not in ("getitem", "add", "mul"):
        return False
    tensor = any(surely_tensor(one, tracer) for one in node.args if isinstance(one, fx.Node))
    return not tensor and any(may_be_list(one, tracer) for one in node.all_input_nodes)


_TENSOR_LAYERS = {
    *("conv", "linear", "batchnorm", "dropout", "normalization", "padding", "instancenorm"),
    *("activation", "flatten", "upsampling", "pixelshuffle", "pooling", "channelshuffle"),
}

_TENSOR_RESULTS = {
    *activations.NAMES,
    *("conv1d", "conv2d", "conv3d", "linear", "cat", "stack", "matmul", "interpolate", "pad"),
    *("add_", "sub_", "mul_", "div_", "batch_norm", "permute", "transpose", "reshape", "view"),
    *("flatten", "contiguous", "mean", "adaptive_avg_pool2d", "avg_pool2d", "max_pool2d"),
    *("reshape_as", "view_as", "dropout", "layer_norm", "softmax"),
}
