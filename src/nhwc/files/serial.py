"""Write a graph as plain values, and read it: operators by name, arguments tagged, no code."""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..graph.modules.layers import assert_value
from ..graph.nodes.arguments import type_like
from ..graph.nodes.pickled import PickledGraph
from .generated import check_code
from .guests import axes_named, guest, guest_name
from .layers import dump_layer, restore_layer
from .plain import Foreign, checked_part, from_plain, identifier, refusal, to_plain
from .vocabulary import (
    ATTRIBUTES,
    function_of,
    keywords_of_function,
    keywords_of_layer,
    keywords_of_method,
    methods,
    name_of,
)

NODES = 100_000
"""The most steps of a graph, and the most of its parts, tensors and places of tensors."""

_ARGUMENTS = 5 * NODES
"""The most values that the arguments of all steps hold: each takes a kilobyte when its code is
read."""

_PYTHON = ("_operator", "builtins", "math")


def dump(graph: fx.GraphModule) -> tuple[dict[str, Any], list[Tensor]]:
    """Nodes, modules and the places of tensors as plain values, and the tensors."""
    called = {str(n.target): None for n in graph.graph.nodes if n.op == "call_module"}
    # A part of a layer that is called by itself, too, comes back with that layer.
    paths = [path for path in called if not any(path.startswith(f"{one}.") for one in called)]
    # First of all: why a part is code tells more than what its call looks like.
    modules = {path: dump_layer(graph.get_submodule(path), path) for path in paths}
    tensors: list[Tensor] = []
    data = {
        "name": type(graph).__name__ if type(graph) is not fx.GraphModule else graph._get_name(),
        "nodes": [_dump_node(node) for node in graph.graph.nodes if not _is_unread(node)],
        "modules": modules,
        "state": _dump_state(graph, tensors),
    }
    return data, tensors


def restore(data: dict[str, Any], tensors: list[Tensor]) -> fx.GraphModule:
    """The graph that `dump` was given; raises Foreign for anything it cannot have written."""
    _check_counts(data)
    root, parts = nn.Module(), 0
    for path, module in data["modules"].items():
        layer = restore_layer(module)
        parts += sum(1 for _ in (*layer.modules(), *layer.parameters(), *layer.buffers()))
        if parts > 3 * NODES:
            raise Foreign(f"layers of more than {3 * NODES} parts and tensors")
        _place(root, path, layer)
    used = _restore_state(root, data["state"], tensors)
    if used != len(tensors):
        raise Foreign(f"{used} of {len(tensors)} tensors are used")
    for path, tensor in (*root.named_parameters(), *root.named_buffers()):
        if tensor.is_meta:
            raise Foreign(f"a tensor {path} without values")
    kinds = [node["op"] for node in data["nodes"]]
    if kinds.count("output") != 1 or kinds[-1] != "output":
        raise Foreign("steps of which the last is not the only output")
    graph = fx.Graph()
    known: dict[str, fx.Node] = {}
    for node in data["nodes"]:
        if node["name"] in known:
            raise Foreign(f"two steps named {node['name']}")
        known[identifier(node["name"])] = _restore_node(graph, root, node, known)
    graph.lint()
    check_code(graph)
    for place in graph.find_nodes(op="placeholder"):
        _declare(place)
    return PickledGraph(root, graph, identifier(data["name"])).eval()


def _check_counts(data: dict[str, Any]) -> None:
    """Refuse what is more than any model has, before any of it is made."""
    nodes, places = data["nodes"], data["state"]
    owners = {path.rpartition(".")[0] for path in (*data["modules"], *(p["path"] for p in places))}
    holders = sum(owner.count(".") + 1 for owner in owners)
    found = {"steps": len(nodes), "tensors": len(places), "parts": holders}
    for what, count in found.items():
        if count > NODES:
            raise Foreign(f"{count} {what}, of which there may be {NODES}")
    waiting: list[Any] = [part for node in nodes for part in (node["args"], node["kwargs"])]
    values = 0
    while waiting:
        value = waiting.pop()
        if isinstance(value, (dict, list)):
            waiting += value.values() if isinstance(value, dict) else value
        elif (values := values + 1) > _ARGUMENTS:
            raise Foreign(f"more than {_ARGUMENTS} arguments of steps")


def _is_unread(node: fx.Node) -> bool:
    """Whether a node stands for arguments in any number that a `forward` takes and never reads."""
    return node.op == "placeholder" and str(node.target).startswith("*") and not node.users


def _dump_node(node: fx.Node) -> dict[str, Any]:
    target = node.target
    if node.op == "call_function":
        name = name_of(target) or guest_name(target)
        if name is None:
            raise refusal(node.name, f"it calls {getattr(target, '__name__', target)}")
        if target is getattr and node.args[1] not in ATTRIBUTES:
            raise refusal(node.name, f"it reads the attribute {node.args[1]!r}")
        target = name
    elif node.op == "call_method" and target not in methods():
        raise refusal(node.name, f"it calls the method {target!r}")
    elif node.op == "placeholder" and str(target).startswith("*"):
        raise refusal(node.name, "it takes a varying number of arguments")
    return {
        "op": node.op,
        "name": node.name,
        "target": str(target),
        "args": to_plain(node.args),
        "kwargs": to_plain(dict(node.kwargs)),
    }


def _restore_node(
    graph: fx.Graph, root: nn.Module, data: dict[str, Any], known: dict[str, fx.Node]
) -> fx.Node:
    op, name = data["op"], data["target"]
    args, kwargs = from_plain(data["args"], known), from_plain(data["kwargs"], known)
    if not isinstance(name, str) or not isinstance(args, tuple) or not isinstance(kwargs, dict):
        raise Foreign("a target or arguments that are none")
    target: str | Callable[..., Any] = name
    allowed: frozenset[str] = frozenset()
    if op == "call_function":
        target = _function(name, args)
        allowed = keywords_of_function(name, target) | axes_named(name, (*args, *kwargs.values()))
    elif op == "call_method":
        if name not in methods() or not args or not isinstance(args[0], fx.Node):
            raise Foreign(f"the method {name[:40]!r}")
        if name == "type" and len(args) == 1:
            raise Foreign("the method 'type' without a type")
        allowed = keywords_of_method(name)
    elif op == "call_module":
        layer = root.get_submodule(_dotted(name))
        if type(layer) is nn.Module:
            raise Foreign(f"a call of {name}, which computes nothing")
        allowed = keywords_of_layer(layer)
    elif op == "get_attr":
        owner, _, leaf = _dotted(name).rpartition(".")
        if not isinstance(getattr(root.get_submodule(owner), leaf), Tensor):
            raise Foreign(f"a read of {name}, which is no tensor")
    elif op == "placeholder":
        identifier(name)
        _check_default(args)
    elif op != "output" or len(args) != 1:
        raise Foreign(f"a node of kind {op!r} with {len(args)} arguments")
    for keyword in kwargs:
        # Torch writes these into the code it generates.
        if identifier(keyword) not in allowed:
            raise Foreign(f"{name[:40]} with {keyword[:40]!r}")
    return graph.create_node(op, target, args, kwargs, data["name"])


def _declare(place: fx.Node) -> None:
    """Say which type an argument has that may be None or a number, as TorchScript asks to know."""
    checks = [user for user in place.users if user.target is assert_value]
    known = [*place.args, *(check.args[1] for check in checks)]
    if known:
        place.type = type_like(known[0])


def _function(name: str, args: tuple[Any, ...]) -> Callable[..., Any]:
    found = function_of(name) or guest(name)
    if found is None:
        raise Foreign(f"the function {name[:40]!r}")
    if found.__module__ in _PYTHON and not any(_nodes_in(args)):
        raise Foreign(f"{name}, which Python computes, of constants")
    if found is operator.getitem and not isinstance(args[0], fx.Node):
        raise Foreign(f"an item of {str(args[0])[:40]!r}")
    if found is OrderedDict and not (len(args) == 1 and isinstance(args[0], dict)):
        raise Foreign(f"an OrderedDict of {str(args)[:40]!r}")
    if found is torch.Size and not (len(args) == 1 and _is_shape(args[0])):
        raise Foreign(f"a torch.Size of {str(args)[:40]!r}")
    if found is getattr and (len(args) != 2 or args[1] not in ATTRIBUTES):
        raise Foreign(f"getattr of {args[1:]!r}")
    return found


def _is_shape(value: Any) -> bool:
    return type(value) is tuple and all(type(size) is int for size in value)


def _nodes_in(value: Any) -> Iterator[bool]:
    """True for every node among arguments."""
    if isinstance(value, fx.Node):
        yield True
    elif isinstance(value, (tuple, list)):
        yield from (one for item in value for one in _nodes_in(item))
    elif isinstance(value, slice):
        yield from _nodes_in((value.start, value.stop, value.step))


def _dotted(name: str) -> str:
    """The path of a module or a tensor, if it is safe: torch writes it into code."""
    for number, part in enumerate(name.split(".")):
        checked_part(part, fx.GraphModule if number == 0 else nn.Module)
    return name


def _check_default(args: tuple[Any, ...]) -> None:
    values = [one for a in args for one in (a if isinstance(a, (list, tuple)) else (a,))]
    if len(args) > 1 or not all(isinstance(v, (bool, int, float, str, type(None))) for v in values):
        raise Foreign("an argument with a default that is no plain value")


def _dump_state(graph: fx.GraphModule, tensors: list[Tensor]) -> list[dict[str, Any]]:
    """List the places of each tensor in the graph; a tied tensor is written once."""
    places, known = [], {}
    for parameter, named in (
        (True, graph.named_parameters(remove_duplicate=False)),
        (False, graph.named_buffers(remove_duplicate=False)),
    ):
        for path, tensor in named:
            if id(tensor) not in known:
                known[id(tensor)] = len(tensors)
                tensors.append(tensor)
            owner, _, leaf = path.rpartition(".")
            holder = graph.get_submodule(owner)
            places.append(
                {
                    "path": path,
                    "tensor": known[id(tensor)],
                    "parameter": parameter,
                    "persistent": leaf not in holder._non_persistent_buffers_set,
                }
            )
    return places


def _restore_state(root: nn.Module, places: list[dict[str, Any]], tensors: list[Tensor]) -> int:
    made: dict[int, nn.Parameter] = {}
    used = set()
    for place in places:
        number = place["tensor"]
        if type(number) is not int or not 0 <= number < len(tensors):
            raise Foreign(f"tensor {str(number)[:40]} of {len(tensors)}")
        used.add(number)
        value: Any = tensors[number]
        if place["parameter"]:
            value = made.setdefault(number, nn.Parameter(value, requires_grad=False))
        _place(root, place["path"], value, persistent=bool(place["persistent"]))
    return len(used)


def _place(root: nn.Module, path: str, value: Any, *, persistent: bool = True) -> None:
    """Put a module, parameter or buffer where `path` says, making the holders it needs."""
    *owners, leaf = path.split(".")
    holder = root
    for part in owners:
        child = holder._modules.get(part)
        if child is None:
            if type(holder) is not nn.Module:
                raise Foreign(f"{path}, inside a module that has no such part")
            child = nn.Module()
            holder._modules[_checked(holder, root, part)] = child
        holder = child
    _checked(holder, root, leaf)
    if isinstance(value, nn.Module):
        if leaf in holder._modules:
            raise Foreign(f"two parts called {path}")
        holder._modules[leaf] = value
        return
    slots: Any = holder._parameters if isinstance(value, nn.Parameter) else holder._buffers
    there = slots.get(leaf)
    if type(holder) is nn.Module:
        if hasattr(holder, leaf):
            raise Foreign(f"two tensors called {path}")
    elif there is None or there.shape != value.shape:
        raise Foreign(f"a tensor {path} that does not fit its module")
    if isinstance(value, nn.Parameter):
        setattr(holder, leaf, value)  # Recurrent layers keep a list of their own, too.
        return
    slots[leaf] = value
    if not persistent:
        holder._non_persistent_buffers_set.add(leaf)


def _checked(holder: nn.Module, root: nn.Module, part: str) -> str:
    return checked_part(part, fx.GraphModule if holder is root else nn.Module)
