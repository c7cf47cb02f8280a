"""Where each buffer lies in one block of memory, when not all of them live at the same time.

A buffer lives from the phase that first writes it to the one that last reads it; two that never
live together may share memory. Each is placed with its middle on the middle of others:

    phase 0     |        [      a      ]       |       a is read by b, b by c, c by d
    phase 1     |        [      a      ][  b  ]|       in phase 1 a and b live, in phase 2 b and c
    phase 2     |   [  c  ]             [  b  ]|  no:  c would move from one half to the other
    phase 2     |           [   c   ]   [  b  ]|  yes: the halves of c lie where the halves of a lay

Threads share out a buffer from its beginning to its end. With all middles in one place the first
half of the memory stays one thread's from layer to layer; a line that another core wrote last is
far away, the more so where cores have caches of their own. Of a volume no half stays in a cache:
there buffers lie where there is room, if that takes less.
"""

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


_NEAR = 1 << 24
"""A block of more bytes than this is in no cache of a core's when the next layer reads it."""


def place(lifetimes: Sequence[Lifetime]) -> tuple[list[int], int]:
    """Return an offset for each buffer, and the size of the block that holds them all.

    >>> place([Lifetime(64, 0, 1), Lifetime(64, 1, 2), Lifetime(64, 2, 3)])
    ([0, 64, 0], 128)

    The largest go first, each to where it has its middle on the middle of another if it can, else
    to the lowest gap it fits in.
    """
    centred = _placed(lifetimes, centred=True)
    if centred[1] <= max(_NEAR, least(lifetimes)):
        return centred
    return min(centred, _placed(lifetimes, centred=False), key=lambda found: found[1])


def least(lifetimes: Sequence[Lifetime]) -> int:
    """The bytes that live at once: no block for these buffers is smaller.

    >>> least([Lifetime(64, 0, 1), Lifetime(64, 1, 2), Lifetime(64, 2, 3)])
    128
    """
    # Most of them live when one of them begins to.
    return max(
        (
            sum(_padded(life.bytes) for life in lifetimes if life.first <= at <= life.last)
            for at in {life.first for life in lifetimes}
        ),
        default=0,
    )


def _placed(lifetimes: Sequence[Lifetime], *, centred: bool) -> tuple[list[int], int]:
    offsets = [0] * len(lifetimes)
    placed: list[int] = []
    middles: list[int] = []
    for index in sorted(range(len(lifetimes)), key=lambda i: -lifetimes[i].bytes):
        size = _padded(lifetimes[index].bytes)
        half = size // LINE // 2 * LINE
        taken = sorted(
            (offsets[other], _padded(lifetimes[other].bytes))
            for other in placed
            if lifetimes[other].meets(lifetimes[index])
        )
        # The last middles belong to the smallest buffers, so that small buffers stay together.
        tried = (middle - half for middle in reversed(middles if centred else []))
        offset = next((at for at in tried if _is_free(at, size, taken)), None)
        if offset is None:
            offset = _lowest(size, taken)
            middles.append(offset + half)
        offsets[index] = offset
        placed.append(index)
    ends = [o + _padded(life.bytes) for o, life in zip(offsets, lifetimes, strict=True)]
    return offsets, max(ends, default=0)


def _is_free(offset: int, size: int, taken: Sequence[tuple[int, int]]) -> bool:
    return offset >= 0 and all(
        offset + size <= begin or begin + length <= offset for begin, length in taken
    )


def _lowest(size: int, taken: Sequence[tuple[int, int]]) -> int:
    offset = 0
    for begin, length in taken:
        if offset + size <= begin:
            break
        offset = max(offset, begin + length)
    return offset


def _padded(size: int) -> int:
    return -(-size // LINE) * LINE
