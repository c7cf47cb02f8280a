"""Capture a model as torch.fx graphs; what cannot be traced stays a call, and is reported."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.conv import _ConvNd

from ...errors import InputError, of_kind
from ...models.kinds import check_initialized, unwrapped
from ...models.places import nones_of
from ...models.preserve import mark_generators, undrawn
from ...operators.windows import tell_sides
from ..code.mentions import mentions_of
from ..effects.across import read_across
from ..effects.state import State
from ..modules.layers import Spread, assert_none
from ..modules.leaves import (
    CALLED,
    calls_otherwise,
    is_leaf,
    is_set_from_outside,
    opaque_by_nature,
    replaced_in_torch,
)
from ..nodes.arguments import (
    fixed_arguments,
    given_by_decorator,
    is_sayable_argument,
    is_sayable_name,
    name_placeholders,
    required_late,
)
from ..nodes.edit import attribute, copied, erase
from ..nodes.memory import exposed
from ..nodes.names import is_constant, renamed_parts, sayable, user_path
from ..nodes.pickled import PickledGraph
from ..plain import all_plain, is_derived
from ..report import Opaque, PassReport
from .baked import bake_weights
from .copies import check_copies, own_copy
from .explained import explain
from .repeated import trace_whole
from .shells import TraceChild, open_shell
from .tracer import Tracer


@dataclass(frozen=True)
class Captured:
    """A copy of a model as a graph, and the parts that could not be traced."""

    module: fx.GraphModule
    opaque: tuple[Opaque, ...]
    notes: tuple[str, ...] = ()
    baked: tuple[PassReport, ...] = ()


def capture(
    model: nn.Module, calls: Sequence[tuple[Any, ...]] = (), *, layers: bool = False
) -> Captured:
    """Copy `model` into a GraphModule; a part that cannot be traced stays a call of its copy.

    >>> captured = capture(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()))
    >>> [str(node) for node in captured.module.graph.nodes]
    ['input_1', '_0', '_1', 'output']

    Inside an opaque part, the children that can be traced are GraphModules of their own; `graphs`
    finds them all. With `layers`, so are the convolutions and linear layers that its code calls.
    Optional arguments of the model are fixed to what `calls` give for them, or to their defaults.
    """
    model = unwrapped(model)
    if not isinstance(model, nn.Module):
        raise InputError(f"cannot capture {of_kind(model)}. Pass a torch.nn.Module.")
    check_initialized(model)
    check_copies(model)
    replaced = replaced_in_torch()
    if replaced:
        return capture_closed(model, replaced)
    with undrawn(), torch.inference_mode(False), torch.no_grad():
        own = own_copy(model)
        _settle(own)
        report = bake_weights(own)
        baked = (report,) if report.sites else ()
        opaque: list[Opaque] = []
        concrete = fixed_arguments(own, calls)
        graph = _trace(own, "", _Task(opaque, read_across(own), layers), concrete)
        if graph is None:
            return Captured(_as_one_call(own), tuple(opaque), baked=baked)
    _say_what_is_fixed(graph, concrete)
    # What the calls give is no news to the caller.
    fixed = {} if calls else concrete
    notes = tuple(f"{name} is fixed to its default, {value!r}" for name, value in fixed.items())
    return Captured(graph, tuple(opaque), notes, baked)


def _say_what_is_fixed(graph: fx.GraphModule, fixed: dict[str, Any]) -> None:
    """Let the guards of fixed arguments say what to do instead."""
    for node in [node for node in graph.graph.nodes if node.target in (torch._assert, assert_none)]:
        name, of_fx, _ = str(node.args[1]).partition(" has been specialized")
        if of_fx and name in fixed:
            said = f"{name} is fixed to {fixed[name]!r} in this graph"
            way = "Give nhwc.optimize an example with the other value, or call the model itself"
            node.args = (node.args[0], f"{said}. {way}.")
            graph.recompile()


def _settle(model: nn.Module) -> None:
    """Give torch's own layers plain settings: `Conv2d(numpy.int64(8), ...)` keeps what it is given.

    A `forward` that is the class's own is taken off, which a copy of the layer would call.
    Convolutions that were given one number for all sides, `stride=(2,)`, get one for each.

    >>> import numpy
    >>> layer = nn.MaxPool2d(numpy.int64(2))
    >>> _settle(layer)
    >>> type(layer.kernel_size)
    <class 'int'>
    """
    for part in model.modules():
        if not is_set_from_outside(part):
            for name in CALLED:
                vars(part).pop(name, None)
    for layer in filter(is_leaf, model.modules()):
        settings = vars(layer)
        for name, value in settings.items():
            held = value if isinstance(value, tuple | list) else (value,)
            if any(map(is_derived, held)):
                settings[name] = all_plain(value)
        if isinstance(layer, _ConvNd):
            tell_sides(layer)


def capture_closed(model: nn.Module, reason: str) -> Captured:
    """Copy `model` into a graph that only calls it, for models whose traced graph is wrong.

    >>> is_one_call(capture_closed(nn.ReLU(), "it answers otherwise").module)
    True
    """
    with undrawn(), torch.inference_mode(False), torch.no_grad():
        opaque = Opaque("", type(model).__name__, reason)
        return Captured(_as_one_call(own_copy(model)), (opaque,))


def graphs(module: nn.Module) -> Iterator[tuple[str, fx.GraphModule]]:
    """Yield every GraphModule in `module`, itself included, with its path in the original model."""
    for _, child in module.named_modules():
        if isinstance(child, fx.GraphModule):
            yield child.meta.get("path", ""), child


def is_one_call(graph: fx.GraphModule) -> bool:
    """Whether `graph` does nothing but call a model that could not be traced."""
    calls = [n.target for n in graph.graph.nodes if n.op not in ("placeholder", "output")]
    return calls == ["model"] and not isinstance(graph.model, fx.GraphModule)


def is_one_layer(graph: fx.GraphModule) -> bool:
    """Whether `graph` holds just one layer, which opaque code calls."""
    return "layer" in graph.meta


@dataclass(frozen=True)
class _Task:
    """What holds for a whole model: parts that stay opaque, and those that read what others write.

    With `layers`, single layers become graphs, too.
    """

    opaque: list[Opaque]
    across: dict[nn.Module, str]
    layers: bool


def _trace(
    module: nn.Module, path: str, task: _Task, concrete: dict[str, Any]
) -> fx.GraphModule | None:
    """Trace `module`; None, with the reason in `task.opaque`, if it cannot be traced.

    Either way the parts that stay opaque get graphs of their children.
    """
    mark_generators()
    state = State(module)
    inner_reasons: dict[str, str] = {}
    reason = opaque_by_nature(module) or task.across.get(module) or _unlike_forward(module)
    if reason is None:
        try:
            graph = trace_whole(state, task.across, inner_reasons, concrete, believed=not path)
        except Exception as error:
            state.restore()
            reason = explain(error)

    def trace_child(child: nn.Module, below: str) -> nn.Module | None:
        if not is_leaf(child):
            return _trace(child, below, task, {})
        return _as_one_layer(child, below) if task.layers and isinstance(child, _LAYERS) else None

    if reason is not None:
        _open(module, path, reason, task.opaque, trace_child)
        return None
    name_placeholders(graph, module)
    called = dict.fromkeys(str(n.target) for n in graph.nodes if n.op == "call_module")
    result = graph_module(graph, module, type(module).__name__)
    result.meta["path"] = path
    for inner in called:
        if inner in inner_reasons:
            part = module.get_submodule(inner)
            below = f"{path}.{inner}" if path else inner
            _open(part, below, inner_reasons[inner], task.opaque, trace_child)
    return result


def _unlike_forward(module: nn.Module) -> str | None:
    """Say why a graph of `module`'s `forward` could not replace a call of it; None if it could."""
    if calls_otherwise(module):
        return "it has a __call__ of its own"
    if "forward" in vars(module):
        return "its forward was set from outside"
    for parameter in inspect.signature(module.forward).parameters.values():
        kept = isinstance(parameter.default, list) and parameter.name in mentions_of(module).written
        if kept or not is_sayable_argument(parameter):
            given = f"its argument {parameter.name}"
            if is_sayable_name(parameter.name):
                given = f"the default of {given}, {of_kind(parameter.default)}"
            return f"generated code cannot have {given}"
    return None


def graph_module(graph: fx.Graph, root: nn.Module, name: str) -> fx.GraphModule:
    """Make a GraphModule of `graph`, traced from `root`; rename parts that code cannot name."""
    graph = renamed(graph)
    _give_by_place(graph, root)
    names = renamed_parts(graph, root)
    parts: Any = root
    if names:
        targets = {str(n.target) for n in graph.nodes if n.op in ("call_module", "get_attr")}
        parts = {target: attribute(root, names.get(target, target)) for target in targets}
    result = PickledGraph(parts, graph, sayable(name) if name.isidentifier() else "Model")
    _copy_constants(result)
    result.training = root.training
    if names:
        result.meta["names"] = names
    for path, holder in result.named_modules():
        # torch.fx puts the modules that it makes to hold others into training mode.
        if type(holder) is nn.Module:
            holder.training = _training_of(root, path)
    return result


def _give_by_place(graph: fx.Graph, root: nn.Module) -> None:
    """Give layers by place what they got as `input=`: ours, in their places, name it otherwise."""
    for node in graph.find_nodes(op="call_module"):
        layer = root.get_submodule(str(node.target))
        plain = is_leaf(layer) and opaque_by_nature(layer) is None
        if plain and not node.args and node.kwargs.keys() == {"input"}:
            node.args, node.kwargs = (node.kwargs["input"],), {}


def _training_of(root: nn.Module, path: str) -> bool:
    try:
        return root.get_submodule(path).training
    except AttributeError:  # The part has another name in the graph.
        return root.training


def _open(
    part: nn.Module, path: str, reason: str, opaque: list[Opaque], trace_child: TraceChild
) -> None:
    """Put graphs inside an opaque part; report why it is opaque, and why it got no graphs if so."""
    place, kind = len(opaque), type(part).__name__
    opaque.append(Opaque(path, kind, reason))
    unseen = open_shell(part, path, trace_child)
    if unseen:
        opaque[place] = Opaque(path, kind, f"{reason}; its parts stay as they are: {unseen}")


def renamed(graph: fx.Graph) -> fx.Graph:
    """Copy a graph, so that its nodes are numbered without those of abandoned attempts."""
    fresh = fx.Graph(tracer_cls=Tracer)
    result: Any = fresh.graph_copy(graph, {}, return_output_node=True)
    value, old = result
    fresh.output(value, type_expr=old.type)
    return fresh


def _copy_constants(gm: fx.GraphModule) -> None:
    """Let each run make the constants anew that it writes into, or that its caller may."""
    constants = [*filter(is_constant, gm.graph.nodes)]
    first: dict[object, fx.Node] = {}
    for node in constants:
        if first.setdefault(node.target, node) is not node:
            erase(node, first[node.target])
    for node in exposed(gm.graph).intersection(first.values()):
        reader, copy = copied(node, gm)
        node.replace_all_uses_with(copy, lambda user, reader=reader: user is not reader)  # type: ignore[misc]
        if not node.users:
            gm.graph.erase_node(node)
    if constants:
        gm.recompile()


_LAYERS = (nn.Conv2d, nn.Conv3d, nn.Linear)


def _as_one_layer(layer: nn.Module, path: str) -> fx.GraphModule | None:
    """Make a GraphModule that does nothing but call `layer`; None if hooks would miss the call."""
    if opaque_by_nature(layer) is not None:
        return None
    root = nn.Module()
    root.layer, root.training = layer, layer.training
    graph = fx.Graph()
    graph.output(graph.call_module("layer", (graph.placeholder("input"),)))
    result = PickledGraph(root, graph, type(layer).__name__)
    result.meta |= {"path": path, "layer": True}
    return result


def unwrap_layers(graph: fx.GraphModule, root: nn.Module) -> fx.GraphModule:
    """Replace each graph of one layer in `graph`, traced from `root`, by the layer itself."""
    for node in graph.graph.find_nodes(op="call_module"):
        path, _, name = str(node.target).rpartition(".")
        around = root.get_submodule(user_path(graph, str(node.target)).rpartition(".")[0])
        if not isinstance(around, fx.GraphModule) or not is_one_layer(around):
            continue
        # A pass may have taken the padding out of the layer: then there are two.
        if name == "layer" and len(around._modules) == 1:
            graph.set_submodule(path, around.get_submodule(name))
            node.target = path
    graph.recompile()
    return graph


def _as_one_call(module: nn.Module) -> fx.GraphModule:
    """Make a GraphModule that takes what `module` takes and does nothing but call it."""
    root = nn.Module()
    root.training = module.training
    graph = fx.Graph()
    args: list[fx.Node] = []
    kwargs: dict[str, Any] = {}
    star = double = None
    called = module.__call__ if calls_otherwise(module) else module.forward
    signature = inspect.signature(called)
    parameters, late = list(signature.parameters.values()), required_late(signature)
    lists = any(isinstance(p.default, list) for p in parameters)
    if lists or given_by_decorator(called) or not all(map(is_sayable_argument, parameters)):
        # Generated code cannot name these arguments, would make its own lists, or may give what a
        # decorator would have given, so it passes on *args and **kwargs.
        parameters = list(inspect.signature(lambda *args, **kwargs: None).parameters.values())
    # A decorator may add what was not given by name; behind *args a name would be given twice.
    all_named = not any(p.kind is p.VAR_POSITIONAL for p in parameters)
    for p in parameters:
        if p.kind is p.VAR_POSITIONAL:
            star = graph.placeholder(f"*{p.name}")
        elif p.kind is p.VAR_KEYWORD:
            double = graph.placeholder(f"**{p.name}")
        elif p.kind is p.KEYWORD_ONLY or (all_named and _is_optional(p)):
            default = None if p.name in late else p.default
            kwargs[p.name] = graph.placeholder(p.name, default_value=default)
        else:
            args.append(graph.placeholder(p.name, default_value=p.default))
    nones = nones_of(signature).intersection(kwargs) if hasattr(called, "__wrapped__") else ()
    if star is not None or double is not None or nones:
        root.model = Spread(module, nones)
        root.model.training = module.training
        result = graph.call_module("model", (tuple(args), star or (), kwargs, double or {}))
    else:
        root.model = module
        result = graph.call_module("model", tuple(args), kwargs)
    graph.output(result)
    whole = PickledGraph(root, graph, type(module).__name__)
    whole.meta["path"] = ""
    return whole


def _is_optional(parameter: inspect.Parameter) -> bool:
    by_name = parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    return by_name and parameter.default is not parameter.empty
