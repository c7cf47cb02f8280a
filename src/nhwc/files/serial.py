"""A graph as plain values, and back: operators by name, arguments tagged, no code in either."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, fx, nn

from .guests import guest, guest_name
from .layers import dump_layer, restore_layer
from .plain import Foreign, checked_part, from_plain, identifier, refusal, to_plain
from .vocabulary import ATTRIBUTES, METHODS, function_names, functions


def dump(graph: fx.GraphModule) -> tuple[dict[str, Any], list[Tensor]]:
    """Nodes, modules and the places of tensors as plain values, and the tensors."""
    paths = [str(n.target) for n in graph.graph.nodes if n.op == "call_module"]
    tensors: list[Tensor] = []
    data = {
        "name": type(graph).__name__ if type(graph) is not fx.GraphModule else graph._get_name(),
        "nodes": [_dump_node(node) for node in graph.graph.nodes],
        "modules": {path: dump_layer(graph.get_submodule(path), path) for path in paths},
        "state": _dump_state(graph, tensors),
    }
    return data, tensors


def restore(data: dict[str, Any], tensors: list[Tensor]) -> fx.GraphModule:
    """The graph that `dump` was given; raises Foreign for anything it cannot have written."""
    root = nn.Module()
    for path, module in data["modules"].items():
        _place(root, path, restore_layer(module), check=False)
    used = _restore_state(root, data["state"], tensors)
    if used != len(tensors):
        raise Foreign(f"{used} of {len(tensors)} tensors are used")
    for path, tensor in (*root.named_parameters(), *root.named_buffers()):
        if tensor.is_meta:
            raise Foreign(f"{path} has no values")
    graph = fx.Graph()
    known: dict[str, fx.Node] = {}
    for node in data["nodes"]:
        known[identifier(node["name"])] = _restore_node(graph, root, node, known)
    graph.lint()
    return fx.GraphModule(root, graph, identifier(data["name"])).eval()


def _dump_node(node: fx.Node) -> dict[str, Any]:
    target = node.target
    if node.op == "call_function":
        name = function_names().get(target) or guest_name(target)
        if name is None:
            raise refusal(node.name, f"it calls {getattr(target, '__name__', target)}")
        if target is getattr and node.args[1] not in ATTRIBUTES:
            raise refusal(node.name, f"it reads the attribute {node.args[1]!r}")
        target = name
    elif node.op == "call_method" and target not in METHODS:
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
    if not isinstance(args, tuple) or not isinstance(kwargs, dict):
        raise Foreign("arguments that are none")
    target: str | Callable[..., Any] = name
    if op == "call_function":
        found = functions().get(name) or guest(name)
        if found is None:
            raise Foreign(f"the function {name!r}")
        target = found
        if target is getattr and args[1] not in ATTRIBUTES:
            raise Foreign(f"getattr of {args[1]!r}")
    elif op == "call_method":
        if name not in METHODS:
            raise Foreign(f"the method {name!r}")
    elif op == "call_module":
        if type(root.get_submodule(name)) is nn.Module:
            raise Foreign(f"a call of {name}, which computes nothing")
    elif op == "get_attr":
        owner, _, leaf = name.rpartition(".")
        if not isinstance(getattr(root.get_submodule(owner), leaf), Tensor):
            raise Foreign(f"a read of {name}, which is no tensor")
    elif op not in ("placeholder", "output"):
        raise Foreign(f"a node of kind {op!r}")
    for part in str(name).split(".") if op in ("placeholder", "get_attr", "call_module") else ():
        # Torch writes these into the code it generates.
        (identifier if op == "placeholder" else checked_part)(part)
    return graph.create_node(op, target, args, kwargs, data["name"])


def _dump_state(graph: fx.GraphModule, tensors: list[Tensor]) -> list[dict[str, Any]]:
    """Where each tensor belongs; tied ones are written once."""
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
        number = int(place["tensor"])
        if not 0 <= number < len(tensors):
            raise Foreign(f"tensor {number} of {len(tensors)}")
        used.add(number)
        value: Any = tensors[number]
        if place["parameter"]:
            value = made.setdefault(number, nn.Parameter(value, requires_grad=False))
        _place(root, place["path"], value, check=True, persistent=bool(place["persistent"]))
    return len(used)


def _place(root: nn.Module, path: str, value: Any, *, check: bool, persistent: bool = True) -> None:
    """Put a module, parameter or buffer where `path` says, making the holders it needs."""
    *owners, leaf = path.split(".")
    holder = root
    for part in owners:
        child = holder._modules.get(part)
        if child is None:
            if type(holder) is not nn.Module:
                raise Foreign(f"{path} is inside a module that has no such part")
            child = nn.Module()
            holder._modules[checked_part(part)] = child
        holder = child
    checked_part(leaf)
    if isinstance(value, nn.Module):
        if leaf in holder._modules:
            raise Foreign(f"{path} is there twice")
        holder._modules[leaf] = value
        return
    slots: Any = holder._parameters if isinstance(value, nn.Parameter) else holder._buffers
    there = slots.get(leaf)
    if type(holder) is nn.Module:
        if hasattr(holder, leaf):
            raise Foreign(f"{path} is there already")
    elif check and (there is None or there.shape != value.shape):
        raise Foreign(f"{path} does not fit its module")
    if isinstance(value, nn.Parameter):
        setattr(holder, leaf, value)  # Recurrent layers keep a list of their own, too.
        return
    slots[leaf] = value
    if not persistent:
        holder._non_persistent_buffers_set.add(leaf)
