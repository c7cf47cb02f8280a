"""Numbers of numpy's, and of other kinds derived from Python's own: generated code says no others.

The text of `numpy.float64(0.5)` is a name that the code of a graph does not know.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy

from ..models.trees import can_be_remade

_KINDS: tuple[type, ...] = (int, float, complex, str)


def is_derived(value: object) -> bool:
    """Whether this is a number or a text of another type than Python's own, or an enum's.

    >>> is_derived(numpy.float64(0.5)), is_derived(numpy.int64(2)), is_derived(0.5)
    (True, True, False)
    """
    if isinstance(value, Enum | bool) or type(value) in _KINDS:
        return False
    return isinstance(value, numpy.generic | int | float | complex | str)


def as_plain(value: Any) -> Any:
    """A number or a text of another type as Python's own; anything else as it is.

    >>> as_plain(numpy.float64(0.5)), as_plain(numpy.bool_(True)), as_plain(None)
    (0.5, True, None)
    """
    if not is_derived(value):
        return value
    if isinstance(value, numpy.generic):
        return value.item()
    kind = next(kind for kind in _KINDS if isinstance(value, kind))
    return str.__str__(value) if kind is str else kind(value)


def all_plain(tree: Any) -> Any:
    """Arguments of a function of torch's with plain numbers: it takes both for the same.

    >>> all_plain((numpy.int64(2), [slice(numpy.int64(1), None)]))
    (2, [slice(1, None, None)])
    """
    if type(tree) is dict:
        return {key: all_plain(value) for key, value in tree.items()}
    own = isinstance(tree, tuple | list) and not can_be_remade(tree)
    if own or type(tree) is tuple:
        return (list if isinstance(tree, list) else tuple)(map(all_plain, tree))
    if isinstance(tree, slice):
        return slice(*map(as_plain, (tree.start, tree.stop, tree.step)))
    return as_plain(tree)
