"""Packed weights side by side, in large pages.

A call reads every weight once. In pages of 4 KB those are thousands of addresses for the processor
to look up, more than it keeps at hand, and the look-ups take it a few hundredths of the time.

A shelf remembers what lies on it. Programs for several shapes of one model pack the same weights,
and so does a head that one model calls at several sizes: the second finds the first's and reads
that. What was packed is compared, not where it came from, so it is known to be right.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Hashable, Iterable, Iterator
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


_LEAST = 1 << 12
"""Fewer numbers are not looked for among those that were packed before."""

_SAMPLE = 64
"""How many numbers of a tensor are looked at before it is compared as a whole."""


class WeightShelf:
    """Memory that is given away piece by piece; it is free once all that lies there is gone.

    `others` are shelves of the same model, whose pieces are as good as its own.
    """

    def __init__(self, others: Iterable[WeightShelf] = ()) -> None:
        self._rest = self._before = self._last = torch.empty(0)
        self._others = tuple(others)
        self._pieces: dict[Hashable, list[Tensor]] = {}

    @property
    def pieces(self) -> tuple[Tensor, ...]:
        """What was packed while this shelf was filled, or found on another."""
        return tuple(piece for some in self._pieces.values() for piece in some)

    def take(self, floats: int) -> Tensor:
        self._before = self._rest
        whole = -(-floats // _LINE) * _LINE
        if whole > len(self._rest):
            block = _block(max(4 * whole, _BLOCK))
            if len(block) - whole < len(self._rest):
                self._last = block[:floats]
                return self._last
            self._rest = block
        self._last, self._rest = self._rest[:floats], self._rest[whole:]
        return self._last

    def put_back(self, tensor: Tensor) -> None:
        """Use the room of `tensor` again, if it was the last to be taken."""
        if not tensor.is_mkldnn and tensor.data_ptr() == self._last.data_ptr():
            self._rest, self._last = self._before, torch.empty(0)

    def known(self, tensor: Tensor) -> Tensor:
        """The piece with the numbers of `tensor`; itself, from now on, if there is none."""
        sample = _sample(tensor)
        for shelf in (self, *self._others):
            for piece in shelf._pieces.get(sample, ()):
                if torch.equal(_numbers(piece), _numbers(tensor)):
                    if shelf is not self:
                        self._pieces.setdefault(sample, []).append(piece)
                    return piece
        self._pieces.setdefault(sample, []).append(tensor)
        return tensor

    def close(self) -> None:
        """Forget what only packing needs: the others may be gone before this one."""
        self._others, self._last, self._before = (), torch.empty(0), torch.empty(0)


_shelf: ContextVar[WeightShelf | None] = ContextVar("shelf", default=None)


_noted: ContextVar[list[Tensor] | None] = ContextVar("noted", default=None)


@contextmanager
def side_by_side(others: Iterable[WeightShelf] = ()) -> Iterator[WeightShelf]:
    """Place all memory that `room` returns inside this block side by side.

    >>> with side_by_side():
    ...     first, second = room(100), room(100)
    >>> second.data_ptr() - first.data_ptr()
    448

    The shelf that it lies on keeps what was packed, for those that come with this one among the
    `others`.
    """
    shelf = WeightShelf(others)
    before = _shelf.set(shelf)
    try:
        yield shelf
    finally:
        shelf.close()
        _shelf.reset(before)


@contextmanager
def noted() -> Iterator[list[Tensor]]:
    """A list of what `shared` returns inside this block, for a shelf that comes later.

    >>> with side_by_side(), noted() as pieces:
    ...     packed = shared(room(5000).fill_(1))
    >>> len(pieces)
    1
    """
    pieces: list[Tensor] = []
    before = _noted.set(pieces)
    try:
        yield pieces
    finally:
        _noted.reset(before)


def shared(tensor: Tensor) -> Tensor:
    """What was packed before with the very numbers of `tensor`, for this model; else `tensor`.

    >>> with side_by_side():
    ...     first = shared(room(5000).fill_(1))
    ...     second = shared(room(5000).fill_(1))
    >>> first is second
    True

    If it is not needed, its room, which was the last to be taken, is free again.
    """
    shelf = _shelf.get()
    if shelf is None or tensor.numel() < _LEAST or not _is_comparable(tensor):
        return tensor
    found = shelf.known(tensor)
    if found is not tensor:
        shelf.put_back(tensor)
    pieces = _noted.get()
    if pieces is not None:
        pieces.append(found)
    return found


def _is_comparable(tensor: Tensor) -> bool:
    if tensor.is_mkldnn:
        return hasattr(torch.ops.mkldnn, "_get_mkldnn_serialized_md")
    return tensor.is_cpu and tensor.is_contiguous() and tensor.dtype is torch.float32


def _numbers(tensor: Tensor) -> Tensor:
    """The numbers in their order in memory as integers, of which each equals itself."""
    if not tensor.is_mkldnn:
        return tensor.view(torch.int32).flatten()
    size = torch.ops.mkldnn._nbytes(tensor) // 4 * 4
    memory = (ctypes.c_char * size).from_address(torch.ops.mkldnn.data_ptr(tensor))
    return torch.frombuffer(memory, dtype=torch.int32)


def _sample(tensor: Tensor) -> Hashable:
    """What tensors of the same numbers have in common, and few others."""
    numbers = _numbers(tensor)
    some = numbers[:: max(1, len(numbers) // _SAMPLE)].tolist()
    # oneDNN lays out weights in many ways, and tells which.
    order = torch.ops.mkldnn._get_mkldnn_serialized_md(tensor).tolist() if tensor.is_mkldnn else ()
    return tuple(tensor.shape), tuple(some), tuple(order)


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
