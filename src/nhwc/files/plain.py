"""Arguments as plain values, each kind with a tag of its own, and back."""

from __future__ import annotations

import keyword
import math
import re
from typing import Any

import torch
from torch import fx

from ..errors import InputError
from .vocabulary import enumerations


class Foreign(Exception):
    """Plain values that no graph could have been written as."""


def to_plain(value: Any) -> Any:
    """Plain values as they are; all others as a mapping with one key, their kind."""
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
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return {"tuple": [to_plain(item) for item in value]}
    if isinstance(value, list):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {"dict": [[to_plain(key), to_plain(item)] for key, item in value.items()]}
    for kind, named in enumerations().items():
        if str(value) in named and named[str(value)] is value:
            return {kind: str(value)}
    raise refusal(type(value).__name__, f"{str(value)[:60]} has no plain form")


def from_plain(value: Any, known: dict[str, fx.Node]) -> Any:
    """What `to_plain` was given; `known` are the nodes there are so far, by name."""
    if isinstance(value, list):
        return [from_plain(item, known) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "node":
        return known[inner]
    if kind == "slice":
        return slice(*(from_plain(end, known) for end in inner))
    if kind == "ellipsis":
        return Ellipsis
    if kind == "float":
        return float(inner)
    if kind == "device":
        return torch.device(inner)
    if kind == "tuple":
        return tuple(from_plain(item, known) for item in inner)
    if kind == "dict":
        return {from_plain(key, known): from_plain(item, known) for key, item in inner}
    return enumerations()[kind][inner]


def identifier(name: Any) -> str:
    """`name`, which torch writes into the code it generates, if it is no more than a name."""
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        raise Foreign(f"the name {str(name)[:40]!r}")
    return name


def checked_part(name: str) -> str:
    """A part of a dotted name: what torch quotes in its code must not end the quotes."""
    if not re.fullmatch(r"[\w-]+", name):
        raise Foreign(f"the name {name[:40]!r}")
    return name


def refusal(where: str, why: str) -> InputError:
    """The error of a model that has no plain form."""
    return InputError(
        f"the model cannot be saved: {where}: {why}. A saved file holds torch's own operators "
        "alone; keep such a model as code and weights."
    )
