"""Find questions in code that a traced value cannot answer as the real value would.

No class can define the answer to `type(x)`, `callable(x)`, `x is None` or `case [y, z]`. A traced
value gives its own, and the code silently takes one branch. So this file searches the bytecode for
such questions before it is traced. It also finds two things that a graph does not show: errors that
the code catches, and a precision that it sets for some calls.
"""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
import operator
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from ...operators.kinds import SHAPE_ATTRIBUTES
from .reached import (
    codes_in,
    functions_behind,
    functions_of,
    instructions_of,
    is_of_python,
    is_of_torch,
    methods_of,
    names_in,
    takes_module,
)

_SAMENESS = (id, operator.is_, operator.is_not)
_ASKING = (type, callable, *_SAMENESS)
"""Functions that no traced value can answer as the real one would."""

_OF_NO_TENSOR = ("re._compile", "inspect.isclass", "inspect.getmodule")
"""Functions of Python's whose questions code asks of patterns, classes and files alone."""

_SHORT = 100
"""A function is taken for a helper like `exists(x)` if it has fewer bytes of code than this."""

_GLOBAL = ("LOAD_GLOBAL", "LOAD_NAME")
_MATCHING = ("MATCH_SEQUENCE", "MATCH_MAPPING")
_CATCHING = {"CHECK_EXC_MATCH", "CHECK_EG_MATCH", "JUMP_IF_NOT_EXC_MATCH"}
_SKIPPED = ("CACHE", "PUSH_NULL", "PRECALL", "EXTENDED_ARG", "COPY", "RESUME", "NOP", "NOT_TAKEN")


@dataclass(frozen=True)
class Questions:
    """A `reason` not to trace a function, and the variables that it asks whether they are None.

    An empty name among them stands for the result of a call that has no variable. Those in `others`
    it compares with other objects, as in `flag is True` or `mode is Mode.FAST`.
    """

    reason: str
    none: frozenset[str]
    others: frozenset[str]


def why_asking(module: nn.Module) -> str:
    """Say why the code of `module` must not be traced; '' if it may be."""
    methods = list(methods_of(module))
    for method in methods:
        if "autocast" in names_in(method.__code__):
            return f"it sets autocast while it runs ({_place(method.__code__)})"
        if catches(method.__code__):
            return f"it catches errors, which a graph would not ({_place(method.__code__)})"
    for function, own in _reached(module, methods):
        if f"{function.__module__}.{function.__qualname__}" in _OF_NO_TENSOR:
            continue
        found = questions_of(function.__code__, function.__globals__, method=own)
        if found.reason:
            return found.reason
    return ""


def asks_sameness(module: nn.Module) -> str:
    """Where code of `module` or of a part asks whether two values are the same; '' if nowhere.

    >>> asks_sameness(nn.ReLU())
    ''
    """
    parts = {type(part): part for part in module.modules()}.values()
    reached = (pair for part in parts for pair in _reached(part, list(methods_of(part))))
    places = (_sameness_in(function, method=method) for function, method in reached)
    return next(filter(None, places), "")


def _sameness_in(function: types.FunctionType, *, method: bool) -> str:
    if is_of_python(function):
        return ""
    code, names = function.__code__, function.__globals__
    own = _own(code, method=method)
    for inner in codes_in(code):
        steps = _steps(inner)
        for place in range(len(steps)):
            loads = _loads_asking(steps, place, names, _SAMENESS)
            if loads or _asks_sameness(steps, place, own):
                return _place(inner)
    return ""


@functools.lru_cache(maxsize=256)
def catches(code: types.CodeType) -> bool:
    """Whether this code catches errors of some class."""
    return bool({step.opname for step in instructions_of(code)} & _CATCHING)


def _reached(
    module: nn.Module, methods: list[types.FunctionType]
) -> Iterator[tuple[types.FunctionType, bool]]:
    """The functions that a call may run, and whether each gets the object that has it."""
    for function in functions_of(module):
        # A decorator's own function stands there under the name of what it decorates.
        stands = inspect.getattr_static(type(module), function.__name__, None) is function
        decorates = stands and function.__code__.co_argcount > 0
        named = decorates or hasattr(type(module), function.__code__.co_name)
        yield function, named and function in methods and takes_module(module, function)
    for function in functions_behind(module):
        yield function, function.__code__.co_varnames[:1] == ("self",)


def asks_for_none(
    code: types.CodeType, names: dict[str, Any], *, method: bool = False, or_another: bool = False
) -> frozenset[str]:
    """Return the variables that `code`, or a helper that it calls, compares with None.

    With `or_another`, also those that it compares with another object.

    >>> def pick(x, y):
    ...     return x if y is None else y
    >>> sorted(asks_for_none(pick.__code__, globals()))
    ['y']
    """
    found = questions_of(code, names, method=method)
    asked = found.none | found.others if or_another else found.none
    for helper in _helpers(code, names):
        if (
            helper.__code__ is not code
            and len(helper.__code__.co_code) < _SHORT
            and asks_for_none(helper.__code__, helper.__globals__, or_another=or_another)
        ):
            return asked | {*code.co_varnames, ""}
    return asked


def assigned_in(code: types.CodeType) -> frozenset[str]:
    """Return the variables that `code` assigns to."""
    found: set[str] = set()
    for step in instructions_of(code):
        if step.opname.startswith(("STORE_FAST", "STORE_DEREF")):
            found |= {*step.argval} if isinstance(step.argval, tuple) else {step.argval}
    return frozenset(found)


def may_write(function: Any) -> bool:
    """Whether a hook may do more than read its arguments and return a result.

    >>> may_write(lambda module, args, result: result + 1)
    False
    """
    if not isinstance(function, types.FunctionType):
        return True
    steps = {step.opname for code in codes_in(function.__code__) for step in _steps(code)}
    return any(name.startswith(("STORE_", "CALL", "DELETE_")) for name in steps - {"STORE_FAST"})


def questions_of(code: types.CodeType, names: dict[str, Any], *, method: bool) -> Questions:
    """Find the questions in `code`, except those about a method's first argument, a module."""
    reason = ""
    none: set[str | None] = set()
    others: set[str | None] = set()
    for inner in codes_in(code):
        steps = _steps(inner)
        own = _own(code, method=method)
        for place, step in enumerate(steps):
            asks = _loads_asking(steps, place, names) and not _names(steps, place + 1, own)
            if asks or step.opname in _MATCHING:
                reason = f"it asks for the type of a value ({_place(inner)})"
            elif _asks_sameness(steps, place, own) or _compares_result(steps, place, own):
                reason = f"it asks whether two values are the same ({_place(inner)})"
            elif step.opname == "IS_OP" and _loads(steps[place - 1], None):
                none.add(_asked(steps, place - 2, own))
            elif step.opname == "IS_OP":
                others.add(_asked(steps, _owner(steps, place - 1) - 1, own))
            elif "_NONE" in step.opname and "JUMP" in step.opname:
                none.add(_asked(steps, place - 1, own))
    asked = (frozenset(name for name in one if name is not None) for one in (none, others))
    return Questions(reason, *asked)


def _steps(code: types.CodeType) -> list[dis.Instruction]:
    return [step for step in instructions_of(code) if step.opname not in _SKIPPED]


def _loads_asking(
    steps: list[dis.Instruction],
    place: int,
    names: dict[str, Any],
    asking: tuple[Any, ...] = _ASKING,
) -> bool:
    """Whether the code loads a function that asks, by its name or as `builtins.type`."""
    step, before = steps[place], steps[place - 1]
    found: Any = None
    if step.opname in _GLOBAL:
        found = names.get(step.argval, vars(builtins).get(step.argval))
    elif step.opname in ("LOAD_ATTR", "LOAD_METHOD") and before.opname in _GLOBAL:
        owner = names.get(before.argval)
        found = vars(owner).get(step.argval) if isinstance(owner, types.ModuleType) else None
    return any(found is one for one in asking)


def _names(steps: list[dis.Instruction], place: int, own: str) -> bool:
    """Whether the next value that the code loads is `self` or an attribute of it."""
    step = steps[place]
    return step.opname.startswith(("LOAD_FAST", "LOAD_DEREF")) and step.argval == own


def _loads(step: dis.Instruction, value: object) -> bool:
    return step.opname == "LOAD_CONST" and step.argval is value


def _own(code: types.CodeType, *, method: bool) -> str:
    """The first argument of a method."""
    return code.co_varnames[0] if method and code.co_varnames else ""


def _asks_sameness(steps: list[dis.Instruction], place: int, own: str) -> bool:
    """Whether this step is `x is y`, of values; `self` is none."""
    if steps[place].opname != "IS_OP" or _loads(steps[place - 1], None):
        return False
    if _names(steps, place - 1, own):
        return False
    return _compares_values(steps[:place])


def _compares_values(steps: list[dis.Instruction]) -> bool:
    """Whether `is` compares variables, results of calls or attributes like `shape`."""
    last = steps[-1].opname
    attributes = {step.argval for step in steps[-4:] if step.opname == "LOAD_ATTR"}
    return last.startswith(("LOAD_FAST", "CALL")) or bool(attributes & SHAPE_ATTRIBUTES)


def _compares_result(steps: list[dis.Instruction], place: int, own: str) -> bool:
    """Whether this step is `f(x) is True`; what a method of `self` says is no value."""
    if steps[place].opname != "IS_OP" or not isinstance(steps[place - 1].argval, bool):
        return False
    computed = steps[place - 2].opname.startswith(("CALL", "COMPARE_OP"))
    return computed and not _names(steps, _owner(steps, place - 3), own)


def _owner(steps: list[dis.Instruction], place: int) -> int:
    """Where the code loads what it reads the attribute off that it has at `place`."""
    while place >= 0 and steps[place].opname in ("LOAD_ATTR", "LOAD_METHOD"):
        place -= 1
    return place


def _asked(steps: list[dis.Instruction], place: int, own: str) -> str | None:
    """Return the variable that the question is about; None if it is self or an attribute of it."""
    step = steps[_owner(steps, place)]
    if step.opname.startswith("LOAD_FAST") or step.opname.startswith("STORE_FAST"):
        name = step.argval[-1] if isinstance(step.argval, tuple) else step.argval
        return None if name == own else str(name)
    return None if step.opname in ("LOAD_GLOBAL", "LOAD_CONST", "LOAD_NAME") else ""


def _helpers(code: types.CodeType, names: dict[str, Any]) -> Iterator[types.FunctionType]:
    """Yield the user's own functions that `code` names."""
    for name in names_in(code):
        found = names.get(name)
        if isinstance(found, types.FunctionType) and not is_of_torch(found):
            yield found


def _place(code: types.CodeType) -> str:
    return f"{code.co_filename.rpartition('/')[2]}:{code.co_firstlineno}"
