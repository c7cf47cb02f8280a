"""The inputs that a file was planned for, each a text: `1x3x224x224 float32 channels_last`.

Those in lists, tuples and dicts are written as these are: `{'image': 1x3x8x8 float32, 'at': [8]}`.
"""

from __future__ import annotations

import ast
import math
import re
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..formats import CHANNELS_LAST_OF, Format, to_format
from ..graph.nodes.counts import MOST_COUNTS, WHOLE
from .container import DTYPES
from .plain import Foreign, bounded

_LENGTH = 10_000
"""The most letters of an input's text."""

_DEPTH = 32
_DIMENSIONS = 16

_TOKEN = re.compile(
    r"""( '(?:[^'\\]|\\.)*' | "(?:[^"\\]|\\.)*"          # a text
      | [\[\](){}] | ,[ ] | :[ ]                         # what holds values, and lies between them
      | (?: [^\[\](){}'",:] | ,(?![ ]) | :(?![ ]) )+ )    # an input, or a number
    """,
    re.VERBOSE,
)


@dataclass(frozen=True)
class Example:
    """An input by its shape, or a plain `value` where `dtype` is None.

    >>> Example.of("2x3 float32").drawn().shape
    torch.Size([2, 3])
    >>> Example.of("1x3x4x8x8 float32 channels_last").drawn().stride()
    (768, 1, 192, 24, 3)
    >>> Example.of("3x2x4 float32 order 1,0,2").drawn().stride()
    (4, 12, 1)
    >>> Example.of("1x2 int64 numbers 16,8").drawn()
    tensor([[16,  8]])
    >>> Example.of("7").drawn()
    7
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    channels_last: bool
    value: bool | int | float | str | None = None
    order: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()

    @classmethod
    def of(cls, text: Any) -> Example:
        """Read the text that `optimized.describe` made of an input."""
        if not isinstance(text, str) or len(text) > _LENGTH:
            raise Foreign(f"the input {str(text)[:40]!r}")
        words = [text] if text[:1] in ("'", '"') else text.split(" ")
        dtype = DTYPES.get(words[1]) if len(words) > 1 else None
        if dtype is None:
            value = _literal(text)
            if not isinstance(value, (bool, int, float, str, type(None))):
                raise Foreign(f"the input {text[:40]!r}")
            return cls((), None, False, bounded(value))
        shape = tuple(int(size) for size in words[0].split("x") if size)
        if len(shape) > _DIMENSIONS or any(size < 0 for size in shape):
            raise Foreign(f"an input of shape {words[0][:40]}")
        last = words[2:] == [str(Format.CHANNELS_LAST)]
        if last and len(shape) not in CHANNELS_LAST_OF:
            raise Foreign(f"an input of {len(shape)} dimensions that is channels last")
        order = tuple(map(int, words[3].split(","))) if words[2:-1] == ["order"] else ()
        if order and sorted(order) != [*range(len(shape))]:
            raise Foreign(f"an input of {len(shape)} dimensions in the order {order}")
        return cls(shape, dtype, last, order=order, numbers=_numbers(words[2:], shape, dtype))

    def shaped(self) -> Any:
        """A tensor of the shape, its numbers not set; or the value."""
        if self.dtype is None:
            return self.value
        return self._in_order(torch.empty(self.shape, dtype=self.dtype, device="cpu"))

    def drawn(self) -> Any:
        """A tensor of the shape with random floats, the same each time; or the value."""
        if self.dtype is None:
            return self.value
        if self.numbers:
            return torch.tensor(self.numbers, dtype=self.dtype, device="cpu").view(self.shape)
        generator = torch.Generator().manual_seed(0)
        drawn = torch.randn(self.shape, generator=generator, device="cpu").to(self.dtype)
        if self.dtype in (torch.int32, torch.int64):  # An index, say: every table has the first.
            drawn.zero_()
        if self.channels_last:
            return to_format(drawn, CHANNELS_LAST_OF[drawn.dim()])
        return self._in_order(drawn)

    def _in_order(self, x: Tensor) -> Tensor:
        """The same numbers, which lie in the `order` of dimensions, if there is one."""
        if not self.order:
            return x
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return x.permute(self.order).contiguous().permute(back)


def _numbers(words: Sequence[str], shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, ...]:
    """The whole numbers of a tensor, if the text says them."""
    if words[:-1] != ["numbers"]:
        return ()
    found = tuple(map(int, words[1].split(",")))
    if dtype not in WHOLE or len(found) != math.prod(shape) or len(found) > MOST_COUNTS:
        raise Foreign(f"{len(found)} numbers of an input of shape {shape}")
    kind = None if dtype is torch.bool else torch.iinfo(dtype)
    least, most = (kind.min, kind.max) if kind else (0, 1)
    if not all(least <= number <= most for number in found):
        raise Foreign(f"a number that {dtype} does not have")
    return found


def examples_in(text: Any) -> Any:
    """An Example, or lists, tuples and dicts of them, as the text says.

    >>> examples_in("[1x3 float32, {'a': 7}]")[1]["a"].value
    7
    """
    if not isinstance(text, str) or len(text) > _LENGTH:
        raise Foreign(f"the input {str(text)[:40]!r}")
    tokens = deque(_TOKEN.findall(text))
    if "".join(tokens) != text:
        raise Foreign(f"the input {text[:40]!r}")
    try:
        found = _value(tokens, 0)
    except IndexError as error:
        raise Foreign(f"the input {text[:40]!r}, which does not end") from error
    if tokens:
        raise Foreign(f"the input {text[:40]!r}")
    return found


def _value(tokens: deque[str], depth: int) -> Any:
    """Read the value that the tokens begin with."""
    if depth > _DEPTH:
        raise Foreign(f"inputs within inputs, more than {_DEPTH} deep")
    token = tokens.popleft()
    if token == "[":
        return list(_until("]", tokens, lambda: _value(tokens, depth + 1)))
    if token == "(":
        return tuple(_until(")", tokens, lambda: _value(tokens, depth + 1)))
    if token == "{":
        return dict(_until("}", tokens, lambda: (_key(tokens), _value(tokens, depth + 1))))
    if token == OrderedDict.__name__:
        return OrderedDict(_value(tokens, depth + 1))
    return Example.of(token)


def _literal(text: str) -> Any:
    """The value that a text of Python's says."""
    try:
        return ast.literal_eval(text)
    except MemoryError as error:  # So Python's parser says that signs stand too deep in others.
        raise Foreign(f"the input {text[:40]!r}") from error


def _until(end: str, tokens: deque[str], item: Callable[[], Any]) -> Iterator[Any]:
    """Read items up to `end`, which is read, too."""
    while tokens[0] != end:
        yield item()
        if tokens[0] not in (", ", end):
            raise Foreign(f"{tokens[0][:40]!r} in the place of {end!r}")
        if tokens[0] == ", ":
            tokens.popleft()
    tokens.popleft()


def _key(tokens: deque[str]) -> Any:
    key, colon = _literal(tokens.popleft()), tokens.popleft()
    if type(key) not in (str, int) or colon != ": ":
        raise Foreign(f"the key {str(key)[:40]!r}")
    return bounded(key)
