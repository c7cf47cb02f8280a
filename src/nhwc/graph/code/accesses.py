"""Read from bytecode which fields code reads and stores of what, and which containers it fills."""

from __future__ import annotations

import dis
import inspect
import types
from collections import defaultdict

from .reached import behind


class Accesses:
    """The fields that code reads and stores, by what stands in front, and the containers it fills.

    For `self.part.calls` that is "part", for `self.parts[0].calls` it is "parts[]", and for what
    `+=` stores it is empty.
    """

    def __init__(self) -> None:
        self.read: dict[str, set[str]] = defaultdict(set)
        self._stored: dict[str, set[str]] = defaultdict(set)
        self._filled: set[str] = set()

    def note(self, code: types.CodeType) -> None:
        """Follow the names that are loaded in a row: `x[key] = value` may fill each of them."""
        row: list[str] = []
        copied: list[str] = []
        for step in dis.get_instructions(code):
            name, said = step.opname, step.argval
            if name in ("STORE_ATTR", "DELETE_ATTR"):
                self._stored[row[-1] if row else ""].add(str(said))
                row = []
            elif name in ("LOAD_ATTR", "LOAD_METHOD"):
                for owner in row if row[-1:] == ["[]"] else row[-1:]:
                    self.read[owner].add(str(said))
                row = [*row, str(said)]
            elif name == "BINARY_SUBSCR" or step.argrepr == "[]":
                row = [*(f"{one}[]" for one in row), "[]"]
            elif name in ("STORE_SUBSCR", "DELETE_SUBSCR"):
                self._filled |= {one.removesuffix("[]") for one in row or copied}
                row = []
            elif name.startswith(("COPY", "DUP_TOP")):
                copied = row
            elif name == "STORE_FAST_LOAD_FAST":
                row = [str(said[-1])]
            elif name.startswith("LOAD_") and name != "LOAD_CONST":
                row = [*row, *map(str, said if isinstance(said, tuple) else (said,))]
            elif name not in _SKIPPED:
                row = []

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

_SKIPPED = ("CACHE", "EXTENDED_ARG", "LOAD_CONST", "NOP", "PUSH_NULL")
