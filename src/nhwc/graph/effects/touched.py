"""What the code of one part reads and writes: in itself, in what it holds, and in what it names."""

from __future__ import annotations

import array
import functools
import types
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import numpy
from torch import Tensor, nn

from ...models.contents import fields_of, is_object
from ...models.trees import CONTAINERS
from ..code.accesses import ANY, OWN_CLASS, SELF, Accesses, by_method
from ..code.reached import (
    behind,
    closed_over,
    codes_in,
    functions_of,
    is_users,
    names_in,
    own_methods,
)
from ..modules.leaves import HOLDERS, definer, hooks_of
from .outside import is_users_class, stored_by

Place = tuple[int, str]
"""What can be written: the items of a container, a field of an object, a global of a file."""

CALLED = (types.FunctionType, types.MethodType, functools.partial)
"""Kinds of values that code calls."""


_FILLED = (*CONTAINERS, numpy.ndarray, bytearray, array.array)
"""Kinds of values that code fills with others."""


def reached_from(values: Iterable[Any]) -> list[Any]:
    """The modules and objects that lie in `values`, or to which what lies there leads."""
    found: dict[int, Any] = {}
    todo, seen = [*values], set()
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        match value:
            case nn.Module():
                todo += vars(value).values()
            case dict():
                todo += dict.values(value)
            case tuple() | list() | set():
                todo += value
            case types.MethodType():
                todo.append(value.__self__)
            case functools.partial():
                todo += (value.func, *value.args, *value.keywords.values())
            case types.FunctionType():
                todo += closed_over(value).values()
            case _ if is_object(value):
                todo += fields_of(value).values()
            case _:
                continue
        if isinstance(value, nn.Module) or is_object(value):
            found[id(value)] = value
    return [*found.values()]


class Methods:
    """What methods read and write in their objects, read once."""

    def __init__(self) -> None:
        self._known: dict[tuple[type, str], tuple[set[str], set[str]]] = {}

    def of(self, kind: type, name: str) -> tuple[set[str], set[str]]:
        """As `by_method`; calls of modules are left out: their code is read as that of parts."""
        key = kind, name
        if key not in self._known:
            home = definer(kind, name)
            calls = issubclass(kind, nn.Module) and name in ("forward", "__call__")
            told = not calls and home is not object and is_users(home)
            self._known[key] = by_method(kind, name) if told else (set(), set())
        return self._known[key]


class PartCode:
    """What the code of a class reads and writes, in its modules and outside of them."""

    def __init__(self, part: nn.Module, methods: Methods) -> None:
        self._accesses, self._methods = Accesses(), methods
        self._named: dict[int, tuple[Mapping[str, Any], set[str]]] = {}
        self._read_in: dict[type, set[str]] = {}
        self._cells: set[Place] = set()
        self._set: set[Place] = set()
        firsts: set[str] = set()
        hooks = [one for one in hooks_of(part) if isinstance(one, types.FunctionType)]
        of_class = _class_methods(part)
        with_part = own_methods(part).union(one.__code__ for one in hooks)
        for one in filter(is_users, (*functions_of(part), *hooks)):
            code, space, cells = one.__code__, one.__globals__, one.__closure__ or ()
            self._named.setdefault(id(space), (space, set()))[1].update(names_in(code))
            self._named[id(one)] = closed_over(one), {*code.co_freevars}
            self._set |= {(id(space), name) for name in stored_by(code, ("GLOBAL",))}
            enclosed = {
                (id(cell), name) for name, cell in zip(code.co_freevars, cells, strict=True)
            }
            self._cells |= enclosed
            stored = stored_by(code, ("DEREF",))
            self._set |= {place for place in enclosed if place[1] in stored}
            first = "".join(code.co_varnames[: min(code.co_argcount, 1)])
            firsts.add(first)
            for inner in codes_in(code):
                stands_as = OWN_CLASS if code in of_class else SELF
                self._accesses.note(inner, first if code in with_part else "", stands_as)
        # A function may be called with the part.
        self.own = {field for name in (SELF, *firsts) for field in self._accesses.read[name]}
        self.of_classes = self._accesses.read[OWN_CLASS] | self.own
        # What tensors have as well is read off tensors most often.
        self.others = self._accesses.read_off_others({SELF}) - {*dir(Tensor)}
        self._stored = self._accesses.stored_in_others({SELF})
        self.values = [
            space[n] for space, names in self._named.values() for n in names & space.keys()
        ]

    def read_by(self, part: nn.Module) -> dict[Place, str]:
        found = {(id(space), one): one for space, names in self._named.values() for one in names}
        found |= {place: place[1] for place in self._cells}
        for name, value in self._within_reach(part):
            if isinstance(value, _FILLED):
                found[id(value), ""] = name
            elif isinstance(value, CALLED):
                owner, method = _held(value)
                found |= {
                    (id(owner), field): name for field in self._methods.of(type(owner), method)[0]
                }
            elif value is not part:
                fields = self._accesses.read[name] | self._by_methods(name, value)[0]
                for owner in _looked_in(value):
                    found |= {(id(owner), field): f"{name}.{field}" for field in fields}
        return found

    def read_in(self, kind: type) -> set[str]:
        """The fields of an object that the code may read, in whatever way it comes to it."""
        if kind not in self._read_in:
            by_methods = [self._methods.of(kind, name)[0] for name in self.others]
            self._read_in[kind] = self.others.union(*by_methods)
        return self._read_in[kind]

    def written_by(self, part: nn.Module) -> set[Place]:
        found = {*self._set}
        found |= {(id(part), field) for field in self._accesses.stored(SELF)}
        for name, value in self._within_reach(part):
            if isinstance(value, _FILLED):
                found |= {(id(value), "")} if self._accesses.fills(name) else set()
            elif isinstance(value, ContextVar):
                found |= {(id(value), "get")} if "set" in self._accesses.read[name] else set()
            elif isinstance(value, CALLED):
                owner, method = _held(value)
                found |= {(id(owner), field) for field in self._methods.of(type(owner), method)[1]}
            else:
                fields = self._accesses.stored(name) | self._by_methods(name, value)[1]
                found |= {(id(value), field) for field in fields}
        return found

    def written_in_others(
        self, part: nn.Module, writing: Mapping[type, Mapping[str, set[str]]]
    ) -> Iterator[Place]:
        """What the code may write in classes and objects, in whatever way it comes to them."""
        for kind in filter(is_users, type(part).__mro__):
            yield from ((id(kind), field) for field in self._accesses.stored(OWN_CLASS))
        known = any(names[name] for names in writing.values() for name in self.others)
        for owner in reached_from([part, *self.values]) if self._stored or known else ():
            names = writing.get(type(owner), {})
            fields = self._stored & {*_fields(owner), ANY}
            for field in fields.union(*(names.get(name, ()) for name in self.others)):
                yield id(owner), field

    def _by_methods(self, name: str, value: Any) -> tuple[set[str], set[str]]:
        """What the methods of an object that the code names read and write in it."""
        read: set[str] = set()
        written: set[str] = set()
        kind = value if isinstance(value, type) else type(value)
        for method in (*self._accesses.read[name], *_OPERATORS):
            more = self._methods.of(kind, method)
            read, written = read | more[0], written | more[1]
        return read, written

    def _within_reach(self, part: nn.Module) -> Iterator[tuple[str, Any]]:
        """What the code can write into, by the name in front of its fields."""
        own: dict[str, Any] = {**vars(part), **part._modules}
        names = {name for _, named in self._named.values() for name in named}
        for space, named in (*self._named.values(), (own, names)):
            for name in named & space.keys():
                value = space[name]
                if isinstance(value, (*CONTAINERS, tuple, *HOLDERS)):
                    held = value.children() if isinstance(value, nn.Module) else [*value]
                    items = dict.values(value) if isinstance(value, dict) else held
                    parts = [one for one in items if isinstance(one, (nn.Module, *CALLED))]
                    yield from ((f"{name}[]", one) for one in parts)
                known = (*_FILLED, *CALLED, ContextVar, nn.Module)
                if isinstance(value, known) or is_object(value) or is_users_class(value):
                    yield name, value


def _looked_in(value: Any) -> Iterator[Any]:
    """What Python looks in for a field of `value`: an object, and the user's classes behind it."""
    yield value
    own = value.__mro__ if isinstance(value, type) else ()
    yield from (kind for kind in (*own, *type(value).__mro__) if is_users(kind))


def _class_methods(part: nn.Module) -> set[types.CodeType]:
    """The code of functions that get the class of the module as their first argument."""
    members = [one for kind in type(part).__mro__ if is_users(kind) for one in vars(kind).values()]
    return {
        function.__code__
        for one in members
        if isinstance(one, classmethod)
        for function in behind(one)
        if isinstance(function, types.FunctionType)
    }


def _held(value: Any) -> tuple[Any, str]:
    """The object whose method a bound method or a partial function is, and the method's name."""
    while isinstance(value, functools.partial):
        value = types.MethodType(value.func, value.args[0]) if value.args else value.func
    function = getattr(value, "__func__", value)
    return getattr(value, "__self__", None), getattr(function, "__name__", "")


def _fields(owner: Any) -> set[str]:
    if isinstance(owner, nn.Module):
        return {*fields_of(owner), *owner._parameters, *owner._buffers}
    return {*fields_of(owner)}.union(*map(vars, filter(is_users, type(owner).__mro__)))


_OPERATORS = ("__call__", "__getitem__", "__setitem__")
"""Methods that code calls without their names."""
