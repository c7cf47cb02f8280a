"""Names in a graph: parts get others where generated code cannot say theirs.

A graph's code reads `self.boxes.conv`. A part gets another name in the graph if it is called
`class`, has a quote in its name, or is called like an attribute of GraphModule. Reports go on
using the user's name.
"""

from __future__ import annotations

import keyword
import operator
import re
import unicodedata
from collections.abc import Sequence, Set
from typing import Any

from torch import fx, nn

_OWN = {*dir(fx.GraphModule(nn.Module(), fx.Graph())), "report"} - {*dir(nn.Module())}
"""Attributes that a GraphModule has and other modules do not."""

CONSTANT = "_tensor_constant"
"""The beginning of the names that torch.fx gives to tensors made by the traced code."""

FOLLOWING = "_buffer_constant"
"""The beginning of the names of those that it makes of buffers, and that are cast with them."""


def is_sayable(name: str) -> bool:
    """Whether `self.name`, or `getattr(self, "name")` if it is no identifier, reads that attribute.

    >>> is_sayable("0"), is_sayable("a b"), is_sayable("class"), is_sayable('a"b')
    (True, True, False, False)
    """
    if name.isidentifier():
        # Python normalizes identifiers, so another form of the same letters is another name.
        return not keyword.iskeyword(name) and unicodedata.normalize("NFKC", name) == name
    return name.isprintable() and not {'"', "\\"} & {*name}


def sayable(name: str) -> str:
    """Return `name`, or one like it that generated code can use.

    >>> sayable("class"), sayable('a"b')
    ('class_', 'a_b')
    """
    if is_sayable(name):
        return name
    plain = re.sub(r"\W", "_", name, flags=re.ASCII)
    return plain if is_sayable(plain) else f"{plain}_"


def sayable_function(function: Any, args: Sequence[Any]) -> Any:
    """Return `function`, or one that computes the same and that generated code can use.

    >>> sayable_function(operator.pow, (-2, 3)), sayable_function(operator.neg, (-2,))
    (<built-in function pow>, <built-in function neg>)

    Torch writes a power as `-2 ** x`, which is -(2 ** x).
    """
    base = args[0] if function is operator.pow else None
    negative = isinstance(base, (int, float)) and str(base).startswith("-")
    return pow if negative else function


def renamed_parts(graph: fx.Graph, root: nn.Module) -> dict[str, str]:
    """Give new paths to the nodes of `graph` whose paths in `root` code cannot use.

    The result maps each new path to the user's.
    """
    found: dict[str, str] = {}
    new: dict[str, str] = {}
    for node in graph.nodes:
        if node.op in ("call_module", "get_attr"):
            path = str(node.target)
            if path not in new:
                new[path] = _sayable_path(path, root)
            if new[path] != path:
                found[new[path]] = path
                node.target = new[path]
    return found


def user_path(graph: fx.GraphModule, path: str) -> str:
    """Return the user's path of the part that `graph` has at `path`."""
    names: dict[str, str] = graph.meta.get("names", {})
    return names.get(path, path)


def _sayable_path(path: str, root: nn.Module) -> str:
    parts = []
    holder: nn.Module | None = root
    for place, name in enumerate(path.split(".")):
        parts.append(_fresh(name, holder, frozenset() if place else _OWN))
        holder = None if holder is None else holder._modules.get(name)
    return ".".join(parts)


def _fresh(name: str, holder: nn.Module | None, own: Set[str]) -> str:
    """A name for this part of `holder` that code can use, and that no other part of it gets."""
    if is_sayable(name) and name not in own:
        return name
    held: tuple[str, ...] = ()
    if holder is not None:
        held = (*vars(holder), *holder._modules, *holder._parameters, *holder._buffers)
    taken = {*own, *filter(is_sayable, held)}
    found: dict[str, str] = {}
    for part in dict.fromkeys((*held, name)):
        if is_sayable(part) and part not in own:
            continue
        fresh = sayable(part)
        while fresh in taken:
            fresh += "_"
        taken.add(fresh)
        found[part] = fresh
    return found[name]


def is_constant(node: fx.Node) -> bool:
    """Whether this is a tensor that the code made without its inputs."""
    name = str(node.target).rpartition(".")[2]
    return node.op == "get_attr" and name.startswith((CONSTANT, FOLLOWING))


def is_made(path: str) -> bool:
    """Whether the tensor at `path` is one that the code makes, in a type that no cast changes.

    >>> is_made("part._tensor_constant0"), is_made("_tensor_constant_layer.weight")
    (True, True)
    """
    return any(name.startswith(CONSTANT) for name in path.split("."))
