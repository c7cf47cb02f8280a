"""Read from bytecode which fields code reads and stores of what, and which containers it fills."""

from __future__ import annotations

import dis
import inspect
import types
from collections import defaultdict
from collections.abc import Sequence, Set

from .reached import behind, instructions_of


class Accesses:
    """The fields that code reads and stores, by what stands in front, and the containers it fills.

    For `self.part.calls` that is "part", for `self.parts[0].calls` it is "parts[]", and where
    nothing is known it is empty. A variable stands for what was read last when it was assigned to.
    The field is ANY where code computes its name, or takes all fields as a dict.
    """

    def __init__(self) -> None:
        self.read: dict[str, set[str]] = defaultdict(set)
        self._stored: dict[str, set[str]] = defaultdict(set)
        self._filled: set[str] = set()
        self._behind: dict[str, list[str]] = {}

    def note(self, code: types.CodeType, own: str = "", stands_as: str = "") -> None:
        """Follow the names that are loaded in a row: `x[key] = value` may fill each of them.

        The variable `own` of a method, which holds what the method belongs to, stands as SELF, and
        that of a class's method as OWN_CLASS.
        """
        stands_as = stands_as or SELF
        row: list[str] = []
        copied: list[str] = []
        by_name: dict[int, list[tuple[str, str]]] = defaultdict(list)
        steps = [one for one in instructions_of(code) if one.opname != "EXTENDED_ARG"]
        for place, step in enumerate(steps):
            name, said = step.opname, step.argval
            if name in ("LOAD_GLOBAL", "LOAD_NAME") and said in (*_BY_NAME, "attrgetter"):
                length, field = _owner_and_field(steps[place + 1 :])
                by_name[place + length].append((said, field))
            if name in ("STORE_ATTR", "DELETE_ATTR"):
                for owner in self._owners(row or copied) or [""]:
                    self._stored[owner].add(str(said))
                if _adds_in_place(steps[:place]):
                    self._filled.add(str(said))
                row = copied = []
            elif name in ("LOAD_ATTR", "LOAD_METHOD"):
                for owner in self._owners(row) or [""]:
                    self.read[owner].add(str(said))
                    if said not in _BY_NAME:
                        self._note_by_name(str(said), owner, ANY, steps[place + 1 :])
                row = [*row, OWN_CLASS if said in _BASES else str(said)]
            elif row[-1:] == [OWN_CLASS] and name in ("BINARY_SUBSCR", "GET_ITER"):
                continue
            elif name in ("BINARY_SUBSCR", "GET_ITER") or step.argrepr == "[]":
                row = [*(f"{one}[]" for one in row), "[]"]
            elif name in ("STORE_SUBSCR", "DELETE_SUBSCR"):
                self._filled |= {one.removesuffix("[]") for one in row or copied}
                row = copied = []
            elif name.startswith(("COPY", "DUP_TOP")):
                copied = row
            elif name.startswith("STORE_FAST"):
                names = said if isinstance(said, tuple) else (said,)
                self._behind[str(names[0])] = self._owners(row)
                row = [str(names[-1])] if name == "STORE_FAST_LOAD_FAST" else []
            elif name.startswith("LOAD_") and name != "LOAD_CONST":
                for local in map(str, said if isinstance(said, tuple) else (said,)):
                    row = [*row, *self._behind.get(local, ()), stands_as if local == own else local]
            elif name.startswith("CALL") and "type" in row:
                row = [*row, OWN_CLASS]
            elif name not in _SKIPPED:
                row = []
            for builtin, field in by_name[place]:
                for owner in self._owners(row) or [""]:
                    self._note_by_name(builtin, owner, field, steps[place + 1 :])

    def _note_by_name(
        self, said: str, owner: str, field: str, after: Sequence[dis.Instruction]
    ) -> None:
        """Note what code does that says `getattr(owner, field)` or `owner.__dict__`."""
        if said in _READING:
            self.read["" if said.startswith("__get") else owner].add(field)
        looks = said in ("__dict__", "vars") and _only_looks(after, said)
        if said in _STORING and not looks:
            self._stored["" if said.startswith("__set") else owner].add(field)

    def _owners(self, row: list[str]) -> list[str]:
        """What a field is read off behind `row`."""
        last = row if row[-1:] == ["[]"] else row[-1:]
        return [*dict.fromkeys(one for name in last for one in (name, *self._behind.get(name, ())))]

    def read_off_others(self, own: Set[str]) -> set[str]:
        """The fields that are read off anything but these names."""
        return {field for name in self.read.keys() - own for field in self.read[name]}

    def stored_in_others(self, own: Set[str]) -> set[str]:
        return {field for name in self._stored.keys() - own for field in self._stored[name]}

    def stored(self, name: str) -> set[str]:
        return self._stored[name] | (self._stored[""] & self.read[name])

    def fills(self, name: str) -> bool:
        return name in self._filled or bool(self.read[name] & CHANGING)


def by_method(kind: type, method: str) -> tuple[set[str], set[str]]:
    """The fields of an object that a method, with those that it calls, reads and writes."""
    read: set[str] = set()
    written: set[str] = set()
    todo, seen = [method], set()
    while todo:
        name = todo.pop()
        functions = behind(inspect.getattr_static(kind, name, None)) if name not in seen else []
        seen.add(name)
        for one in functions:
            if not isinstance(one, types.FunctionType) or not one.__code__.co_argcount:
                continue
            told = Accesses()
            told.note(one.__code__, one.__code__.co_varnames[0])
            filled = {field for field in told.read[SELF] if told.fills(field)}
            read, written = read | told.read[SELF], written | told.stored(SELF) | filled
            todo += told.read[SELF]
    return read, written


def _adds_in_place(steps: Sequence[dis.Instruction]) -> bool:
    """Whether these end with `+=` or its like: a list or an array stays the one that it was."""
    last = next((one for one in reversed(steps) if one.opname not in ("SWAP", "ROT_TWO")), None)
    return last is not None and (
        last.opname.startswith("INPLACE") or (last.opname == "BINARY_OP" and "=" in last.argrepr)
    )


def _only_looks(steps: Sequence[dis.Instruction], said: str) -> bool:
    """Whether code that begins so only looks into the dict of fields that it has just named.

    So do `fields.items()`, `name in fields` and `fields["name"]`; but what lies there under a
    name of _HELD leads to more fields.
    """
    following = [one for one in steps[:6] if one.opname not in ("CACHE", "PRECALL")]
    if said == "vars":
        following = following[1:]  # The call.
    if len(following) < 2:
        return False
    first, second = following[:2]
    if first.opname in ("LOAD_ATTR", "LOAD_METHOD"):
        return first.argval in ("items", "keys", "values", "copy")
    item = second.opname == "BINARY_SUBSCR" or second.argrepr == "[]"
    named = first.opname == "LOAD_CONST" and first.argval not in _HELD
    return first.opname == "CONTAINS_OP" or (named and item)


_HELD = ("_modules", "_parameters", "_buffers")
"""Fields of a module that are dicts of others."""


def _owner_and_field(steps: Sequence[dis.Instruction]) -> tuple[int, str]:
    """How many steps say the first argument of a call, and the text that is the second, or ANY."""
    depths = [0]
    for step in steps:
        if step.opname in ("PRECALL", "CALL", "CALL_FUNCTION") and step.arg == depths[-1]:
            break
        depths.append(depths[-1] + dis.stack_effect(step.opcode, step.arg, jump=False))
    # Where a depth occurs last, all that lies below stays until the call.
    ends = [len(depths) - 1 - depths[::-1].index(depth) for depth in (1, 2) if depth in depths]
    if len(ends) == 2 and ends[1] == ends[0] + 1 and isinstance(steps[ends[0]].argval, str):
        return ends[0], steps[ends[0]].argval if steps[ends[0]].opname == "LOAD_CONST" else ANY
    return ends[0] if ends else 0, ANY


SELF = "<self>"
"""Stands for the module or object whose method some code is."""

OWN_CLASS = "__class__"
"""Stands for the class of a module, or one that it inherits from."""

_BASES = ("__base__", "__bases__", "__mro__")

ANY = "*"
"""Stands for a field whose name is not known."""

_READING = ("getattr", "hasattr", "vars", "__dict__", "__getattribute__", "attrgetter")
_STORING = ("setattr", "delattr", "vars", "__dict__", "__setattr__", "__delattr__")
_BY_NAME = ("getattr", "hasattr", "vars", "setattr", "delattr")
"""What code says that reads or stores fields by their names, and the functions among it."""


CHANGING = {
    *("append", "extend", "insert", "add", "update", "setdefault", "appendleft", "extendleft"),
    *("clear", "pop", "popitem", "popleft", "remove", "discard"),
    *("reverse", "sort", "rotate", "move_to_end", "subtract", "fill", "put"),
    *("__setitem__", "__delitem__", "__iadd__"),
}
"""Methods that change a container."""

_SKIPPED = ("CACHE", "FOR_ITER", "LOAD_CONST", "NOP", "PRECALL", "PUSH_NULL")
