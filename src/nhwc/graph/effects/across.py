"""Find what one part of a model reads and another writes: a graph of the first would freeze it.

class Net(nn.Module):
    def forward(self, x):
        MODE["scale"] = 2.0
        y = self.part(x)        reads MODE["scale"], which is 1.0 while `part` is traced alone
        MODE["scale"] = 1.0
        return y
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from torch import jit, nn

from ...models.contents import is_object
from ...models.trees import CONTAINERS
from ..code.mentions import mentions_of
from ..code.reached import functions_behind, functions_of, names_in
from ..modules.leaves import is_leaf
from .outside import is_users_class, stored_by

_Place = tuple[int, str]
"""What can be written: an item of a container, a field of an object, a global of a file."""

_SET = "ContextVar.set"
"""What is written where code sets a variable of a context."""


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
    """What the code of a class names, in its modules and outside of them, and what it writes."""

    def __init__(self, part: nn.Module) -> None:
        functions = [*functions_of(part), *functions_behind(part)]
        self._names = {name for one in functions for name in names_in(one.__code__)}
        self._changed = mentions_of(part).written
        self._changed |= {name for one in functions for name in stored_by(one.__code__)}
        self._changed |= {_SET} if "set" in self._names else set()
        self._globals: dict[_Place, str] = {}
        self._outside: dict[_Place, str] = {}
        self._set: set[_Place] = set()
        for one in functions:
            named, space = names_in(one.__code__), one.__globals__
            self._globals |= {(id(space), name): name for name in named & space.keys()}
            self._outside |= self._places(space, named)
            self._set |= {(id(space), name) for name in stored_by(one.__code__, ("GLOBAL",))}

    def read_by(self, part: nn.Module) -> dict[_Place, str]:
        return self._globals | self._reached_from(part)

    def written_by(self, part: nn.Module) -> set[_Place]:
        reached = self._reached_from(part).items()
        return self._set | {place for place, name in reached if (place[1] or name) in self._changed}

    def _reached_from(self, part: nn.Module) -> dict[_Place, str]:
        return self._outside | self._places(vars(part), self._names)

    def _places(self, space: dict[str, Any], named: set[str]) -> dict[_Place, str]:
        """The containers in `space` that are `named`, and the fields of objects, by their names."""
        found: dict[_Place, str] = {}
        for name in named & space.keys():
            value = space[name]
            if isinstance(value, CONTAINERS):
                found[id(value), ""] = name
            elif isinstance(value, ContextVar):
                found[id(value), _SET] = name
            elif is_object(value) or is_users_class(value):
                found |= {(id(value), field): name for field in self._names}
        return found
