"""Symbolic tracing that gives up on one module at a time, and says why."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from .state import State
from .traced import (
    OURS,
    TORCH,
    TracedParameter,
    Value,
    check_writes,
    definer,
    is_constant,
)
from .transformers import is_spelled_out, spelled_out
from .writes import may_be_view, written_into

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, fx.GraphModule)

_RECORDED: tuple[Callable[..., Any], ...] = (
    *(torch.arange, torch.eye, torch.full, torch.linspace, torch.ones, torch.tensor, torch.zeros),
    *(torch.cat, torch.stack),
)
"""What cannot see that an argument is traced: a size, a device, what stands for a whole list."""


class Tracer(fx.Tracer):
    """torch.fx's tracer, with each module that cannot be traced kept as one call.

    `opaque` maps the path of each such module to the reason.
    """

    def __init__(self) -> None:
        wrapped = (*_untraceable_functions(), *_RECORDED)
        super().__init__(autowrap_functions=wrapped)
        self._autowrap_search.append(torch)
        self.opaque: dict[str, str] = {}
        self._names: dict[Tensor, str] = {}
        self._constants: dict[fx.Node, tuple[Tensor, int]] = {}
        self._renamed: list[tuple[fx.Proxy, fx.Node]] = []

    def trace(self, root: Any, concrete_args: dict[str, Any] | None = None) -> fx.Graph:
        # Torch lists its functions once, which must not be while some of them are wrapped.
        torch.overrides.get_overridable_functions()
        # fx looks through all of them for each that is used.
        self._names = {t: name for name, t in (*root.named_parameters(), *root.named_buffers())}
        with spelled_out(root):
            graph = super().trace(root, concrete_args)
        for node in graph.nodes:
            if node.target in _RECORDED:
                # It would have the graph's code wrap a name with a dot in it, which cannot be.
                node.meta.pop("is_wrapped", None)
        return graph

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return Value(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        leaf = is_leaf(m) and not is_spelled_out(m)
        return module_qualified_name in self.opaque or leaf

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
        depth, renamed = len(self.module_stack), len(self._renamed)
        before = next(iter(reversed(self.graph.nodes)), None)
        state = State(m)
        try:
            result = super().call_module(m, forward, args, kwargs)
            check_writes(self.graph)
            self.check_constants()
            state.check()
            return result
        except Exception as error:
            state.restore()
            for value, node in reversed(self._renamed[renamed:]):
                value.node = node
            del self._renamed[renamed:]
            self._erase_after(before)
            while len(self.module_stack) > depth:
                self.module_stack.popitem()
            self.opaque[path] = explain(error)
            return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        name = self._names.get(attr_val) if isinstance(attr_val, nn.Parameter) else None
        if name is None:
            return attr_val
        if name not in parameter_proxy_cache:
            parameter_proxy_cache[name] = self.create_proxy(
                *("get_attr", name, (), {}),
                proxy_factory_fn=lambda node: TracedParameter(self, node, name, attr_val),
            )
        return parameter_proxy_cache[name]

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, fx.Proxy) and a.node._erased:
            raise fx.proxy.TraceError("a list or dict was filled by a part that cannot be traced")
        name = self._names.get(a) if isinstance(a, Tensor) else None
        result = self.create_node("get_attr", name, (), {}) if name else super().create_arg(a)
        if isinstance(a, Tensor) and isinstance(result, fx.Node) and not a.is_inference():
            self._constants[result] = a, a._version
        return result

    def create_proxy(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> Any:
        result = super().create_proxy(kind, target, *args, **kwargs)
        if kind == "call_module":
            result.node.meta["may_return_input"] = self._may_return_input(str(target))
            return result
        written = written_into(result.node)
        if any(isinstance(v, fx.Node) and is_constant(v) for v in tree_leaves(written)):
            raise fx.proxy.TraceError("it writes a traced value into a tensor that it made")
        if isinstance(written, fx.Node):
            # Whoever reads it from now on reads what was written.
            for value in tree_leaves(args):
                if isinstance(value, fx.Proxy) and value.node is written:
                    self.rename(value, result.node)
        return result

    def _may_return_input(self, path: str) -> bool:
        """Whether what a module returns may lie in the memory of what it is given."""
        module = self.root.get_submodule(path)
        if path in self.opaque or not is_leaf(module):
            return True
        return getattr(module, "inplace", False) or may_be_view(type(module).__name__)

    def rename(self, value: fx.Proxy, node: fx.Node) -> None:
        """From now on `value` is what `node` is; until it proves that this cannot be traced."""
        self._renamed.append((value, value.node))
        value.node = node

    def check_constants(self) -> None:
        """A tensor that the graph has as a constant must be what it was when it was read."""
        for node, (tensor, version) in self._constants.items():
            if not node._erased and tensor._version != version:
                raise fx.proxy.TraceError("it writes into a tensor that it used before")

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
    if not home.startswith(("torch.nn.", "torch.ao.nn.", "nhwc.graph.")):
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
    "does not support item assignment": "it assigns to elements of a traced value",
    "support for arbitrary number of arguments": "it unpacks a traced value with *",
    "'len' is not supported": "it uses the length of a traced value",
    "cannot be interpreted as an integer": "it counts with a traced value",
    "must be real number, not": "it computes with a traced value in plain Python",
    "int() argument must be": "it makes a plain number of a traced value",
    "float() argument must be": "it makes a plain number of a traced value",
}


def _user_line(error: Exception) -> str:
    frame, found = error.__traceback__, ""
    while frame is not None:
        file = frame.tb_frame.f_code.co_filename
        if not file.startswith((TORCH, OURS, "<")):
            found = f"{Path(file).name}:{frame.tb_lineno}"
        frame = frame.tb_next
    return found


def _untraceable_functions() -> tuple[Callable[..., Any], ...]:
    """Functions that timm, where loaded, declares to be leaves of a trace, and its padding."""
    declared, padding = map(sys.modules.get, ("timm.layers._fx", "timm.layers.padding"))
    found = tuple(declared.get_notrace_functions()) if declared else ()
    # It computes with sizes in plain Python; around it stands the first convolution of a stage.
    return (*found, padding.pad_same) if padding else found
