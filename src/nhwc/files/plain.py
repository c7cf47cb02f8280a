"""Write the arguments of a graph's nodes as plain values, each kind tagged, and read them."""

from __future__ import annotations

import keyword
import math
import re
import unicodedata
from typing import Any

import torch
from torch import fx, nn

from ..errors import InputError
from .vocabulary import enumerations

_DEPTH = 32
"""The deepest nesting of tuples, lists and mappings."""

_LENGTH = 10_000
"""The most letters of a text or a name."""

_OWN = frozenset(vars(nn.Module()))
"""The attributes that every module has as soon as it is made."""


class Foreign(Exception):
    """These plain values describe no graph that nhwc could have written."""


def to_plain(value: Any) -> Any:
    """`value` as it is if it is plain, else a mapping with its kind as the only key."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, slice):
        return {"slice": [to_plain(end) for end in (value.start, value.stop, value.step)]}
    if value is Ellipsis:
        return {"ellipsis": True}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, tuple):
        return {"tuple": [to_plain(item) for item in value]}
    if isinstance(value, list):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {"dict": [[to_plain(key), to_plain(item)] for key, item in value.items()]}
    for kind, named in enumerations().items():
        if str(value) in named and named[str(value)] is value:
            return {kind: str(value)}
    raise refusal(type(value).__name__, f"{str(value)[:60]} has no plain form")


def from_plain(value: Any, known: dict[str, fx.Node], depth: int = 0) -> Any:
    """The value that `to_plain` was given; `known` are the nodes made so far, by name."""
    if depth > _DEPTH:
        raise Foreign(f"arguments within arguments, more than {_DEPTH} deep")
    again = lambda items: [from_plain(item, known, depth + 1) for item in items]
    if isinstance(value, list):
        return again(value)
    if not isinstance(value, dict):
        return bounded(value)
    ((kind, inner),) = value.items()
    if kind == "node":
        return known[inner]
    if kind == "slice":
        return slice(*again(inner))
    if kind == "ellipsis":
        return Ellipsis
    if kind == "float":
        return float(inner)
    if kind == "device":
        return torch.device(_text(inner))
    if kind == "tuple":
        return tuple(again(inner))
    if kind == "dict":
        return {_key(key): from_plain(item, known, depth + 1) for key, item in inner}
    return enumerations()[kind][inner]


def bounded(value: Any) -> Any:
    """`value` if torch can take it: integers have 64 bits, and texts have a bound; else Foreign."""
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise Foreign(f"a number of {value.bit_length()} bits")
    return value


def _text(value: str) -> str:
    if len(value) > _LENGTH:
        raise Foreign(f"a text of more than {_LENGTH} letters")
    return value


def _key(value: Any) -> Any:
    if type(value) in (int, str):
        return bounded(value)
    raise Foreign(f"the key {str(value)[:40]!r}")


def identifier(name: Any) -> str:
    """`name` if it is an identifier: torch writes it into the code that it generates.

    >>> identifier("conv_1")
    'conv_1'
    """
    if not isinstance(name, str) or not _is_name(name, r"[^\W\d]\w*") or name == "self":
        raise Foreign(f"the name {str(name)[:40]!r}")
    return name


def checked_part(name: str, holder: type[nn.Module] = nn.Module) -> str:
    """A part of a dotted name, if it is safe: torch quotes it in code, and it must not end a quote.

    Nor may it hide an attribute that every module, or one of the class `holder`, has.
    """
    if not _is_name(name, r"[\w-]+") or hasattr(holder, name) or name in _OWN:
        raise Foreign(f"the name {name[:40]!r}")
    return name


def _is_name(name: str, pattern: str) -> bool:
    """Whether the name fits `pattern`, and Python reads it as it is written."""
    if len(name) > _LENGTH or not re.fullmatch(pattern, name) or keyword.iskeyword(name):
        return False
    # Python normalizes identifiers: it takes other forms of a letter for the letter itself.
    return unicodedata.normalize("NFKC", name) == name and not name.startswith("__")


def refusal(where: str, why: str) -> InputError:
    """The error for a model that has no plain form: `where` in it, and `why`."""
    return InputError(
        f"the model cannot be saved: {where}: {why}. A saved file holds operators of torch that "
        "compute, alone; keep such a model as code and weights."
    )
