"""What a graph returns, also inside of dicts, dataclasses and named tuples that its code makes.

Python's own dicts, lists and tuples lie in the arguments of the output; those of other classes, as
transformers return them, are made by nodes.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.fx.immutable_collections import immutable_dict, immutable_list

from ...models.contents import is_as
from ...models.trees import can_be_remade


def made_by(value: object) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """By which arguments the class of `value`, a dataclass or a kind of dict, makes it again.

    >>> made_by(OrderedDict(a=1)), made_by({"a": 1})
    ((({'a': 1},), {}), None)
    """
    kind: Any = type(value)
    if kind is OrderedDict:
        return (dict(value),), {}  # type: ignore[call-overload]
    if kind in _PLAIN or not (isinstance(value, dict) or _has_fields(value)):
        return None
    named = dict(value) if isinstance(value, dict) else _fields_of(value, asked=True)
    try:
        again = kind(**named)
    except Exception:  # The code of a class may raise anything.
        return None
    same = type(again) is kind and all(map(_same, _held_by(again), _held_by(value)))
    return ((), named) if same else None


def is_lost(value: object) -> bool:
    """Whether a graph would make a plain list, tuple or dict of one of another kind, or nothing.

    This is asked of what `made_by` does not make.

    >>> class Boxes(list): ...
    >>> is_lost(Boxes()), is_lost([])
    (True, False)
    """
    if isinstance(value, tuple):
        return not can_be_remade(value)
    return type(value) not in _PLAIN and (isinstance(value, list | dict) or _has_fields(value))


_PLAIN = (list, dict, defaultdict, immutable_list, immutable_dict)


def _has_fields(value: object) -> bool:
    return dataclasses.is_dataclass(type(value))


def _fields_of(value: Any, *, asked: bool = False) -> dict[str, Any]:
    """The fields of a dataclass by name; those alone that are `asked` for when it is made."""
    fields = [one for one in dataclasses.fields(value) if one.init or not asked]
    return {one.name: getattr(value, one.name) for one in fields}


def _held_by(value: Any) -> tuple[dict[Any, Any], ...]:
    """What lies in a dict or a dataclass, and in its attributes."""
    inside = value if isinstance(value, dict) else _fields_of(value)
    return inside, getattr(value, "__dict__", {})


def _same(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    return list(one) == list(other) and all(is_as(one[key], other[key]) for key in one)


def is_made(node: object) -> bool:
    """Whether this node makes a dict, a dataclass or a named tuple of other nodes' values.

    Or a shape of known sizes.
    """
    kind = node.target if isinstance(node, fx.Node) else None
    return isinstance(kind, type) and (
        issubclass(kind, dict | torch.Size)
        or dataclasses.is_dataclass(kind)
        or hasattr(kind, "_fields")
    )


def only_holds(node: fx.Node) -> bool:
    """Whether this node makes what the caller gets, and nobody in the graph reads it."""
    return is_made(node) and all(user.op == "output" or only_holds(user) for user in node.users)


def contents_of(node: fx.Node) -> dict[str, Any] | tuple[Any, ...] | None:
    """What lies in the dict, by key, in the dataclass, by field, or in the named tuple it makes.

    None for other nodes, for a dataclass that changes what it is given, and for a call that leaves
    out what has no default.
    """
    kind: Any = node.target
    if not is_made(node):
        return None
    if issubclass(kind, dict):
        return dict(*node.args, **node.kwargs)
    if kind is torch.Size:
        sizes: Any = node.args[0]
        return tuple(sizes)
    if hasattr(kind, "__post_init__"):
        return None
    if issubclass(kind, tuple):
        known = dict.fromkeys(kind._fields, dataclasses.MISSING) | kind._field_defaults
    else:
        known = {field.name: field.default for field in dataclasses.fields(kind) if field.init}
    known |= dict(zip(known, node.args, strict=False)) | node.kwargs
    if dataclasses.MISSING in known.values():
        return None
    return tuple(known.values()) if issubclass(kind, tuple) else known


def is_returned(node: fx.Node) -> bool:
    """Whether the caller of the graph gets this value, alone or inside of another."""
    return any(user.op == "output" or (is_made(user) and is_returned(user)) for user in node.users)


def returned(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes whose values the caller gets, without those that only hold others."""
    waiting = list(graph.output_node().all_input_nodes)
    for node in waiting:
        if is_made(node):
            waiting += node.all_input_nodes
        else:
            yield node


def return_instead(node: fx.Node, instead: fx.Node) -> None:
    """Let the caller of the graph get the value of `instead` where it got that of `node`."""
    for user in list(node.users):
        if user.op == "output" or (is_made(user) and is_returned(user)):
            user.replace_input_with(node, instead)


def opened(value: Any) -> Any:
    """What the output returns, its nodes lying in objects as their values do in the real ones."""
    if isinstance(value, dict):
        return {key: opened(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(map(opened, value))
    contents: Any = contents_of(value) if isinstance(value, fx.Node) else None
    if contents is None:
        return value
    if issubclass(value.target, (dict, tuple)):
        return opened(contents)
    made = object.__new__(value.target)
    for name, item in contents.items():
        object.__setattr__(made, name, opened(item))
    return made
