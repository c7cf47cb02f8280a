"""Memory that programs share: those of one model, for all shapes that it is planned for.

They share the arena of their calls, and what they packed of the model's weights.

Memory that was used before may hold the very numbers that are right, left by a call that computed
them. Who checks an answer runs the program `from_nothing`.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

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


def wiped(memory: Tensor) -> Tensor:
    """`memory`, without what it held if programs are to run `from_nothing`."""
    if _from_nothing.get():
        # Four of such bytes are a NaN, too.
        memory.fill_(math.nan if memory.is_floating_point() else 0xFF)
    return memory


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
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")

    def grow(self, size: int) -> None:
        if size + LINE > self.size:
            self.bound = WeakKeyDictionary()
            self._memory = torch.empty(size + LINE, dtype=torch.uint8, device="cpu")

    def wipe(self) -> None:
        wiped(self._memory)

    @property
    def size(self) -> int:
        return len(self._memory)

    @property
    def start(self) -> int:
        return -(-self._memory.data_ptr() // LINE) * LINE
