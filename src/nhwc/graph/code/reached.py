"""Find the functions that may run when a module is called, by following names in its code."""

from __future__ import annotations

import collections
import contextlib
import dis
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...models.contents import LIBRARIES, fields_of, is_object

TORCH = f"{Path(torch.__file__).parent}/"
OURS = f"{Path(__file__).parents[2]}/"
"""The folders with the code of torch, and with that of nhwc."""

_CALLED = ("forward", "__call__", "__getattr__", "__getattribute__", "__setattr__", "_call_impl")
"""Methods that torch and Python call by themselves."""


def is_of_torch(function: types.FunctionType) -> bool:
    """Whether the code of `function` belongs to torch or to nhwc."""
    return function.__code__.co_filename.startswith((TORCH, OURS))


def _is_of_einops(function: types.FunctionType) -> bool:
    """Whether a trace keeps it as a call: einops' functions compute what they are told, no more."""
    return str(function.__module__).partition(".")[0] == "einops"


def is_of_python(function: types.FunctionType) -> bool:
    """Whether the code of `function` belongs to Python's own library."""
    return str(function.__module__).partition(".")[0] in sys.stdlib_module_names


def functions_of(module: nn.Module, others: Iterable[str] = ()) -> Iterator[types.FunctionType]:
    """Yield `forward`, all functions that it names in its class and file, and those that they name.

    The module's methods called like `others` are included, since code around the module may call
    them. So are decorators and the functions that they wrap; functions of torch are not.
    """
    return _followed(
        module,
        others,
        lambda function: [
            *_named(function),
            *map(vars(module).get, sorted(names_in(function.__code__))),
        ],
    )


def values_named_by(module: nn.Module) -> Iterator[Any]:
    """Yield what the functions of a module name outside of it: globals, and what they enclose."""
    for function in functions_of(module):
        yield from (*_named(function), *closed_over(function).values())


def functions_behind(module: nn.Module) -> Iterator[types.FunctionType]:
    """Yield the functions in objects, lists and dicts that the code of a module names.

    `functions_of` does not follow those: it cannot tell which of them a call would reach.
    """
    followed = [*functions_of(module)]
    known = {function.__code__ for function in followed}
    names = {name for function in followed for name in names_in(function.__code__)} | _OPERATORS
    own = (inspect.getattr_static(module, name, None) for name in names)
    todo = [*values_named_by(module), *own]
    seen: set[int] = set()
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, types.FunctionType):
            if value.__code__ not in known and is_users(value):
                yield value
                todo += [*_named(value), *closed_over(value).values()]
        elif isinstance(value, dict | list | tuple):
            todo += dict.values(value) if isinstance(value, dict) else value
        elif is_object(value) or _is_users_class(value):
            kind = value if isinstance(value, type) else type(value)
            todo += map((vars(value) if kind is value else fields_of(value)).get, names)
            for name in names:
                todo += behind(inspect.getattr_static(kind, name, None))
        else:
            todo += filter(callable, behind(value)) if not isinstance(value, nn.Module) else ()


def _is_users_class(value: Any) -> bool:
    if not isinstance(value, type) or issubclass(value, nn.Module):
        return False
    return is_users(value)


def is_users(value: Any) -> bool:
    """Whether a class or a function is of no library."""
    return str(value.__module__).partition(".")[0] not in LIBRARIES


_OPERATORS = {"__call__", "__getitem__", "__class_getitem__", "__contains__"}
"""Methods that code calls without their names."""


def methods_of(module: nn.Module, others: Iterable[str] = ()) -> Iterator[types.FunctionType]:
    """Yield those of `functions_of` that are methods of the module's class, also static ones."""
    return _followed(module, others, lambda function: [])


def takes_module(module: nn.Module, method: types.FunctionType) -> bool:
    """Whether `method` gets the module itself as its first argument, as a static one does not."""
    return not any(
        isinstance(value, staticmethod | classmethod) and value.__func__ is method
        for kind in type(module).__mro__
        for value in vars(kind).values()
    )


def own_methods(module: nn.Module) -> set[types.CodeType]:
    """The code of functions that get the module, or its class, as their first argument."""
    members = [one for kind in type(module).__mro__ if is_users(kind) for one in vars(kind).items()]
    bound = vars(module).get("forward")
    found: set[types.CodeType] = set()
    for name, value in [*members, ("forward", bound if hasattr(bound, "__self__") else None)]:
        todo = behind(None if isinstance(value, staticmethod) else value)
        while todo:
            one = todo.pop()
            if isinstance(one, types.FunctionType) and one.__code__ not in found:
                found.add(one.__code__)
                inside = filter(is_users, filter(inspect.isfunction, closed_over(one).values()))
                # Decorators enclose each other, and the method that they are put on.
                todo += (of for of in inside if of.__name__ == name or of.__closure__)
    return found


def _followed(
    module: nn.Module,
    others: Iterable[str],
    named: Callable[[types.FunctionType], list[Any]],
) -> Iterator[types.FunctionType]:
    todo: list[Any] = []
    for name in (*_CALLED, *sorted(others)):
        todo += _attribute(module, name)
    found: dict[types.CodeType, types.FunctionType] = {}
    while todo:
        function = todo.pop()
        if not isinstance(function, types.FunctionType) or function.__code__ in found:
            continue
        todo.append(getattr(function, "__wrapped__", None))
        # A class of tuples is made of names alone, here and there at each call.
        if is_of_torch(function) or function is collections.namedtuple or _is_of_einops(function):
            continue
        found[function.__code__] = function
        names = names_in(function.__code__)
        bases = type(module).__mro__
        above = names & {"super", *(base.__name__ for base in bases)}
        for name in sorted(names):
            todo += _attribute(module, name)
            # `super().forward` is none of the class's own.
            todo += [one for base in bases for one in behind(vars(base).get(name)) if above]
        values = [*named(function), *closed_over(function).values()]
        held = [vars(one) for one in values if _is_users_class(one)]
        members = [one[name] for one in held for name in names & one.keys()]
        todo += [*values, *(one.__func__ for one in members if isinstance(one, staticmethod))]
    yield from found.values()


def _attribute(module: nn.Module, name: str) -> list[Any]:
    """Return the functions behind an attribute of the module's class, or a `forward` of its own."""
    value = inspect.getattr_static(type(module), name, None)
    own = vars(module).get(name)
    return behind(own if name == "forward" and own is not None else value)


def behind(value: Any) -> list[Any]:
    """The functions that an attribute of a class stands for, a property's among them."""
    match value:
        case property():
            return [value.fget, value.fset]
        case functools.cached_property():
            return [value.func]
        case staticmethod() | classmethod() | types.MethodType():
            return [value.__func__]
        case functools.partial() | functools.partialmethod():
            return [value.func]
    return [value]


def _named(function: types.FunctionType) -> list[Any]:
    """Return the globals that `function` names, and attributes that it reads from modules."""
    found: list[Any] = []
    for code in codes_in(function.__code__):
        last: Any = None
        for step in instructions_of(code):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and step.argval.isidentifier():
                # Pytest puts names that are no identifiers into assertions.
                last = function.__globals__.get(step.argval)
            elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(last, types.ModuleType):
                last = _of_module(last, step.argval)
            elif step.opname not in ("CACHE", "PUSH_NULL"):
                last = None
            found.append(last)
    return found


def _of_module(module: types.ModuleType, name: str) -> Any:
    """An attribute of a module; None if there is none, as in a package that is not installed."""
    # One that is imported when it is asked for something may raise anything.
    with contextlib.suppress(Exception):
        return getattr(module, name)
    return None


def closed_over(function: types.FunctionType) -> dict[str, Any]:
    """Return the values that a function encloses, such as the function that it decorates."""
    values = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        # The cell may not be filled yet.
        with contextlib.suppress(ValueError):
            values[name] = cell.cell_contents
    return values


@functools.lru_cache(maxsize=256)
def instructions_of(code: types.CodeType) -> tuple[dis.Instruction, ...]:
    """What `code` alone consists of, without the functions in it: each trace asks many times."""
    return tuple(dis.get_instructions(code))


def names_in(code: types.CodeType) -> set[str]:
    """Return all globals and attributes that `code` and the functions in it name."""
    return {name for one in codes_in(code) for name in one.co_names}


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield `code` and the code of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_in(constant)
