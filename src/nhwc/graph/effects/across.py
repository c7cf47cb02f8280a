"""Find what one part of a model reads and another writes: a graph of the first would freeze it.

class Net(nn.Module):
    def forward(self, x):
        MODE["scale"] = 2.0
        y = self.part(x)        reads MODE["scale"], which is 1.0 while `part` is traced alone
        MODE["scale"] = 1.0
        return self.head(y)     reads self.part.calls, which `part` counts
"""

from __future__ import annotations

from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from torch import jit, nn

from ...models.contents import is_object
from ...models.trees import CONTAINERS
from ..code.accesses import Accesses, by_method
from ..code.reached import codes_in, functions_of, is_users, names_in
from ..modules.leaves import HOLDERS, is_leaf
from .outside import is_users_class, stored_by

_Place = tuple[int, str]
"""What can be written: the items of a container, a field of an object, a global of a file."""


def read_across(model: nn.Module) -> dict[nn.Module, str]:
    """Say of each part that reads what code of others writes why no graph may replace it.

    A part whose own code writes it, too, shows while it is traced whether it leaves anything.

    >>> read_across(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()))
    {}
    """
    parts = [p for p in model.modules() if not (isinstance(p, jit.ScriptModule) or is_leaf(p))]
    one_of_each = {type(part): part for part in reversed(parts)}
    codes = {kind: _Code(part) for kind, part in one_of_each.items()}
    writers: dict[_Place, set[type]] = {}
    for part in parts:
        for place in codes[type(part)].written_by(part):
            writers.setdefault(place, set()).add(type(part))
    found: dict[nn.Module, str] = {}
    for part in parts if writers else ():
        for place, name in codes[type(part)].read_by(part).items():
            if place in writers and type(part) not in writers[place]:
                found[part] = f"it reads {name}, which other code of the model writes"
    return found


class _Code:
    """What the code of a class reads and writes, in its modules and outside of them."""

    def __init__(self, part: nn.Module) -> None:
        self._accesses = Accesses()
        self._methods: dict[tuple[type, str], tuple[set[str], set[str]]] = {}
        self._named: dict[int, tuple[dict[str, Any], set[str]]] = {}
        self._set: set[_Place] = set()
        self._selves: set[str] = set()
        for one in filter(is_users, functions_of(part)):
            code, space = one.__code__, one.__globals__
            self._named.setdefault(id(space), (space, set()))[1].update(names_in(code))
            self._set |= {(id(space), name) for name in stored_by(code, ("GLOBAL",))}
            self._selves |= {*code.co_varnames[: min(code.co_argcount, 1)]}
            for inner in codes_in(code):
                self._accesses.note(inner)

    def read_by(self, part: nn.Module) -> dict[_Place, str]:
        found = {(id(space), one): one for space, names in self._named.values() for one in names}
        for name, value in self._reached_from(part):
            if isinstance(value, CONTAINERS):
                found[id(value), ""] = name
            elif value is not part:
                fields = self._accesses.read[name] | self._by_methods(name, value)[0]
                found |= {(id(value), field): f"{name}.{field}" for field in fields}
        return found

    def written_by(self, part: nn.Module) -> set[_Place]:
        found = {*self._set}
        for name in self._selves:
            found |= {(id(part), field) for field in self._accesses.stored(name)}
        for name, value in self._reached_from(part):
            if isinstance(value, CONTAINERS):
                found |= {(id(value), "")} if self._accesses.fills(name) else set()
            elif isinstance(value, ContextVar):
                found |= {(id(value), "get")} if "set" in self._accesses.read[name] else set()
            else:
                fields = self._accesses.stored(name) | self._by_methods(name, value)[1]
                found |= {(id(value), field) for field in fields}
        return found

    def _by_methods(self, name: str, value: Any) -> tuple[set[str], set[str]]:
        """What the methods of an object that the code names read and write in it."""
        read: set[str] = set()
        written: set[str] = set()
        for method in (*self._accesses.read[name], *_OPERATORS) if is_object(value) else ():
            key = type(value), method
            if key not in self._methods:
                self._methods[key] = by_method(*key)
            read |= self._methods[key][0]
            written |= self._methods[key][1]
        return read, written

    def _reached_from(self, part: nn.Module) -> Iterator[tuple[str, Any]]:
        """What the code can write into, by the name in front of its fields."""
        own: dict[str, Any] = {**vars(part), **part._modules}
        names = {name for _, named in self._named.values() for name in named}
        for space, named in (*self._named.values(), (own, names)):
            for name in named & space.keys():
                value = space[name]
                if isinstance(value, (*CONTAINERS, *HOLDERS)):
                    held = value.children() if isinstance(value, nn.Module) else [*value]
                    items = dict.values(value) if isinstance(value, dict) else held
                    yield from ((f"{name}[]", one) for one in items if isinstance(one, nn.Module))
                known = (*CONTAINERS, ContextVar, nn.Module)
                if isinstance(value, known) or is_object(value) or is_users_class(value):
                    yield name, value


_OPERATORS = ("__call__", "__getitem__", "__setitem__")
"""Methods that code calls without their names."""
