"""Symbolic tracing that gives up on one module at a time, and says why."""

from __future__ import annotations

import operator
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

_TORCH = f"{Path(torch.__file__).parent}/"
# The machinery itself asks what a traced value is, and takes no harm from a plain answer.
_MACHINERY = tuple(
    f"{_TORCH}{part}"
    for part in ("fx/", "nn/parameter.py", "nn/modules/module.py", "utils/", "overrides.py")
)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, fx.GraphModule)


class Tracer(fx.Tracer):
    """torch.fx's tracer, with each module that cannot be traced kept as one call.

    `opaque` maps the path of each such module to the reason.
    """

    def __init__(self) -> None:
        super().__init__(autowrap_functions=_untraceable_functions(), param_shapes_constant=True)
        self.opaque: dict[str, str] = {}

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self.opaque or is_leaf(m)

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        path = self.path_of_module(m)
        reason = opaque_by_nature(m)
        if reason is not None:
            self.opaque[path] = reason
        if self.is_leaf_module(m, path):
            return super().call_module(m, forward, args, kwargs)
        depth = len(self.module_stack)
        before = next(iter(reversed(self.graph.nodes)), None)
        state = State(m)
        try:
            result = super().call_module(m, forward, args, kwargs)
            state.check()
            return result
        except Exception as error:
            state.restore()
            self._erase_after(before)
            while len(self.module_stack) > depth:
                self.module_stack.popitem()
            self.opaque[path] = explain(error)
            return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        found = super().getattr(attr, attr_val, parameter_proxy_cache)
        if type(found) is fx.proxy.ParameterProxy:
            return _Parameter(self, found.node, found.name, found.param)
        return found

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, fx.Proxy) and a.node._erased:
            raise fx.proxy.TraceError("a list or dict was filled by a part that cannot be traced")
        return super().create_arg(a)

    def _erase_after(self, before: fx.Node | None) -> None:
        for node in reversed(list(self.graph.nodes)):
            if node is before:
                return
            self.graph.erase_node(node)


def is_leaf(module: nn.Module) -> bool:
    """Whether a graph calls this module as a whole: torch's own layers and ours, by behaviour.

    A subclass that inherits `forward` is the layer it inherits from; one that overrides it is
    user code, and is traced.
    """
    if isinstance(module, _CONTAINERS) or "forward" in vars(module):
        return False
    home = definer(type(module), "forward").__module__
    if not home.startswith(("torch.nn.", "torch.ao.nn.", "nhwc.layers", "nhwc.mended")):
        return is_frozen_batch_norm(module)
    helper = definer(type(module), "_conv_forward")
    return helper is object or helper.__module__.startswith("torch.")


def is_frozen_batch_norm(module: nn.Module) -> bool:
    """Whether this is torchvision's FrozenBatchNorm2d (which is never imported for the answer)."""
    misc = sys.modules.get("torchvision.ops.misc")
    if misc is None:
        return False
    return definer(type(module), "forward") is misc.FrozenBatchNorm2d


def opaque_by_nature(module: nn.Module) -> str | None:
    """Why no graph may look inside `module`, whatever its code; None if it may."""
    if isinstance(module, torch.jit.ScriptModule):
        return "it is a TorchScript module"
    if any(vars(module).get(kind) for kind in _HOOKS):
        return "it has hooks, which a graph of its inside would not call"
    return None


def explain(error: Exception) -> str:
    """Say in a line why tracing failed, and where in the user's code."""
    text = str(error).strip().splitlines()
    first = text[0] if text else ""
    for sign, plain in _PLAIN.items():
        if sign in first:
            first = plain
            break
    else:
        if not isinstance(error, fx.proxy.TraceError):
            first = f"{type(error).__name__}: {first}"
    where = _user_line(error)
    return f"{first} ({where})" if where else first


_PLAIN = {
    "inputs to control flow": "it branches on data",
    "cannot be iterated": "it loops over data",
    "support for arbitrary number of arguments": "it unpacks a traced value with *",
    "'len' is not supported": "it uses the length of a traced value",
    "cannot be interpreted as an integer": "it counts with a traced value",
    "must be real number, not": "it computes with a traced value in plain Python",
}


def _user_line(error: Exception) -> str:
    frame, found = error.__traceback__, ""
    while frame is not None:
        file = frame.tb_frame.f_code.co_filename
        if not file.startswith((_TORCH, str(Path(__file__).parent), "<")):
            found = f"{Path(file).name}:{frame.tb_lineno}"
        frame = frame.tb_next
    return found


class State:
    """What a forward pass may change besides its result, so that no graph loses it silently."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.attributes = {
            key: list(value) if isinstance(value, list | set) else value
            for key, value in vars(module).items()
        }
        self.slots = {**module._parameters, **module._buffers}
        self.versions = list(_versions(module))
        self.random = torch.get_rng_state(), random.getstate()

    def check(self) -> None:
        for key, value in vars(self.module).items():
            if key.startswith("_tensor_constant"):  # set by the tracer itself
                continue
            old = self.attributes.get(key, self)
            same = list(value) == old if isinstance(value, list | set) else value is old
            if not same:
                raise fx.proxy.TraceError(f"its forward changes self.{key}")
        slots = {**self.module._parameters, **self.module._buffers}
        if any(value is not self.slots.get(key, self) for key, value in slots.items()):
            raise fx.proxy.TraceError("its forward replaces a parameter or buffer")
        if self.versions != list(_versions(self.module)):
            raise fx.proxy.TraceError("its forward writes into a parameter or buffer")
        state, plain = torch.get_rng_state(), random.getstate()
        if plain != self.random[1] or not torch.equal(state, self.random[0]):
            raise fx.proxy.TraceError("its forward draws random numbers that a graph would freeze")

    def restore(self) -> None:
        for key in set(vars(self.module)) - set(self.attributes):
            del vars(self.module)[key]
        for key, old in self.attributes.items():
            now = vars(self.module).get(key)
            if isinstance(now, list):
                now[:] = old
            elif isinstance(now, set):
                now.clear()
                now.update(old)
            else:
                vars(self.module)[key] = old


def _versions(module: nn.Module) -> Iterator[int]:
    for tensor in (*module.parameters(), *module.buffers()):
        if not tensor.is_inference():
            yield tensor._version


def _type_seen(proxy: fx.Proxy, tensor: bool) -> type:
    """What a traced value passes for. fx's own answers False to every `isinstance` of user code,
    and so takes one branch of it without a word."""
    file = sys._getframe(2).f_code.co_filename
    if file == __file__ or file.startswith(_MACHINERY):
        return type(proxy)
    if tensor:
        return nn.Parameter if isinstance(proxy, fx.proxy.ParameterProxy) else Tensor
    raise fx.proxy.TraceError("it asks for the type of a traced value")


class _Value(fx.Proxy):
    def __getattr__(self, key: str) -> _Attribute:
        return _Attribute(self, key)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # type: ignore[override]
        return _type_seen(self, _surely_tensor(self.node, self.tracer))

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
    if _surely_tensor(value.node, value.tracer):
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
        if not node.meta.get("meant_in_place"):
            continue
        written = node.args[0]
        again = any(order[user] > order[node] for user in written.users)
        number = written.target in ("size", "dim", getattr)
        if not number and (again or written.op in ("placeholder", "get_attr") or _views(written)):
            raise fx.proxy.TraceError("it writes in place into a value that is used again")


def _views(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", node.target)
    if name == "getitem":
        source = node.args[0]
        return not (isinstance(source, fx.Node) and source.target in ("size", getattr))
    return name in _VIEWS


_VIEWS = {"view", "reshape", "permute", "transpose", "flatten", "squeeze", "unsqueeze", "detach"}
_VIEWS |= {"expand", "narrow", "select", "unbind", "chunk", "split", "contiguous", "to", "float"}


class _Attribute(fx.proxy.Attribute):
    def __getattr__(self, key: str) -> _Attribute:
        return _Attribute(self, key)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # type: ignore[override]
        return _type_seen(self, False)


class _Parameter(fx.proxy.ParameterProxy):
    """A parameter: recorded where it is used, known where only its shape is asked for."""

    def size(self, dim: int | None = None) -> Any:
        return self.param.size() if dim is None else self.param.size(dim)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # type: ignore[override]
        return _type_seen(self, True)


def _surely_tensor(node: fx.Node, tracer: fx.proxy.TracerBase) -> bool:
    if node.op == "placeholder":
        return node.type in (Tensor, "Tensor", "torch.Tensor")
    if node.op == "call_module":
        module = tracer.root.get_submodule(str(node.target))  # type: ignore[attr-defined]
        home = definer(type(module), "forward").__module__.removeprefix("torch.nn.modules.")
        return home in _TENSOR_LAYERS and not getattr(module, "return_indices", False)
    name = getattr(node.target, "__name__", node.target)
    if getattr(node.target, "__module__", "") == "_operator":
        operands = [value for value in node.args if isinstance(value, fx.Node)]
        arithmetic = name in ("add", "sub", "mul", "truediv", "matmul")
        return arithmetic and any(_surely_tensor(value, tracer) for value in operands)
    return name in _TENSOR_RESULTS and node.op in ("call_function", "call_method")


_TENSOR_LAYERS = {
    *("conv", "linear", "batchnorm", "dropout", "normalization", "padding", "instancenorm"),
    *("flatten", "upsampling", "pixelshuffle", "pooling", "channelshuffle"),
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


def _untraceable_functions() -> tuple[Callable[..., Any], ...]:
    """Functions that timm, where it is loaded, declares to be leaves of a trace."""
    declared = sys.modules.get("timm.layers._fx")
    return tuple(declared.get_notrace_functions()) if declared else ()
