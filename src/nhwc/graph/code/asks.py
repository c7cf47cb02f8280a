"""Tell whether Python code asks for the type of a value, or compiled code that it called.

Compiled code asks, as `isinstance` does, before it reads the memory behind a tensor. A traced value
has no such memory: a wrong answer ends the process. Both questions come from the same Python frame,
so the instruction that the frame executes tells them apart: its operands are worked out as far as
names go, and what is not known counts as compiled code.
"""

from __future__ import annotations

import dis
import linecache
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import BuiltinFunctionType, FrameType, UnionType
from typing import Any

import torch

from .reached import instructions_of

_READS = ("LOAD_ATTR", "LOAD_METHOD")
_KEEPS_STACK = ("CACHE", "EXTENDED_ARG", "KW_NAMES", "NOP", "RESUME")
_QUESTIONS = (isinstance, getattr, hasattr)
_UNKNOWN, _NULL = object(), object()

_LEGACY = frozenset(torch._tensor_classes)
"""Classes such as `torch.FloatTensor`: compiled code answers whether a value is an instance."""


@dataclass(frozen=True)
class _Named:
    """What the code names: a value, and the attributes that it reads from there on."""

    value: Any
    attributes: tuple[str, ...] = ()

    def found(self) -> Any:
        value = self.value
        for name in self.attributes:
            unread = issubclass(type(value), torch.fx.Proxy) or isinstance(
                getattr(type(value), name, None), property
            )
            if value is _UNKNOWN or unread or not hasattr(value, name):
                return _UNKNOWN
            value = getattr(value, name)
        return value


def python_asks(frame: FrameType) -> bool:
    """Whether the code of this frame itself asks for a type, by a question that is safe to answer.

    >>> import sys
    >>> class Asked:
    ...     @property
    ...     def __class__(self):
    ...         return int if python_asks(sys._getframe(1)) else str
    >>> isinstance(Asked(), int), [*map(isinstance, [Asked()], [int])]
    (True, [False])
    """
    now, stack = _executed(frame)
    if now.opname in _READS:
        return True
    if now.opname == "MATCH_CLASS":
        return len(stack) > 1 and _is_safe(_value(stack[-2]))
    called, arguments = _called(now, stack)
    if called is isinstance:
        return len(arguments) == 2 and _is_safe(_value(arguments[1]))
    return any(called is question for question in _QUESTIONS)


def custom_function_asks(frame: FrameType) -> bool:
    """Whether the code of this frame calls `apply` of a `torch.autograd.Function`.

    >>> import sys
    >>> custom_function_asks(sys._getframe())
    False
    """
    called, _ = _called(*_executed(frame))
    owner = getattr(called, "__self__", None)
    known = isinstance(owner, type) and issubclass(owner, torch.autograd.Function)
    return known and getattr(called, "__name__", "") == "apply"


def torch_asks(frame: FrameType) -> bool:
    """Whether the code of this frame calls a function of torch that lets traced values answer.

    >>> import sys
    >>> torch_asks(sys._getframe())
    False
    """
    called, _ = _called(*_executed(frame))
    compiled = isinstance(called, BuiltinFunctionType)
    return compiled and called in torch.overrides.get_testing_overrides()


def makes_text(frame: FrameType) -> bool:
    """Whether the code of this frame calls `str`.

    >>> import sys
    >>> class Asked:
    ...     def __str__(self):
    ...         return "yes" if makes_text(sys._getframe(1)) else "no"
    >>> str(Asked()), f"{Asked()}"
    ('yes', 'no')
    """
    return _called(*_executed(frame))[0] is str


def unpacked(frame: FrameType) -> int | None:
    """To how many variables the code of this frame assigns a value; None if it does not.

    >>> import sys
    >>> class Asked:
    ...     def __iter__(self):
    ...         return iter(range(unpacked(sys._getframe(1))))
    >>> one, two, three = Asked()
    >>> three
    2
    """
    code = instructions_of(frame.f_code)
    now = code[_place(code, frame)]
    return now.arg if now.opname == "UNPACK_SEQUENCE" else None


@dataclass(frozen=True)
class Assertion:
    """What code wants of a value: its `truth`, and the `error` with this `text` if it is not so."""

    truth: bool
    error: type[Exception]
    text: str


def asserted(frame: FrameType) -> Assertion | None:
    """What an `assert` in this frame, or an `if` that does no more than raise, wants of a value.

    None if it is neither, or one that holds for either truth. What is said is the text of the
    error, or the line where there is none: it would be made of traced values.

    >>> import sys
    >>> class Asked:
    ...     def __bool__(self):
    ...         self.found = asserted(sys._getframe(1))
    ...         return True
    >>> asked = Asked()
    >>> assert asked and 1 < 2, "no"
    >>> asked.found.truth, asked.found.text
    (True, 'no')
    """
    code = instructions_of(frame.f_code)
    place = _place(code, frame)
    while not code[place].opname.startswith("POP_JUMP") and code[place].opname in _BEFORE_JUMP:
        place += 1
    jump = code[place].opname
    if not (jump.startswith("POP_JUMP") and jump.endswith(("_IF_TRUE", "_IF_FALSE"))):
        return None
    ways = {
        jump.endswith("_IF_TRUE"): _target(code, place),
        not jump.endswith("_IF_TRUE"): place + 1,
    }
    for truth, way in ways.items():
        errors = _raised(code, way, {**frame.f_builtins, **frame.f_globals})
        if len(errors) == 1:
            ((error, text),) = errors.items()
            return Assertion(not truth, error, text or _line_of(frame))
    return None


_BEFORE_JUMP = ("COMPARE_OP", "TO_BOOL", "CACHE", "EXTENDED_ARG")
"""What may ask a value for its truth in front of the jump that depends on it."""


def _raised(
    code: Sequence[dis.Instruction], start: int, names: Mapping[str, Any]
) -> dict[type[Exception], str]:
    """The error that is raised on all ways from `start` on, with its text; empty if none surely is.

    On these ways, code may do no more than make what it says.
    """
    found: dict[type[Exception], str] = {}
    todo, seen = [start], set()
    while todo:
        place = todo.pop()
        one = code[place]
        if place in seen:
            continue
        seen.add(place)
        error = _error_named(one, names)
        if error is not None:
            found[error] = _text_of(code, place)
        if one.opname == "RAISE_VARARGS":
            continue
        if one.opname.startswith(_LEAVING):
            return {}
        if _jumps(one):
            todo.append(_target(code, place))
        if "JUMP" not in one.opname or "POP_JUMP" in one.opname or "OR_POP" in one.opname:
            todo.append(place + 1)
    return found


_LEAVING = (
    *("RETURN_", "YIELD_", "RERAISE", "BEFORE_WITH", "DELETE_", "STORE_ATTR", "STORE_SUBSCR"),
    *("STORE_GLOBAL", "STORE_NAME", "STORE_DEREF", "STORE_SLICE"),
)
"""What code does that goes on, or that others may see."""


def _error_named(one: dis.Instruction, names: Mapping[str, Any]) -> type[Exception] | None:
    """The class of errors that this instruction loads."""
    # The second is how Python 3.14 says it.
    if one.opname == "LOAD_ASSERTION_ERROR" or one.argrepr == "AssertionError":
        return AssertionError
    found = names.get(one.argval) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME") else None
    return found if isinstance(found, type) and issubclass(found, Exception) else None


def _target(code: Sequence[dis.Instruction], place: int) -> int:
    """The place to which the jump at `place` goes."""
    return next(i for i, one in enumerate(code) if one.offset == code[place].argval)


def _text_of(code: Sequence[dis.Instruction], place: int) -> str:
    said = code[place + 1]
    plain = said.opname == "LOAD_CONST" and isinstance(said.argval, str)
    return said.argval if plain and code[place + 2].opname.startswith(("CALL", "PRECALL")) else ""


def _line_of(frame: FrameType) -> str:
    file, line = frame.f_code.co_filename, frame.f_lineno
    said = linecache.getline(file, line, frame.f_globals).strip()
    return f"{said or 'an assertion fails'} ({Path(file).name}:{line})"


def _is_safe(classes: Any) -> bool:
    """Whether these are classes, and none has compiled code answer for it."""
    if isinstance(classes, UnionType):
        classes = classes.__args__
    if isinstance(classes, tuple):
        return all(map(_is_safe, classes))
    return isinstance(classes, type) and classes not in _LEGACY


def _executed(frame: FrameType) -> tuple[dis.Instruction, list[Any]]:
    """Return the instruction that `frame` executes, and what lies on the stack before it."""
    code = instructions_of(frame.f_code)
    place = _place(code, frame)
    if code[place - 1].opname == "PRECALL":
        place -= 1  # Python 3.11 calls in two steps, and answers `isinstance` in the first.
    start = place
    while start and not (_jumps(code[start - 1]) or code[start].is_jump_target):
        start -= 1
    stack: list[Any] = []
    outer, local = {**frame.f_builtins, **frame.f_globals}, frame.f_locals
    for one in code[start:place]:
        _step(one, stack, outer, local)
    return code[place], stack


def _place(code: Sequence[dis.Instruction], frame: FrameType) -> int:
    # Some Pythons point behind the instruction, into what it has cached.
    return max(i for i, one in enumerate(code) if one.offset <= frame.f_lasti)


def _jumps(one: dis.Instruction) -> bool:
    return one.opcode in dis.hasjrel or one.opcode in dis.hasjabs


def _step(
    one: dis.Instruction, stack: list[Any], outer: dict[str, Any], local: Mapping[str, Any]
) -> None:
    """Do to `stack` what the instruction does, as far as it only names things."""
    effect = dis.stack_effect(one.opcode, one.arg, jump=False)
    name, said = one.opname, one.argval
    if name == "PUSH_NULL":
        stack.append(_NULL)
    elif name in ("LOAD_GLOBAL", "LOAD_NAME"):
        # From Python 3.11 on, the name of a function may come together with a NULL.
        stack += [_NULL] * (effect - 1) + [_Named(outer.get(said, _UNKNOWN))]
    elif name == "LOAD_CONST":
        stack.append(_Named(said))
    elif name.startswith(("LOAD_FAST", "LOAD_DEREF")):
        names = said if isinstance(said, tuple) else (said,)
        stack += [_Named(local.get(each, _UNKNOWN)) for each in names]
    elif name in _READS and stack:
        owner = stack.pop()
        known = isinstance(owner, _Named)
        read = _Named(owner.value, (*owner.attributes, said)) if known else _UNKNOWN
        stack += [_NULL] * effect + [read]
    elif name == "BUILD_TUPLE" and len(stack) >= 1 - effect:
        place = len(stack) - (1 - effect)
        stack[place:] = [tuple(stack[place:])]
    elif name == "BINARY_OR" or (name == "BINARY_OP" and one.argrepr == "|"):
        stack[-2:] = [tuple(stack[-2:])]  # `isinstance` takes a union as it takes a tuple.
    elif name not in _KEEPS_STACK:
        # What lies on top may have been replaced too, as a call's result replaces the function.
        taken = 1 - effect if name.startswith("BUILD_") else 1 + max(-effect, 0)
        del stack[max(len(stack) - taken, 0) :]
        stack += [_UNKNOWN] * (taken + effect)


def _called(now: dis.Instruction, stack: list[Any]) -> tuple[Any, list[Any]]:
    """Return the function that a call calls, and its arguments as they lie on the stack."""
    if not now.opname.startswith(("CALL", "PRECALL")) or now.arg is None:
        return _UNKNOWN, []
    count = now.arg
    if now.opname == "CALL_FUNCTION_EX":
        count = 1 + ((now.arg & 1) if sys.version_info < (3, 14) else 1)
    count += now.opname in ("CALL_KW", "CALL_FUNCTION_KW")
    below = stack[: len(stack) - count] if len(stack) > count else [_UNKNOWN]
    function = below[-2] if below[-1] is _NULL and len(below) > 1 else below[-1]
    return _value(function), stack[len(stack) - count :] if count else []


def _value(named: Any) -> Any:
    if isinstance(named, tuple):
        return tuple(map(_value, named))
    if not isinstance(named, _Named):
        return _UNKNOWN
    return type(None) if named.value is None else named.found()
