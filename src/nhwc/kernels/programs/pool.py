"""Memory that programs share: those of one model, for all shapes that it is planned for.

They share the arena of their calls, and what they packed of the model's weights.

Memory that was used before may hold the very numbers that are right, left by a call that computed
them. Who checks an answer runs the program `from_nothing`. Then nothing may be written around that
memory either, which would be that of others:

    | guard | memory of the program's steps | guard |        | guard | a result | guard |
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from ...errors import VerificationError
from ..tape.arena import LINE
from ..tape.pages import WeightShelf

_from_nothing = ContextVar("from_nothing", default=False)


@contextlib.contextmanager
def from_nothing() -> Iterator[None]:
    """Have programs of this thread begin with NaN wherever they have not written yet."""
    before = _from_nothing.set(True)
    try:
        yield
    finally:
        _from_nothing.reset(before)


def is_from_nothing() -> bool:
    """Whether this thread runs programs to check them."""
    return _from_nothing.get()


_GUARD = 1 << 12
"""The bytes on either side of memory that are nobody's."""
_UNTOUCHED = 0xFF
"""Four of such bytes are a NaN."""


def result(shape: Sequence[int], strides: Sequence[int]) -> Tensor:
    """Memory for a result in float32, between guards if programs are to run `from_nothing`."""
    if not is_from_nothing():
        return torch.empty_strided(shape, strides, dtype=torch.float32, device="cpu")
    memory = torch.empty(_bytes(shape, strides) + 2 * _GUARD, dtype=torch.uint8, device="cpu")
    memory.fill_(_UNTOUCHED)
    return memory.view(torch.float32).as_strided(shape, strides, _GUARD // 4)


def check_guards(tensor: Tensor) -> None:
    """Raise a VerificationError if the guards around a result were written to."""
    memory = torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage())
    _check_around(memory, _GUARD, _GUARD + _bytes(tensor.shape, tensor.stride()))


def _check_around(memory: Tensor, begin: int, end: int) -> None:
    around = memory[:begin], memory[end:]
    if any(bool((part != _UNTOUCHED).any()) for part in around):
        raise VerificationError(
            "a kernel wrote beside its memory, into that of others. Report this model, and run it "
            "without nhwc meanwhile."
        )


def _bytes(shape: Sequence[int], strides: Sequence[int]) -> int:
    """From the first number of a tensor of float32 to its last."""
    if 0 in shape:
        return 0
    return 4 + 4 * sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def _bare(size: int) -> Tensor:
    """So many bytes, which may be wiped in whatever mode they were asked for."""
    with torch.inference_mode(False):
        return torch.empty(size, dtype=torch.uint8, device="cpu")


class Pool:
    """Memory for programs that run one after the other, or at once in several threads."""

    def __init__(self) -> None:
        self._idle: dict[int, deque[_Block]] = {}
        # A shelf lives as long as the program whose weights lie there.
        self._shelves: list[ref[WeightShelf]] = []

    def take(self, threads: int) -> _Block:
        """Take a block, which nobody else gets until it is put back."""
        # deque's append and pop are atomic, so no lock is held, and none survives a fork.
        try:
            return self._idle.setdefault(threads, deque()).pop()
        except IndexError:
            return _Block()

    def put(self, threads: int, block: _Block) -> None:
        self._idle.setdefault(threads, deque()).append(block)

    @property
    def shelves(self) -> tuple[WeightShelf, ...]:
        """What the programs that are alive packed."""
        self._shelves = [one for one in self._shelves if one() is not None]
        return tuple(shelf for one in self._shelves if (shelf := one()) is not None)

    def add(self, shelf: WeightShelf) -> None:
        """Offer what lies on `shelf` to later programs."""
        self._shelves.append(ref(shelf))

    def forget(self) -> None:
        """Free what no call uses now: it may be as large as a program that is gone."""
        self._idle = {}


class _Block:
    """Memory for the largest of its programs, and all programs that are bound to it.

    It grows into another place; then all are bound again as they are called.
    """

    def __init__(self) -> None:
        # A program that was made for weights of yesterday leaves nothing behind.
        self.bound: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self._memory = _bare(0)

    def grow(self, size: int) -> None:
        if size > self.size:
            self.bound = WeakKeyDictionary()
            self._memory = _bare(size + LINE + 2 * _GUARD)

    def wipe(self) -> None:
        """Leave nothing of what it holds."""
        self._memory.fill_(_UNTOUCHED)

    def check(self, size: int) -> None:
        """Raise a VerificationError if a program of this size wrote around its memory."""
        begin = self.start - self._memory.data_ptr()
        _check_around(self._memory, begin, begin + size)

    @property
    def size(self) -> int:
        """The bytes that a program may have."""
        return max(0, len(self._memory) - LINE - 2 * _GUARD)

    @property
    def start(self) -> int:
        return -(-(self._memory.data_ptr() + _GUARD) // LINE) * LINE
