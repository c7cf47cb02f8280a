"""Where each buffer lies in one block of memory, when not all of them live at the same time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

LINE = 64
"""Buffers begin on cache lines, so that two threads never write one line for two buffers."""


@dataclass(frozen=True)
class Lifetime:
    """A buffer of `bytes` in use from step `first` to step `last`, both included."""

    bytes: int
    first: int
    last: int

    def meets(self, other: Lifetime) -> bool:
        return self.first <= other.last and other.first <= self.last


def place(lifetimes: Sequence[Lifetime]) -> tuple[list[int], int]:
    """Return an offset for each buffer, and the size of the block that holds them all.

    >>> place([Lifetime(64, 0, 1), Lifetime(64, 1, 2), Lifetime(64, 2, 3)])
    ([0, 64, 0], 128)

    The largest go first, each to the lowest gap it fits in: simple, and within a few per cent of
    the best for networks, whose large buffers are few and early.
    """
    offsets = [0] * len(lifetimes)
    placed: list[int] = []
    for index in sorted(range(len(lifetimes)), key=lambda i: -lifetimes[i].bytes):
        taken = sorted(
            (offsets[other], _padded(lifetimes[other].bytes))
            for other in placed
            if lifetimes[other].meets(lifetimes[index])
        )
        offset, size = 0, _padded(lifetimes[index].bytes)
        for begin, length in taken:
            if offset + size <= begin:
                break
            offset = max(offset, begin + length)
        offsets[index] = offset
        placed.append(index)
    ends = [o + _padded(life.bytes) for o, life in zip(offsets, lifetimes, strict=True)]
    return offsets, max(ends, default=0)


def _padded(size: int) -> int:
    return -(-size // LINE) * LINE
