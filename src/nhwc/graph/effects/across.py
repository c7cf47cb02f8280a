"""Find what one part of a model reads and another writes: a graph of the first would freeze it.

class Net(nn.Module):
    def forward(self, x):
        MODE["scale"] = 2.0
        y = self.part(x)        reads MODE["scale"], which is 1.0 while `part` is traced alone
        MODE["scale"] = 1.0
        return self.head(y)     reads self.part.calls, which `part` counts
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from torch import jit, nn

from ...models.contents import home_of, is_object, is_watched, slots_of
from ..code.accesses import ANY
from ..code.reached import is_users
from ..modules.leaves import hooks_of, is_leaf
from .touched import CALLED, Methods, PartCode, Place, reached_from


def read_across(model: nn.Module) -> dict[nn.Module, str]:
    """Say of each part that reads what code of others writes why no graph may replace it.

    A part whose own code writes it, too, shows while it is traced whether it leaves anything.

    >>> read_across(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()))
    {}
    """
    known: dict[tuple[object, ...], PartCode] = {}
    codes: dict[nn.Module, PartCode] = {}
    methods = Methods()
    for part in model.modules():
        if not isinstance(part, jit.ScriptModule) and (hooks_of(part) or not is_leaf(part)):
            kind = _kind(part)
            codes[part] = known[kind] = known.get(kind) or PartCode(part, methods)
    written = _Written(model, codes, methods)
    found: dict[nn.Module, str] = {}
    for part, code in codes.items():
        if name := written.read_by(part, code):
            found[part] = f"it reads {name}, which other code of the model writes"
        elif name := written.elsewhere(part):
            found[part] = f"it writes {name} of a part that is not in it"
        elif name := written.unseen(part):
            found[part] = f"its forward may change {name}, whose class is of another package"
        elif name := min(written.slots(part), default=""):
            found[part] = f"its forward changes self.{name}, which lies in __slots__"
    return found


def _kind(part: nn.Module) -> tuple[object, ...]:
    """The same for parts that run the same functions."""
    held = [value for value in vars(part).values() if isinstance(value, CALLED)]
    return type(part), *map(id, (*held, *hooks_of(part)))


class _Written:
    """Who writes what: surely, as far as the code names it, or perhaps."""

    def __init__(
        self, model: nn.Module, codes: Mapping[nn.Module, PartCode], methods: Methods
    ) -> None:
        self._model = model
        self._surely: dict[Place, set[nn.Module]] = defaultdict(set)
        self._perhaps: dict[Place, set[nn.Module]] = defaultdict(set)
        for part, code in codes.items():
            for place in code.written_by(part):
                self._perhaps[place].add(part)
                if place[1] != ANY:
                    self._surely[place].add(part)
        self._objects = {id(one): one for one in reached_from([model])}
        called = {name for code in codes.values() for name in code.others}
        kinds = {type(one) for one in self._objects.values() if is_users(type(one))}
        writing = {kind: {name: methods.of(kind, name)[1] for name in called} for kind in kinds}
        for part, code in codes.items():
            for place in code.written_in_others(part, writing):
                self._perhaps[place].add(part)

    def read_by(self, part: nn.Module, code: PartCode) -> str:
        """The name of what `part` reads and others write; '' if there is nothing."""
        written = {
            place
            for place, writers in self._perhaps.items()
            if part not in self._surely[place] and (place[1] != ANY or writers - {part})
        }
        fields: dict[int, set[str]] = defaultdict(set)
        for owner, field in written:
            fields[owner].add(field)
        read = code.read_by(part).items()
        names = [name for (owner, field), name in read if _meet({field}, fields[owner])]
        if names:
            return min(names)
        for field in sorted(_meet(code.own, fields[id(part)])):
            # Whoever holds the part, and alone leads to it, shows while it is traced what it sets.
            for writer in self._perhaps[id(part), field] - {part}:
                if part in _around(writer, self._model):
                    return f"self.{field}"
        for kind in type(part).__mro__:
            for field in sorted(_meet(code.of_classes, fields[id(kind)])):
                if self._perhaps[id(kind), field] - {part}:
                    return f"{kind.__name__}.{field}"
        perhaps = {
            (place, field)
            for place, field in written
            if place != id(part) and place in self._objects and self._perhaps[place, field] - {part}
            if self._may_read(code, self._objects[place], field)
        }
        reached = {id(one) for one in reached_from([part, *code.values])} if perhaps else ()
        found = min((field for place, field in perhaps if place in reached), default="")
        return "fields of an object" if found == ANY else found

    @staticmethod
    def _may_read(code: PartCode, owner: object, field: str) -> bool:
        """Code that computes names of fields of modules reads their parts mostly."""
        read = code.read_in(type(owner))
        known = isinstance(owner, nn.Module) and field in (*owner._modules, *owner._parameters)
        return field in read if known else bool(_meet(read, {field}))

    def slots(self, part: nn.Module) -> list[str]:
        """The `__slots__` of `part` that its code may write."""
        return [name for name in slots_of(part) if part in self._perhaps[id(part), name]]

    def unseen(self, part: nn.Module) -> str:
        """A field that `part` may write where no trace of it looks; '' if there is none."""
        homes = {home_of(one) for one in part.modules()}
        written = [(self._objects.get(place), field) for place, field in self._places(part)]
        unseen = (one for one in written if is_object(one[0]) and not is_watched(one[0], homes))
        return min((f"{type(owner).__name__}.{field}" for owner, field in unseen), default="")

    def elsewhere(self, part: nn.Module) -> str:
        """A field that `part` may write in modules that are not in it; '' if there is none."""
        places = self._places(part)
        if not places:
            return ""
        within = {*map(id, part.modules())}
        modules = {key for key, one in self._objects.items() if isinstance(one, nn.Module)}
        fields = (field for place, field in places if place in modules - within and field)
        return min(fields, default="")

    def _places(self, part: nn.Module) -> list[Place]:
        return [place for place, writers in self._perhaps.items() if part in writers]


def _meet(read: set[str], written: set[str]) -> set[str]:
    """Those of the written fields that are read; the items of a container are no field."""
    if ANY in read:
        return written - {""}
    return written & {*read, ANY} if read - {""} else written & read


def _around(writer: nn.Module, model: nn.Module) -> set[nn.Module]:
    """The parts of `model` to which ways lead that do not pass `writer`."""
    found: set[nn.Module] = set()
    todo = [model]
    while todo:
        part = todo.pop()
        if part is not writer and part not in found:
            found.add(part)
            todo += part.children()
    return found
