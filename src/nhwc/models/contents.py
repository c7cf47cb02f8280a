"""What attributes and variables held: values, and copies of what can be changed in place."""

from __future__ import annotations

import array
import ast
import contextlib
import copy
import functools
import itertools
import operator
import random
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Collection
from contextvars import Context, ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from .trees import CONTAINERS, has_strides

_PLAIN = (bool, int, float, complex, str, bytes)


@dataclass(frozen=True)
class Contents:
    """A container, an object, an array, a generator or a variable, and a copy of what it held."""

    container: Any
    kept: Any


def with_contents(
    value: Any, known: set[int] | None = None, homes: Collection[str] | None = None
) -> Any:
    """`value`, or the `Contents` of what code can change; not of what is `known` by its `id`.

    Objects of classes that are not at home in `homes`, if given, are taken for what no call
    changes: a trainer that a model knows would lead to all data there is.
    """
    # First of all what most attributes of a module are: a model has thousands.
    if value is None or isinstance(value, _PLAIN):
        return value
    known = set() if known is None else known
    if id(value) in known:
        return value
    known.add(id(value))
    if isinstance(value, set):
        return Contents(value, set(value))
    # A registry of the user's may have a `values` and a `get` of its own, which do something else.
    if isinstance(value, dict):
        items = dict.items(value)
        return Contents(value, {key: with_contents(held, known, homes) for key, held in items})
    if isinstance(value, CONTAINERS):
        return Contents(value, [with_contents(held, known, homes) for held in value])
    inside = _fixed_in(value)
    if inside:
        kept = [with_contents(held, known, homes) for held in inside]
        return Contents(value, kept) if any(isinstance(one, Contents) for one in kept) else value
    if is_object(value):
        if homes is not None and not is_watched(value, homes):
            return value
        fields = fields_of(value).items()
        return Contents(value, {key: with_contents(held, known, homes) for key, held in fields})
    if isinstance(value, ContextVar):
        return Contents(value, with_contents(value.get(_UNSET), known, homes))
    if is_iterator(value):
        return Contents(value, _another(value))
    numbers = _numbers_of(value)
    return value if numbers is None else Contents(value, copy.deepcopy(numbers))


def itself(old: Any) -> Any:
    """The value itself of which `with_contents` told."""
    return old.container if isinstance(old, Contents) else old


def is_as(value: Any, old: Any) -> bool:
    """Whether a call leaves a value as it found it: the same object, or one just like it.

    Code that counts its convolutions as it calls them, or hands frames from one part of a video to
    the next, begins with `self.count = [0]`, and may end so.
    """
    if not isinstance(old, Contents):
        return _alike(value, old)
    if isinstance(old.container, (tuple, *CONTAINERS)):
        known = value is old.container or type(value) is type(old.container)
        return known and _hold_alike(value, old.kept)
    if is_iterator(old.container):
        known = old.kept is not None and type(value) is type(old.kept)
        return known and _how_far(value) == _how_far(old.kept)
    if value is not old.container:
        return False
    if inside := _fixed_in(value):
        return _hold_alike(inside, old.kept)
    if is_object(value):
        return _hold_alike(fields_of(value), old.kept)
    if isinstance(value, ContextVar):
        return _alike(value.get(_UNSET), old.kept)
    return _equal(_numbers_of(value), old.kept)


def _alike(value: Any, other: Any) -> bool:
    """Whether two values are one object, or plain and equal."""
    if value is other:
        return True
    if isinstance(other, Contents):
        return is_as(value, other)
    if type(value) is not type(other):
        return False
    if type(value) in (tuple, *CONTAINERS):
        return _hold_alike(value, other)
    # Of floats a text tells zeros apart by their signs, and finds that NaN is NaN.
    return type(value) in _PLAIN and repr(value) == repr(other)


def _hold_alike(value: Any, other: Any) -> bool:
    if len(value) != len(other):
        return False
    if len(other) == 0:
        return True
    if isinstance(value, dict):
        same = list(value) == list(other)
        return same and all(map(_alike, dict.values(value), dict.values(other)))
    if isinstance(value, set):
        return bool(value == other)
    return all(map(_alike, value, other))


def put_back(old: Any) -> Any:
    """Return what there was, a container with what it held; for an iterator, one just like it."""
    if not isinstance(old, Contents):
        return old
    if not is_as(old.container, old):
        if is_iterator(old.container):
            return old.container if old.kept is None else _another(old.kept)
        kept = old.kept
        if isinstance(kept, dict):
            kept = {key: put_back(held) for key, held in kept.items()}
        elif isinstance(kept, list):
            kept = [*map(put_back, kept)]
        if isinstance(old.container, CONTAINERS):
            refill(old.container, kept)
        elif is_object(old.container):
            _set_fields(old.container, kept)
        elif isinstance(old.container, ContextVar):
            _set_variable(old.container, put_back(kept))
        elif not _fixed_in(old.container):
            _set_numbers(old.container, kept)
    return old.container


_UNSET = object()


def _set_variable(variable: ContextVar[Any], value: Any) -> None:
    if value is not _UNSET:
        variable.set(value)
        return
    with contextlib.suppress(LookupError):  # Without a default nothing can unset it.
        variable.set(Context().run(variable.get))


def refill(container: Any, kept: Any) -> None:
    """Let one of `CONTAINERS` hold what its copy `kept` holds."""
    container.clear()
    container.extend(kept) if isinstance(container, (list, deque)) else container.update(kept)


def is_iterator(value: Any) -> bool:
    """Whether it is one of Python's own iterators: of a list, say, a count or a generator."""
    return hasattr(type(value), "__next__") and home_of(value) in ("builtins", "itertools")


def _how_far(iterator: Any) -> Any:
    """How far an iterator is; None where it does not tell."""
    if isinstance(iterator, itertools.count):
        return repr(iterator)
    left = operator.length_hint(iterator, -1)
    return None if left < 0 else left


def _another(iterator: Any) -> Any:
    """An iterator that is as far; None where it does not tell, or where nothing copies it.

    >>> count = itertools.count(3, 2)
    >>> next(count), next(_another(count)), next(count)
    (3, 5, 5)
    """
    if isinstance(iterator, itertools.count):
        with contextlib.suppress(ValueError, SyntaxError):  # Its numbers may be of any kind.
            return itertools.count(*ast.literal_eval(f"[{str(iterator)[len('count(') : -1]}]"))
    if _how_far(iterator) is None:
        return None
    with contextlib.suppress(TypeError):  # Since Python 3.14 nothing copies those of itertools.
        return copy.copy(iterator)
    return None


def _fixed_in(value: Any) -> tuple[Any, ...]:
    """What lies in something that cannot be changed itself: a tuple, a function with arguments.

    >>> _fixed_in(functools.partial(max, [1], key=len))
    (([1],), {'key': <built-in function len>})
    """
    match value:
        case tuple():
            return value
        case functools.partial():
            return value.args, value.keywords
        case types.MethodType() | types.BuiltinMethodType() | types.MethodWrapperType():
            return (value.__self__,)
        case weakref.ref():
            return (value(),)
    return ()


def is_object(value: Any) -> bool:
    """Whether it is an object of a class that no library keeps for itself, and is no module."""
    kind = type(value)
    if issubclass(kind, (nn.Module, Tensor, type, types.ModuleType, Enum)):
        return False
    return issubclass(kind, _OPEN) or home_of(value) not in LIBRARIES


def is_watched(value: Any, homes: Collection[str]) -> bool:
    """Whether the contents of an object are told, for modules of these packages."""
    return isinstance(value, _OPEN) or home_of(value) in homes


def home_of(value: Any) -> str:
    """The package that the class of `value` belongs to."""
    return type(value).__module__.partition(".")[0]


_OPEN = (types.SimpleNamespace, threading.local)
LIBRARIES = {"torch", "numpy", "nhwc", "einops", *sys.stdlib_module_names}


def slots_of(value: Any) -> list[str]:
    """The attributes that an object of the user's has besides those in its `__dict__`."""
    if isinstance(value, _OPEN):
        return []
    if isinstance(value, nn.Module) and not any(
        "__slots__" in vars(k) for k in type(value).__mro__
    ):
        return []
    kinds = type(value).__mro__
    members = [one for kind in kinds for one in vars(kind).items()]
    return [name for name, one in members if isinstance(one, types.MemberDescriptorType)]


def fields_of(value: Any) -> dict[str, Any]:
    """The attributes of an object, without asking its own `__getattribute__`."""
    slots = {}
    for name in slots_of(value):
        with contextlib.suppress(AttributeError):  # It is not set.
            slots[name] = object.__getattribute__(value, name)
    return slots | _dict_of(value)


def _dict_of(value: Any) -> dict[str, Any]:
    if isinstance(value, _OPEN):
        return vars(value)
    try:
        held: dict[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return held


def _set_fields(value: Any, fields: dict[str, Any]) -> None:
    slots = slots_of(value)
    refill(_dict_of(value), {name: one for name, one in fields.items() if name not in slots})
    for name in slots:
        if name in fields:
            object.__setattr__(value, name, fields[name])
        else:
            with contextlib.suppress(AttributeError):
                object.__delattr__(value, name)


def _numbers_of(value: Any) -> Any:
    """What code may change in a tensor, an array or a random generator; None of anything else."""
    if type(value) is Tensor:
        known = has_strides(value) and not value.is_meta and not value.is_inference()
        return value.detach() if known else None
    if type(value) is torch.Generator:
        return value.get_state()
    if isinstance(value, random.Random):
        return None if isinstance(value, random.SystemRandom) else value.getstate()
    if isinstance(value, (bytearray, array.array)):
        return bytes(value)
    if type(value).__module__ == "numpy.random._generator":
        return value.bit_generator.state
    return value if type(value) is numpy.ndarray else None


def _set_numbers(value: Any, numbers: Any) -> None:
    match value:
        case Tensor() if value.shape == numbers.shape:
            with torch.no_grad():
                value.copy_(numbers)
        case Tensor():
            value.data = numbers.clone()
        case torch.Generator():
            value.set_state(numbers)
        case random.Random():
            value.setstate(numbers)
        case bytearray():
            value[:] = numbers
        case array.array():
            del value[:]
            value.frombytes(numbers)
        case numpy.ndarray():
            value[...] = numbers
        case _:
            value.bit_generator.state = numbers


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        return torch.equal(one, other) or bool(((one == other) | (one != one)).all())
    if isinstance(one, numpy.ndarray):
        return bool(one.shape == other.shape and one.tobytes() == other.tobytes())
    return repr(one) == repr(other)
