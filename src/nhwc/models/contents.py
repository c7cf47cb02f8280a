"""What attributes and variables held: values, and copies of the containers among them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .preserve import refill
from .trees import CONTAINERS

_PLAIN = (bool, int, float, complex, str, bytes)


@dataclass(frozen=True)
class Contents:
    """A container, and a copy of its contents, of those of the containers in it as well."""

    container: Any
    kept: Any


def with_contents(value: Any, known: set[int] | None = None) -> Any:
    """`value`, or the `Contents` of a container; not of one that is `known` by its `id`."""
    known = set() if known is None else known
    if not isinstance(value, CONTAINERS) or id(value) in known:
        return value
    known.add(id(value))
    if isinstance(value, set):
        return Contents(value, set(value))
    # A registry of the user's may have a `values` and a `get` of its own, which do something else.
    if isinstance(value, dict):
        items = dict.items(value)
        return Contents(value, {key: with_contents(held, known) for key, held in items})
    return Contents(value, [with_contents(held, known) for held in value])


def is_as(value: Any, old: Any) -> bool:
    """Whether a call leaves a value as it found it: the same object, or one just like it.

    Code that counts its convolutions as it calls them, or hands frames from one part of a video to
    the next, begins with `self.count = [0]`, and may end so.
    """
    if not isinstance(old, Contents):
        return _alike(value, old)
    known = value is old.container or type(value) is type(old.container)
    return known and _hold_alike(value, old.kept)


def _alike(value: Any, other: Any) -> bool:
    """Whether two values are one object, or plain and equal."""
    if isinstance(other, Contents):
        return is_as(value, other)
    if value is other:
        return True
    if type(value) is not type(other):
        return False
    if type(value) in (tuple, *CONTAINERS):
        return _hold_alike(value, other)
    # Of floats a text tells zeros apart by their signs, and finds that NaN is NaN.
    return type(value) in _PLAIN and repr(value) == repr(other)


def _hold_alike(value: Any, other: Any) -> bool:
    if len(value) != len(other):
        return False
    if isinstance(value, dict):
        return all(_alike(dict.get(value, key, is_as), held) for key, held in other.items())
    if isinstance(value, set):
        return bool(value == other)
    return all(map(_alike, value, other))


def put_back(old: Any) -> Any:
    """Return what there was, a container with what it held."""
    if not isinstance(old, Contents):
        return old
    if not is_as(old.container, old):
        kept = old.kept
        if isinstance(kept, dict):
            kept = {key: put_back(held) for key, held in kept.items()}
        elif isinstance(kept, list):
            kept = [*map(put_back, kept)]
        refill(old.container, kept)
    return old.container
