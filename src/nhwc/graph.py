"""A model as torch.fx graphs: everything that can be traced, the rest as calls, with reasons."""

from __future__ import annotations

import copy
import inspect
import operator
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from .errors import InputError
from .layers import Spread
from .preserve import undrawn
from .ready import check_initialized
from .report import Opaque
from .shells import open_shell
from .traced import check_writes
from .tracer import State, Tracer, explain, opaque_by_nature


@dataclass(frozen=True)
class Captured:
    """A copy of a model as a graph, and the parts of it that stayed opaque."""

    module: fx.GraphModule
    opaque: tuple[Opaque, ...]
    notes: tuple[str, ...] = ()


def capture(model: nn.Module) -> Captured:
    """Copy `model` into a GraphModule: what cannot be traced stays in it as a call to a copy.

    >>> captured = capture(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()))
    >>> [str(node) for node in captured.module.graph.nodes]
    ['input_1', '_0', '_1', 'output']

    Inside an opaque part, the children that can be traced are GraphModules of their own; `graphs`
    finds them all.
    """
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, nn.Module):
        raise InputError(f"cannot capture a {type(model).__name__}. Pass a torch.nn.Module.")
    check_initialized(model)
    with undrawn(), torch.no_grad():
        own = own_copy(model)
        opaque: list[Opaque] = []
        concrete = _optional_arguments(own)
        graph = _trace(own, "", opaque, concrete)
        if graph is None:
            return Captured(_as_one_call(own), tuple(opaque))
    notes = tuple(f"{name} is fixed to its default, {value!r}" for name, value in concrete.items())
    return Captured(graph, tuple(opaque), notes)


def graphs(module: nn.Module) -> Iterator[tuple[str, fx.GraphModule]]:
    """Every GraphModule in `module`, itself included, with its path in the original model."""
    for _, child in module.named_modules():
        if isinstance(child, fx.GraphModule):
            yield child.meta.get("path", ""), child


def own_copy(model: nn.Module) -> nn.Module:
    """A deep copy that shares nothing with `model`, also where it holds results of autograd."""
    memo: dict[int, Any] = {}
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


def _trace(
    module: nn.Module, path: str, opaque: list[Opaque], concrete: dict[str, Any]
) -> fx.GraphModule | None:
    """A GraphModule of `module`, or None with the reason in `opaque`; either way opened up."""
    tracer, state = Tracer(), State(module)
    reason = opaque_by_nature(module)
    if reason is None:
        try:
            graph = tracer.trace(module, concrete)
            check_writes(graph)
            state.check()
        except Exception as error:
            state.restore()
            reason = explain(error)

    def trace_child(child: nn.Module, below: str) -> nn.Module | None:
        return _trace(child, below, opaque, {})

    if reason is not None:
        opaque.append(Opaque(path, type(module).__name__, reason))
        open_shell(module, path, trace_child)
        return None
    _name_placeholders(graph, module)
    result = fx.GraphModule(module, _renamed(graph), type(module).__name__)
    result.meta["path"] = path
    for name, holder in result.named_modules():
        # The modules that torch.fx makes to hold others would be in training mode.
        if type(holder) is nn.Module:
            holder.training = module.get_submodule(name).training
    for inner in dict.fromkeys(node.target for node in graph.nodes if node.op == "call_module"):
        if inner in tracer.opaque:
            part = result.get_submodule(inner)
            below = f"{path}.{inner}" if path else inner
            opaque.append(Opaque(below, type(part).__name__, tracer.opaque[inner]))
            open_shell(part, below, trace_child)
    return result


def _renamed(graph: fx.Graph) -> fx.Graph:
    """The same graph with names that do not count the attempts that were given up."""
    fresh = fx.Graph(tracer_cls=Tracer)
    result: Any = fresh.graph_copy(graph, {}, return_output_node=True)
    value, old = result
    fresh.output(value, type_expr=old.type)
    return fresh


def _optional_arguments(module: nn.Module) -> dict[str, Any]:
    """The arguments of `forward` with plain defaults: user code branches on those."""
    plain = (type(None), bool, int, float, str)
    parameters = inspect.signature(module.forward).parameters.values()
    return {
        p.name: p.default
        for p in parameters
        if p.default is not p.empty and isinstance(p.default, plain)
    }


def _name_placeholders(graph: fx.Graph, module: nn.Module) -> None:
    """Give specialised arguments their names back, and every argument the type it declares."""
    try:
        types = typing.get_type_hints(type(module).forward)
    except Exception:
        types = {}
    names = list(inspect.signature(type(module).forward).parameters)[1:]
    for node, name in zip(graph.find_nodes(op="placeholder"), names, strict=False):
        if not node.target.startswith("*"):
            node.target = name
        node.type = types.get(name)


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


# --- what passes use -------------------------------------------------------------------------


def module_of(node: object) -> nn.Module | None:
    """The module a `call_module` node calls; None for anything else."""
    if not isinstance(node, fx.Node) or node.op != "call_module":
        return None
    owner = node.graph.owning_module
    assert owner is not None
    return owner.get_submodule(str(node.target))


def attribute(owner: nn.Module, path: str) -> Any:
    """The parameter, buffer or constant at a dotted path."""
    for part in path.split("."):
        owner = getattr(owner, part)
    return owner


def replace_module(node: fx.Node, module: nn.Module) -> None:
    """Let `node` call `module`, in the place of the old one unless that is needed elsewhere."""
    owner, target = node.graph.owning_module, str(node.target)
    assert owner is not None
    if _needed_elsewhere(node):
        target = fresh_name(owner, target.replace(".", "_"))
        node.target = target
    owner.add_submodule(target, module)


def add_module(graph: fx.Graph, name: str, module: nn.Module, args: tuple[Any, ...]) -> fx.Node:
    """A new call of `module`, installed under a name like `name`, at the insertion point."""
    owner = graph.owning_module
    assert owner is not None
    target = fresh_name(owner, name)
    owner.add_submodule(target, module)
    return graph.call_module(target, args)


def erase(node: fx.Node, instead: fx.Node) -> None:
    """Let every user of `node` use `instead`, and take `node` out."""
    node.replace_all_uses_with(instead)
    node.graph.erase_node(node)


def clean(gm: fx.GraphModule) -> fx.GraphModule:
    """Drop what nothing uses any more, check the graph, and write its code anew."""
    for node in reversed(list(gm.graph.nodes)):
        if not node.users and _without_effect(node):
            gm.graph.erase_node(node)
    gm.delete_all_unused_submodules()
    _drop_unread_tensors(gm)
    gm.graph.lint()
    gm.recompile()
    return gm


def _needed_elsewhere(node: fx.Node) -> bool:
    target = str(node.target)
    for other in node.graph.nodes:
        if other is node or other.op not in ("call_module", "get_attr"):
            continue
        path = str(other.target)
        if path == target or path.startswith(target + ".") or target.startswith(path + "."):
            return True
    return False


def fresh_name(owner: nn.Module, name: str) -> str:
    count, fresh = 0, name
    while hasattr(owner, fresh):
        count += 1
        fresh = f"{name}_{count}"
    return fresh


_READING = {getattr, operator.getitem, operator.eq, operator.add, operator.sub, operator.mul}
_READING |= {operator.floordiv, operator.truediv, operator.mod, operator.neg, operator.pow}


def _without_effect(node: fx.Node) -> bool:
    if node.op == "call_function":
        return node.target in _READING
    return node.op == "get_attr" or (node.op, node.target) in {
        ("call_method", "size"),
        ("call_method", "dim"),
    }


def _drop_unread_tensors(gm: fx.GraphModule) -> None:
    """Parameters and buffers of the modules that only hold others, and that no node reads."""
    read = {str(node.target) for node in gm.graph.nodes if node.op == "get_attr"}
    called = {str(node.target) for node in gm.graph.nodes if node.op == "call_module"}
    holders = {""} | {name for name, m in gm.named_modules() if type(m) is nn.Module}
    for holder in holders - called:
        if any(holder.startswith(f"{path}.") for path in called):
            continue
        module = gm.get_submodule(holder)
        for slots in (module._parameters, module._buffers):
            for name in list(slots):
                if (f"{holder}.{name}" if holder else name) not in read:
                    del slots[name]
