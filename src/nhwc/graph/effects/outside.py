"""Notice and undo what a `forward` writes outside of its modules: a graph would lose it silently.

    class Net(nn.Module):
        grid = None

        def forward(self, x, seen=[]):
            if Net.grid is None:
                Net.grid = torch.arange(x.size(1))    its class
            SIZES["last"] = x.shape                   a global of its file
            seen.append(x)                            a default of its function

While code is traced, what it keeps there is no tensor but a traced value, which is dead afterwards:
the model itself would stumble over it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import types
from collections.abc import Iterator
from typing import Any

from torch import fx, nn

from ...models.contents import Contents, is_as, is_iterator, is_object, put_back, with_contents
from ..code.reached import (
    behind,
    closed_over,
    codes_in,
    functions_of,
    instructions_of,
    is_of_python,
    names_in,
)

_ABSENT = object()
_CACHED = type(functools.cache(max))

_ASKING = {"datetime", "os", "posix", "random", "secrets", "seed", "time", "uuid"}
"""Modules of Python's that tell the time, or what the system draws; numpy and torch name theirs so.
"""


class Outside:
    """What the code of a model and its parts may write to besides these, as it is now.

    >>> class Net(nn.Module):
    ...     def forward(self, x, seen=[]):
    ...         seen.append(x)
    >>> outside = Outside(Net())
    >>> Net()(7)
    >>> outside.check()
    Traceback (most recent call last):
    torch.fx.proxy.TraceError: its forward writes a default of forward, which lies outside of it
    >>> Net.forward.__defaults__
    ([],)
    """

    def __init__(self, model: nn.Module) -> None:
        self._places: list[tuple[str, Any, Any, Any]] = []
        parts = {type(part): part for part in model.modules()}.values()
        # What Python's own functions keep for themselves is no state of the model.
        called = (one for part in parts for one in functions_of(part))
        functions = {one.__code__: one for one in called if not is_of_python(one)}
        self._stored = {name for code in functions for name in stored_by(code)}
        names = {name for code in functions for name in names_in(code)}
        named: list[Any] = [kind for part in parts for kind in type(part).__mro__]
        self.asks_the_system = not _ASKING.isdisjoint(names)
        for function in functions.values():
            named += map(function.__globals__.get, names_in(function.__code__))
            named += closed_over(function).values()
            self._note_function(function)
        self.asks_the_system |= any(map(_asks, named))
        named += (value for part in model.modules() for value in vars(part).values())
        named += [kind for one in named if is_object(one) for kind in type(one).__mro__]
        named += [type(one) for one in named if is_users_class(one)]
        kinds = {id(one): one for one in named if is_users_class(one)}.values()
        methods = [one for kind in kinds for name in names for one in behind(vars(kind).get(name))]
        for cached in [one for one in (*named, *methods) if isinstance(one, _CACHED)]:
            for value in _results_of(cached):
                self._note(f"what {cached.__name__} returned", {0: value}, 0)
        codes = [one.__code__ for one in methods if isinstance(one, types.FunctionType)]
        self._stored.update(name for code in codes for name in stored_by(code))
        for kind in kinds:
            for name in {*vars(kind)} | self._stored:
                # Classes number their objects by counts that no code of the model reads.
                held = vars(kind).get(name)
                if name in names or not is_iterator(getattr(held, "__self__", held)):
                    self._note(f"{kind.__name__}.{name}", kind, name)

    def _note_function(self, function: types.FunctionType) -> None:
        for name in names_in(function.__code__):
            self._note(name, function.__globals__, name)
        for name in {*vars(function)} | self._stored:
            self._note(f"{function.__name__}.{name}", vars(function), name)
        enclosed = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        for name, cell in enclosed:
            self._note(name, cell, "cell_contents")
        given = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        for place, value in enumerate(given):
            self._note(f"a default of {function.__name__}", {place: value}, place)

    def _note(self, words: str, owner: Any, name: Any) -> None:
        before = with_contents(_get(owner, name))
        if isinstance(before, Contents) or words.rpartition(".")[2] in self._stored:
            self._places.append((words, owner, name, before))

    def check(self) -> None:
        """Raise if code wrote to any of it since, and put it back."""
        changed = self.put_back()
        if changed:
            raise fx.proxy.TraceError(f"its forward writes {changed}, which lies outside of it")

    def put_back(self) -> str:
        """Let all be what it was; return the name of something that was not."""
        changed = ""
        for words, owner, name, before in self._places:
            if not is_as(_get(owner, name), before):
                changed = words
                _set(owner, name, put_back(before))
        return changed


@contextlib.contextmanager
def outside_put_back(model: nn.Module) -> Iterator[None]:
    """Let the runs of `model` that are made here leave nothing outside of it: no count in a global.

    >>> class Net(nn.Module):
    ...     def forward(self, x, seen=[]):
    ...         seen.append(x)
    >>> with outside_put_back(Net()):
    ...     Net()(7)
    >>> Net.forward.__defaults__
    ([],)
    """
    outside = Outside(model)
    try:
        yield
    finally:
        outside.put_back()


def stored_by(
    code: types.CodeType, kinds: tuple[str, ...] = ("ATTR", "GLOBAL", "DEREF")
) -> set[str]:
    """The globals, attributes and enclosed variables that code assigns to."""
    storing = {f"{verb}_{kind}" for verb in ("STORE", "DELETE") for kind in kinds}
    steps = (step for one in codes_in(code) for step in instructions_of(one))
    return {str(step.argval) for step in steps if step.opname in storing}


def is_users_class(value: Any) -> bool:
    """Whether it is a class of the user's."""
    home = value.__module__.partition(".")[0] if isinstance(value, type) else "torch"
    return home not in ("torch", "nhwc", "builtins", "typing")


def _results_of(cached: Any) -> list[Any]:
    """What a function under `lru_cache` has returned so far, and may return again."""
    held = gc.get_referents(cached)
    return [one for value in held for one in (value.values() if type(value) is dict else [value])]


def _asks(value: Any) -> bool:
    """Whether it is one of the modules that ask the system, or of one."""
    if isinstance(value, types.ModuleType):
        home = value.__name__
    elif isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        home = str(value.__module__)
    else:
        # An object may answer what it is asked in a way of its own.
        home = type(value).__module__
    return home.partition(".")[0] in _ASKING


def _get(owner: Any, name: Any) -> Any:
    if isinstance(owner, types.CellType):
        try:
            return owner.cell_contents
        except ValueError:  # The cell is not filled yet.
            return _ABSENT
    return (vars(owner) if isinstance(owner, type) else owner).get(name, _ABSENT)


def _set(owner: Any, name: Any, value: Any) -> None:
    match owner, value is _ABSENT:
        case dict(), False:
            owner[name] = value
        case dict(), True:
            del owner[name]
        case _, False:
            setattr(owner, name, value)
        case _:
            delattr(owner, name)
