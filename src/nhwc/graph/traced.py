"""Traced values, which stand for tensors while a model is traced.

They record the calls made on them, and refuse those that a graph could not repeat.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..operators import activations
from .asked import Asked, asking
from .assigned import assigned
from .layers import as_elements
from .plain import all_plain, as_plain
from .shapes import is_size
from .writes import may_be_view, result_may_be_view, targets_of

CONSTANT = "_tensor_constant"
"""The beginning of the names that torch.fx gives to tensors made by the traced code."""


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
        tracer.rename(self, assigned(self, all_plain(key), as_plain(value)))

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
        if not meant or is_size(_target(node)):
            continue
        if [*node.users] != [meant] and seen_later(node, order):
            raise fx.proxy.TraceError("it writes in place into a value that is used again")


def is_constant(node: fx.Node) -> bool:
    """Whether this is a tensor that the code made without its inputs."""
    name = str(node.target).rpartition(".")[2]
    return node.op == "get_attr" and name.startswith(CONSTANT)


def seen_later(
    write: fx.Node, order: dict[fx.Node, int] | None = None, *, besides: fx.Node | None = None
) -> bool:
    """Whether anything but the result of `write`, and the value `besides`, shows what it wrote.

    `order` has the place of each node in the graph, for callers who ask about many.
    """
    order = order or {node: place for place, node in enumerate(write.graph.nodes)}
    found, todo = {write}, [_target(write)]
    while todo:
        node = todo.pop()
        if not isinstance(node, fx.Node) or node in found:
            continue
        if node.op in ("placeholder", "get_attr") and not is_constant(node):
            return True
        later = {user for user in node.users if order[user] > order[write]}
        views = [user for user in node.users if node in shared(user)]
        if node is besides:
            # What is made of it later is made of the result.
            views = [user for user in views if user not in later]
        elif not all(map(is_size, later)):
            return True
        found.add(node)
        todo += [*shared(node), *views]
    return False


def _target(write: fx.Node) -> Any:
    """What `write` writes into; `x[:] = y` is said as y in the shape of x."""
    return write.args[1] if write.target is as_elements else write.args[0]


def shared(node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose memory the result of `node` may share."""
    if is_size(node):
        return []
    if node.op == "call_module":
        # Passes add layers that no trace has seen.
        known = node.meta.get("may_return_input")
        return node.all_input_nodes if known or (known is None and result_may_be_view(node)) else []
    name = str(getattr(node.target, "__name__", node.target))
    if node.op == "call_method" and name in _LIKE_ANOTHER:
        return node.all_input_nodes[:1]
    # A view may be of any argument: the first of `einsum` is text, and some come by name.
    if may_be_view(node.target if node.op == "call_function" else name):
        return [value for value in node.all_input_nodes if not is_size(value)]
    return targets_of(node)


_LIKE_ANOTHER = ("to", "type_as", "view_as", "expand_as", "reshape_as")
"""They look at the type or shape of their second argument, and may return a view of the first."""


class Attribute(Asked, fx.proxy.Attribute):
    def __getattr__(self, key: str) -> Attribute:
        self._has(key, asking())
        return Attribute(self, key)

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


_TENSOR_LAYERS = {
    *("conv", "linear", "batchnorm", "dropout", "normalization", "padding", "instancenorm"),
    *("activation", "flatten", "upsampling", "pixelshuffle", "pooling", "channelshuffle"),
}

_TENSOR_RESULTS = {
    *activations.NAMES,
    *("conv1d", "conv2d", "conv3d", "linear", "cat", "stack", "matmul", "interpolate", "pad"),
    *("add_", "sub_", "mul_", "div_", "batch_norm", "permute", "transpose", "reshape", "view"),
    *("flatten", "contiguous", "mean", "adaptive_avg_pool2d", "avg_pool2d", "max_pool2d"),
    *("dropout", "layer_norm", "softmax"),
}


def definer(kind: type, name: str) -> type:
    """Return the class that defines the attribute `name` of `kind`; `object` if none does."""
    return next((base for base in kind.__mro__ if name in vars(base)), object)
