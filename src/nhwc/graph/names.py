"""Names that generated code can say: those of parts are the user's, and may be any text at all.

A graph's code reads `self.boxes.conv`. A part that is called `class`, or has a quote in its name,
or is called like something that a GraphModule has itself, gets another name in the graph; reports
go on saying the user's.
"""

from __future__ import annotations

import keyword
import re
import unicodedata

from torch import fx, nn

_OWN = {*dir(fx.GraphModule(nn.Module(), fx.Graph())), "report"} - {*dir(nn.Module())}
"""What a GraphModule has beside what every module has."""


def is_sayable(name: str) -> bool:
    """Whether `self.name`, or `getattr(self, "name")`, is code that reads just that.

    >>> is_sayable("0"), is_sayable("a b"), is_sayable("class"), is_sayable('a"b')
    (True, True, False, False)
    """
    if name.isidentifier():
        # Python reads the letters of an identifier in their plain form.
        return not keyword.iskeyword(name) and unicodedata.normalize("NFKC", name) == name
    return name.isprintable() and not {'"', "\\"} & {*name}


def sayable(name: str) -> str:
    """`name`, or one like it that code can say.

    >>> sayable("class"), sayable('a"b')
    ('class_', 'a_b')
    """
    if is_sayable(name):
        return name
    plain = re.sub(r"\W", "_", name, flags=re.ASCII)
    return plain if is_sayable(plain) else f"{plain}_"


def renamed_parts(graph: fx.Graph, root: nn.Module) -> dict[str, str]:
    """The user's path of each part of `root` that `graph` must call otherwise, by the new path.

    The nodes of `graph` are given the new paths.
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
    """How the user calls the part that `graph` has at `path`."""
    names: dict[str, str] = graph.meta.get("names", {})
    return names.get(path, path)


def _sayable_path(path: str, root: nn.Module) -> str:
    parts = []
    holder: nn.Module | None = root
    for place, name in enumerate(path.split(".")):
        siblings: set[str] = set()
        if holder is not None:
            siblings = {*holder._modules, *holder._parameters, *holder._buffers}
        fresh = sayable(name)
        while (fresh != name and fresh in siblings) or (not place and fresh in _OWN):
            fresh += "_"
        parts.append(fresh)
        holder = None if holder is None else holder._modules.get(name)
    return ".".join(parts)
