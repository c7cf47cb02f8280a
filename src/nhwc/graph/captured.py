"""A model as torch.fx graphs: everything that can be traced, the rest as calls, with reasons."""

from __future__ import annotations

import copy
import inspect
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..errors import InputError
from ..preserve import undrawn
from ..ready import check_initialized
from ..release import apart
from .layers import Spread, assert_none
from .report import Opaque
from .shells import open_shell
from .state import State
from .traced import check_writes, is_constant
from .tracer import Tracer, explain, is_leaf, opaque_by_nature


@dataclass(frozen=True)
class Captured:
    """A copy of a model as a graph, and the parts of it that stayed opaque."""

    module: fx.GraphModule
    opaque: tuple[Opaque, ...]
    notes: tuple[str, ...] = ()


def capture(model: nn.Module, *, layers: bool = False) -> Captured:
    """Copy `model` into a GraphModule: what cannot be traced stays in it as a call to a copy.

    >>> captured = capture(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()))
    >>> [str(node) for node in captured.module.graph.nodes]
    ['input_1', '_0', '_1', 'output']

    Inside an opaque part, the children that can be traced are GraphModules of their own; `graphs`
    finds them all. With `layers`, a convolution or linear layer that its code calls is one, too.
    """
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, nn.Module):
        raise InputError(f"cannot capture a {type(model).__name__}. Pass a torch.nn.Module.")
    check_initialized(model)
    with undrawn(), torch.no_grad():
        own = own_copy(model)
        opaque: list[Opaque] = []
        concrete = _optional_arguments(own)
        graph = _trace(own, "", opaque, concrete, layers)
        if graph is None:
            return Captured(_as_one_call(own), tuple(opaque))
    notes = tuple(f"{name} is fixed to its default, {value!r}" for name, value in concrete.items())
    return Captured(graph, tuple(opaque), notes)


def graphs(module: nn.Module) -> Iterator[tuple[str, fx.GraphModule]]:
    """Every GraphModule in `module`, itself included, with its path in the original model."""
    for _, child in module.named_modules():
        if isinstance(child, fx.GraphModule):
            yield child.meta.get("path", ""), child


def is_one_call(graph: fx.GraphModule) -> bool:
    """Whether `graph` only calls a model that could not be traced: all else is inside of that."""
    calls = [n.target for n in graph.graph.nodes if n.op not in ("placeholder", "output")]
    return calls == ["model"] and not isinstance(graph.model, fx.GraphModule)


def own_copy(model: nn.Module) -> nn.Module:
    """A deep copy that shares nothing with `model`, also where it holds results of autograd."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        if type(parameter) is nn.Parameter:
            copied = apart(parameter.detach())
            memo[id(parameter)] = nn.Parameter(copied, parameter.requires_grad)
    for module in model.modules():
        for value in (*vars(module).values(), *module._buffers.values()):
            if isinstance(value, Tensor) and value.requires_grad and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise InputError(
            f"cannot copy the {type(model).__name__}: {error}. "
            "Take what copy.deepcopy refuses off the model first."
        ) from error


def is_one_layer(graph: fx.GraphModule) -> bool:
    """Whether `graph` is no more than a layer that opaque code calls."""
    return "layer" in graph.meta


def _trace(
    module: nn.Module, path: str, opaque: list[Opaque], concrete: dict[str, Any], layers: bool
) -> fx.GraphModule | None:
    """A GraphModule of `module`, or None with the reason in `opaque`; either way opened up."""
    tracer, state = Tracer(), State(module)
    reason = opaque_by_nature(module)
    if reason is None:
        try:
            graph = tracer.trace(module, concrete)
            check_writes(graph)
            tracer.check_constants()
            state.check()
            give_copies(graph)
        except Exception as error:
            state.restore()
            reason = explain(error)

    def trace_child(child: nn.Module, below: str) -> nn.Module | None:
        if not is_leaf(child):
            return _trace(child, below, opaque, {}, layers)
        return _as_one_layer(child, below) if layers and isinstance(child, _LAYERS) else None

    # What fx wraps refers to the tracer in circles: it would keep weights that passes replace.
    inner_reasons = tracer.opaque
    vars(tracer).clear()
    if reason is not None:
        opaque.append(Opaque(path, type(module).__name__, reason))
        open_shell(module, path, trace_child)
        return None
    name_placeholders(graph, module)
    result = fx.GraphModule(module, renamed(graph), type(module).__name__)
    result.meta["path"] = path
    for name, holder in result.named_modules():
        # The modules that torch.fx makes to hold others would be in training mode.
        if type(holder) is nn.Module:
            holder.training = module.get_submodule(name).training
    for inner in dict.fromkeys(node.target for node in graph.nodes if node.op == "call_module"):
        if inner in inner_reasons:
            part = result.get_submodule(inner)
            below = f"{path}.{inner}" if path else inner
            opaque.append(Opaque(below, type(part).__name__, inner_reasons[inner]))
            open_shell(part, below, trace_child)
    return result


def renamed(graph: fx.Graph) -> fx.Graph:
    """The same graph with names that do not count the attempts that were given up."""
    fresh = fx.Graph(tracer_cls=Tracer)
    result: Any = fresh.graph_copy(graph, {}, return_output_node=True)
    value, old = result
    fresh.output(value, type_expr=old.type)
    return fresh


def give_copies(graph: fx.Graph) -> None:
    """Return copies of the tensors that the code made: who gets one may write into it."""
    [output] = graph.find_nodes(op="output")
    for node in output.all_input_nodes:
        if is_constant(node):
            with graph.inserting_after(node):
                copy = graph.call_method("clone", (node,))
            output.replace_input_with(node, copy)


def _optional_arguments(module: nn.Module) -> dict[str, Any]:
    """The arguments of `forward` with plain defaults: user code branches on those."""
    plain = (type(None), bool, int, float, str)
    parameters = inspect.signature(module.forward).parameters.values()
    return {
        p.name: p.default
        for p in parameters
        if p.default is not p.empty and isinstance(p.default, plain)
    }


def name_placeholders(graph: fx.Graph, module: nn.Module) -> None:
    """Give specialised arguments their names back, and every argument the type it declares."""
    try:
        types = typing.get_type_hints(type(module).forward)
    except Exception:
        types = {}
    declared = list(inspect.signature(type(module).forward).parameters.values())[1:]
    for node, parameter in zip(graph.find_nodes(op="placeholder"), declared, strict=False):
        name = parameter.name
        if not node.target.startswith("*"):
            node.target = name
        # TorchScript takes what has no type for a tensor, which is never None.
        node.type = types.get(name, _TENSOR_OR_NONE if parameter.default is None else None)
    for node in graph.find_nodes(op="call_function", target=_FIXED_TO_NONE):
        node.target = assert_none
        # Whatever type it declares, TorchScript asks whether a tensor is None.
        node.all_input_nodes[0].type = _TENSOR_OR_NONE


_TENSOR_OR_NONE = typing.Optional[Tensor]  # noqa: UP045

# TorchScript does not know the type that torch.fx gives its own, in versions that have one.
_FIXED_TO_NONE = getattr(fx._symbolic_trace, "_assert_is_none", None)


_LAYERS = (nn.Conv2d, nn.Conv3d, nn.Linear)


def _as_one_layer(layer: nn.Module, path: str) -> fx.GraphModule | None:
    """A GraphModule that does nothing but call `layer`, unless others may see that call."""
    if opaque_by_nature(layer) is not None:
        return None
    root = nn.Module()
    root.layer, root.training = layer, layer.training
    graph = fx.Graph()
    graph.output(graph.call_module("layer", (graph.placeholder("input"),)))
    result = fx.GraphModule(root, graph, type(layer).__name__)
    result.meta |= {"path": path, "layer": True}
    return result


def unwrap_layers(graph: fx.GraphModule, root: nn.Module) -> fx.GraphModule:
    """`graph`, traced from `root`, with layers where the trace went through graphs of one."""
    for node in graph.graph.find_nodes(op="call_module"):
        path, _, name = str(node.target).rpartition(".")
        around = root.get_submodule(path)
        if name == "layer" and isinstance(around, fx.GraphModule) and is_one_layer(around):
            graph.set_submodule(path, around.get_submodule(name))
            node.target = path
    graph.recompile()
    return graph


def _as_one_call(module: nn.Module) -> fx.GraphModule:
    """A GraphModule with the signature of `module` that does nothing but call it."""
    root = nn.Module()
    root.training = module.training
    graph = fx.Graph()
    args: list[fx.Node] = []
    kwargs: dict[str, Any] = {}
    star = double = None
    for p in inspect.signature(module.forward).parameters.values():
        if p.kind is p.VAR_POSITIONAL:
            star = graph.placeholder(f"*{p.name}")
        elif p.kind is p.VAR_KEYWORD:
            double = graph.placeholder(f"**{p.name}")
        elif p.kind is p.KEYWORD_ONLY:
            kwargs[p.name] = graph.placeholder(p.name, default_value=p.default)
        else:
            args.append(graph.placeholder(p.name, default_value=p.default))
    if star is not None or double is not None:
        root.model = Spread(module)
        root.model.training = module.training
        called = graph.call_module("model", (tuple(args), star or (), kwargs, double or {}))
    else:
        root.model = module
        called = graph.call_module("model", tuple(args), kwargs)
    graph.output(called)
    result = fx.GraphModule(root, graph, type(module).__name__)
    result.meta["path"] = ""
    return result
