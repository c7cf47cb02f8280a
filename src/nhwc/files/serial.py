"""A graph as plain values, and back: operators by name, arguments tagged, no code in either."""

from __future__ import annotations

import inspect
import keyword
import math
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..errors import InputError
from .guests import guest, guest_name
from .vocabulary import (
    ATTRIBUTES,
    METHODS,
    enumerations,
    function_names,
    functions,
    module_names,
    modules,
)


class Foreign(Exception):
    """Plain values that no graph could have been written as."""


def dump(graph: fx.GraphModule) -> tuple[dict[str, Any], list[Tensor]]:
    """Nodes, modules and the places of tensors as plain values, and the tensors."""
    paths = [str(n.target) for n in graph.graph.nodes if n.op == "call_module"]
    tensors: list[Tensor] = []
    data = {
        "name": type(graph).__name__ if type(graph) is not fx.GraphModule else graph._get_name(),
        "nodes": [_dump_node(node) for node in graph.graph.nodes],
        "modules": {path: _dump_module(graph.get_submodule(path), path) for path in paths},
        "state": _dump_state(graph, tensors),
    }
    return data, tensors


def restore(data: dict[str, Any], tensors: list[Tensor]) -> fx.GraphModule:
    """The graph that `dump` was given; raises Foreign for anything it cannot have written."""
    root = nn.Module()
    for path, module in data["modules"].items():
        _place(root, path, _restore_module(module), check=False)
    used = _restore_state(root, data["state"], tensors)
    if used != len(tensors):
        raise Foreign(f"{used} of {len(tensors)} tensors are used")
    for path, tensor in (*root.named_parameters(), *root.named_buffers()):
        if tensor.is_meta:
            raise Foreign(f"{path} has no values")
    graph = fx.Graph()
    known: dict[str, fx.Node] = {}
    for node in data["nodes"]:
        known[_identifier(node["name"])] = _restore_node(graph, root, node, known)
    graph.lint()
    return fx.GraphModule(root, graph, _identifier(data["name"])).eval()


def _dump_node(node: fx.Node) -> dict[str, Any]:
    target = node.target
    if node.op == "call_function":
        name = function_names().get(target) or guest_name(target)
        if name is None:
            raise _refusal(node.name, f"it calls {getattr(target, '__name__', target)}")
        if target is getattr and node.args[1] not in ATTRIBUTES:
            raise _refusal(node.name, f"it reads the attribute {node.args[1]!r}")
        target = name
    elif node.op == "call_method" and target not in METHODS:
        raise _refusal(node.name, f"it calls the method {target!r}")
    elif node.op == "placeholder" and str(target).startswith("*"):
        raise _refusal(node.name, "it takes a varying number of arguments")
    return {
        "op": node.op,
        "name": node.name,
        "target": str(target),
        "args": _dump(node.args),
        "kwargs": _dump(dict(node.kwargs)),
    }


def _restore_node(
    graph: fx.Graph, root: nn.Module, data: dict[str, Any], known: dict[str, fx.Node]
) -> fx.Node:
    op, name = data["op"], data["target"]
    args, kwargs = _load(data["args"], known), _load(data["kwargs"], known)
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
        (_identifier if op == "placeholder" else _part)(part)
    return graph.create_node(op, target, args, kwargs, data["name"])


def _dump_module(module: nn.Module, path: str) -> dict[str, Any]:
    layer = _layer_of(module)
    kind = module_names().get(layer)
    if kind is None:
        raise _refusal(
            path, f"it calls a {type(module).__name__}, whose own code it takes to load it"
        )
    if module._forward_hooks or module._forward_pre_hooks or hasattr(module, "parametrizations"):
        raise _refusal(path, "it has hooks or parametrizations, which are code of your own")
    arguments = {}
    for name in _arguments_of(layer):
        arguments[name] = _dump_argument(module, name, f"{path}.{name}")
    return {"class": kind, "arguments": arguments}


def _arguments_of(layer: type[nn.Module]) -> list[str]:
    """What the constructor takes, apart from where and in which precision."""
    if issubclass(layer, nn.RNNBase):  # It says *args: what follows is what its base takes.
        names = [name for name in nn.RNNBase.__constants__ if name not in ("mode", "proj_size")]
        return names + {nn.LSTM: ["proj_size"], nn.RNN: ["nonlinearity"]}.get(layer, [])
    return [
        name
        for name, parameter in inspect.signature(layer).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        and name not in ("device", "dtype")
    ]


def _layer_of(module: nn.Module) -> type[nn.Module]:
    """The class whose code a call of `module` runs: that of a subclass which only adds to it."""
    kinds = type(module).__mro__
    for number, kind in enumerate(kinds):
        if kind in module_names():
            added = {name for other in kinds[:number] for name in vars(other)}
            own = {name for name in added if not name.startswith("__")} | (added & {"__call__"})
            return type(module) if own & {*dir(kind)} else kind
    return type(module)


def _dump_argument(module: nn.Module, name: str, path: str) -> Any:
    if isinstance(module, nn.MultiheadAttention):
        special = {"bias": "in_proj_bias", "add_bias_kv": "bias_k"}
        if name in special:
            return getattr(module, special[name]) is not None
    value = getattr(module, name, None)
    if isinstance(value, nn.Module):
        return {"module": _dump_module(value, path)}
    if name == "bias":
        return value is not None and value is not False
    return _dump(value)


def _restore_module(data: dict[str, Any]) -> nn.Module:
    kind = modules()[data["class"]]
    arguments = {}
    for name, value in data["arguments"].items():
        nested = isinstance(value, dict) and "module" in value
        arguments[name] = _restore_module(value["module"]) if nested else _load(value, {})
    with torch.device("meta"):
        return kind(**arguments)


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
            holder._modules[_part(part)] = child
        holder = child
    _part(leaf)
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


def _dump(value: Any) -> Any:
    """Plain values as they are; all others as a mapping with one key, their kind."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, slice):
        return {"slice": [_dump(part) for part in (value.start, value.stop, value.step)]}
    if value is Ellipsis:
        return {"ellipsis": True}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return {"tuple": [_dump(item) for item in value]}
    if isinstance(value, list):
        return [_dump(item) for item in value]
    if isinstance(value, dict):
        return {"dict": [[_dump(key), _dump(item)] for key, item in value.items()]}
    for kind, named in enumerations().items():
        if str(value) in named and named[str(value)] is value:
            return {kind: str(value)}
    raise _refusal(type(value).__name__, f"{str(value)[:60]} has no plain form")


def _load(value: Any, known: dict[str, fx.Node]) -> Any:
    if isinstance(value, list):
        return [_load(item, known) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "node":
        return known[inner]
    if kind == "slice":
        return slice(*(_load(part, known) for part in inner))
    if kind == "ellipsis":
        return Ellipsis
    if kind == "float":
        return float(inner)
    if kind == "device":
        return torch.device(inner)
    if kind == "tuple":
        return tuple(_load(item, known) for item in inner)
    if kind == "dict":
        return {_load(key, known): _load(item, known) for key, item in inner}
    return enumerations()[kind][inner]


def _identifier(name: Any) -> str:
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        raise Foreign(f"the name {str(name)[:40]!r}")
    return name


def _part(name: str) -> str:
    """A part of a dotted name: what torch quotes in its code must not end the quotes."""
    if not re.fullmatch(r"[\w-]+", name):
        raise Foreign(f"the name {name[:40]!r}")
    return name


def _refusal(where: str, why: str) -> InputError:
    return InputError(
        f"the model cannot be saved: {where}: {why}. A saved file holds torch's own operators "
        "alone; keep such a model as code and weights."
    )
