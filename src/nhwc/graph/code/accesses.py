"""Read from bytecode which fields code reads and stores of what, and which containers it fills."""

from __future__ import annotations

import dis
import inspect
import types
from collections import defaultdict
from collections.abc import Set

from .reached import behind


class Accesses:
    """The fields that code reads and stores, by what stands in front, and the containers it fills.

    For `self.part.calls` that is "part", for `self.parts[0].calls` it is "parts[]", and where
    nothing is known it is empty. A variable stands for what was read last when it was assigned to.
    """

    def __init__(self) -> None:
        self.read: dict[str, set[str]] = defaultdict(set)
        self._stored: dict[str, set[str]] = defaultdict(set)
        self._filled: set[str] = set()
        self._behind: dict[str, list[str]] = {}

    def note(self, code: types.CodeType) -> None:
        """Follow the names that are loaded in a row: `x[key] = value` may fill each of them."""
        row: list[str] = []
        copied: list[str] = []
        for step in dis.get_instructions(code):
            name, said = step.opname, step.argval
            if name in ("STORE_ATTR", "DELETE_ATTR"):
                for owner in self._owners(row or copied) or [""]:
                    self._stored[owner].add(str(said))
                row = copied = []
            elif name in ("LOAD_ATTR", "LOAD_METHOD"):
                for owner in self._owners(row) or [""]:
                    self.read[owner].add(str(said))
                row = [*row, str(said)]
            elif name == "LOAD_CONST" and row and isinstance(said, str):
                by_name = {"getattr": self.read, "setattr": self._stored, "delattr": self._stored}
                for owner in self._owners(row):
                    by_name.get(row[0].removesuffix("[]"), defaultdict(set))[owner].add(said)
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
                    row = [*row, *self._behind.get(local, ()), local]
            elif name not in _SKIPPED:
                row = []

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
            told, own = Accesses(), one.__code__.co_varnames[0]
            told.note(one.__code__)
            filled = {field for field in told.read[own] if told.fills(field)}
            read, written = read | told.read[own], written | told.stored(own) | filled
            todo += told.read[own]
    return read, written


CHANGING = {
    *("append", "extend", "insert", "add", "update", "setdefault", "appendleft"),
    *("clear", "pop", "popitem", "popleft", "remove", "discard"),
}
"""Methods that change a container."""

_SKIPPED = ("CACHE", "EXTENDED_ARG", "FOR_ITER", "LOAD_CONST", "NOP", "PUSH_NULL")
