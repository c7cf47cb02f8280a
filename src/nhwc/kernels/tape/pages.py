"""Packed weights side by side, in large pages.

A call reads every weight once. In pages of 4 KB those are thousands of addresses for the processor
to look up, more than it keeps at hand, and the look-ups take it a few hundredths of the time.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

PAGE = 1 << 21
"""The size of a huge page on most systems, in bytes."""

_BLOCK = 1 << 25
"""Memory is requested in blocks of at least this size; the unused part of a block takes no memory.
For a smaller request malloc may return memory that was used before, which lies in small pages.
"""

_LINE = 16
"""Floats in a cache line, at the beginning of which each tensor lies."""


class _Shelf:
    """Memory that is given away piece by piece; it is free once all that lies there is gone."""

    def __init__(self) -> None:
        self._rest = torch.empty(0)

    def take(self, floats: int) -> Tensor:
        whole = -(-floats // _LINE) * _LINE
        if whole > len(self._rest):
            block = _block(max(4 * whole, _BLOCK))
            if len(block) - whole < len(self._rest):
                return block[:floats]
            self._rest = block
        taken, self._rest = self._rest[:floats], self._rest[whole:]
        return taken


_shelf: ContextVar[_Shelf | None] = ContextVar("shelf", default=None)


@contextmanager
def side_by_side() -> Iterator[None]:
    """Place all memory that `room` returns inside this block side by side.

    >>> with side_by_side():
    ...     first, second = room(100), room(100)
    >>> second.data_ptr() - first.data_ptr()
    448
    """
    before = _shelf.set(_Shelf())
    try:
        yield
    finally:
        _shelf.reset(before)


def room(floats: int) -> Tensor:
    """Memory for weights that are being packed, whose values are not yet set."""
    shelf = _shelf.get()
    return torch.empty(floats) if shelf is None else shelf.take(floats)


def _block(size: int) -> Tensor:
    """`size` bytes as floats, from the beginning of a large page on."""
    memory = torch.empty(size + PAGE, dtype=torch.uint8)
    begin = -memory.data_ptr() % PAGE
    block = memory[begin : begin + size]
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        # The system may refuse; the pages then stay small.
        madvise = ctypes.CDLL(None).madvise
        madvise(ctypes.c_void_p(block.data_ptr()), ctypes.c_size_t(size), ctypes.c_int(advice))
    return block.view(torch.float32)
