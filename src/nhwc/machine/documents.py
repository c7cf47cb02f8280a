"""JSON files that nhwc wrote and reads again: by then anything may stand in them.

A document says of what kind it is, and which layout, its schema, it has. What is made of it is held
against the types that its dataclasses declare, so that a wrong value is one line when the file is
read, and no surprise in whatever uses it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import FileError, InputError
from ..shown import shown
from .disk import open_file


@dataclass(frozen=True)
class Document:
    """A kind of document.

    >>> results = Document("bench", 1, "result of nhwc bench", anew="Measure again.")
    >>> results.checked({"kind": "bench", "schema": 1, "rows": []}, "the result")["rows"]
    []
    """

    word: str
    """What the file says under "kind"."""
    schema: int
    noun: str
    """What it is, in a sentence."""
    anew: str
    """How to get another one."""

    def read(self, path: str | Path) -> dict[str, Any]:
        """The document in a file."""
        try:
            with open_file(path, pipes=True) as file:
                data = json.loads(file.read(), parse_constant=no_constant)
        except FileNotFoundError:
            raise InputError(f"no such {self.noun}: {path}. {self.anew}") from None
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror or error}.") from error
        except (ValueError, RecursionError) as error:
            raise FileError(f"{path} is no JSON: {shown(error)}. {self.anew}") from error
        return self.checked(data, str(path))

    def checked(self, data: Any, where: str) -> dict[str, Any]:
        """`data`, if it is a document of this kind and of the schema that is read here."""
        if not isinstance(data, dict) or data.get("kind") != self.word:
            raise FileError(f"{where} is no {self.noun}. {self.anew}")
        if data.get("schema") != self.schema:
            found = shown(str(data.get("schema")))
            raise FileError(
                f"{where} has schema {found}; this nhwc reads {self.schema}. {self.anew}"
            )
        return data

    def damaged(self, where: str, why: str) -> FileError:
        return FileError(f"{where} is damaged: {shown(why)}. {self.anew}")


def misfits(value: Any, declared: Any, name: str) -> Iterator[str]:
    """Say what in `value` is not what `declared`, a type, declares.

    >>> list(misfits((1, "2"), tuple[int, ...], "sizes"))
    ["sizes[1] is '2', not int"]
    """
    if declared is Any:
        return
    origin, inner = typing.get_origin(declared), typing.get_args(declared)
    if origin in (typing.Union, types.UnionType):
        if all(any(misfits(value, one, name)) for one in inner):
            yield from misfits(value, inner[0], name)
    elif origin is tuple and isinstance(value, tuple):
        every = inner[-1] is Ellipsis
        if not every and len(value) != len(inner):
            yield f"{name} has {len(value)} items, not {len(inner)}"
            return
        for number, item in enumerate(value):
            yield from misfits(item, inner[0] if every else inner[number], f"{name}[{number}]")
    elif origin is dict and isinstance(value, dict):
        for key, item in value.items():
            yield from misfits(key, inner[0], f"a key of {name}")
            yield from misfits(item, inner[1], f"{name}[{shown(key)}]")
    elif dataclasses.is_dataclass(declared) and isinstance(value, typing.cast(type, declared)):
        hints = typing.get_type_hints(declared)
        for field in dataclasses.fields(declared):
            item = getattr(value, field.name)
            yield from misfits(item, hints[field.name], f"{name}.{field.name}")
    elif not _is_plain(value, declared):
        yield f"{name} is {shown(repr(value)[:60])}, not {getattr(declared, '__name__', declared)}"


def _is_plain(value: Any, declared: Any) -> bool:
    """Whether a value without parts is what is declared: True is no number, 1 is one with a point,
    and NaN stands for a number that is not known."""
    if type(value) is int and abs(value) > sys.float_info.max:
        return False
    if declared is float and type(value) is int:
        return True
    if declared in (int, float, bool, types.NoneType):
        return type(value) is declared and not (declared is float and math.isinf(value))
    return isinstance(declared, type) and isinstance(value, declared)


def no_constant(name: str) -> float:
    """What a reader of JSON makes of `NaN` and `Infinity`, which Python's takes: an error."""
    raise ValueError(f"{name} is no number of JSON")
