"""Memory that a result need not take: what malloc keeps, and weights that only rare calls read.

A planned model has its weights twice: packed for its kernels, and as they were for calls of other
shapes and for whoever looks at them. Those go into a file that has no name and that nobody else
can open, and are mapped from there: they take memory once they are read, and what is written to
them stays in this process. Where there is no disk to write to, they stay where they are.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from .cache import make_own
from .environment import cache_dir

_LEAST = 1 << 23
"""For fewer bytes no file is made."""

_PAGEOUT = 21
"""madvise's MADV_PAGEOUT, which Python has no name for."""

_POPULATE_WRITE = 23
"""madvise's MADV_POPULATE_WRITE, since Linux 5.14."""

_SMALL = 1 << 14
"""A tensor of fewer bytes is none of those that count."""

_APART = 1 << 17
"""For fewer bytes pages of their own are too many."""

_STEP = 1 << 21
"""So many numbers are copied at a time: what was read of a file goes back before more is read."""

_files: dict[int, int] = {}
"""Where the bytes that `from_file` mapped begin, and where they end."""


def trim() -> None:
    """Give the memory that is free back to the system: malloc and MKL keep it for what may come."""
    if sys.platform != "linux":
        return
    # torch may come without MKL, and other C libraries than glibc have no such function.
    with contextlib.suppress(OSError, AttributeError):
        _torch().mkl_serv_free_buffers()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def apart(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A copy, in `dtype` if it is given, whose pages the system has again as soon as it is gone.

    >>> apart(torch.ones(64, 64, 3, 3), torch.float64).dtype
    torch.float64

    What malloc gave leaves a gap among what stays, and later calls of a model spread over all such
    gaps. The strides are those of `torch.empty_like`.
    """
    dtype = dtype or tensor.dtype
    if sys.platform != "linux" or not _is_plain(tensor) or tensor.nbytes < _APART:
        return tensor.to(dtype, copy=True)
    pages = mmap.mmap(-1, tensor.numel() * dtype.itemsize, access=mmap.ACCESS_COPY)
    flat = torch.frombuffer(pages, dtype=dtype)
    copy = flat.as_strided(tensor.shape, _dense_strides(tensor))
    if copy.stride() != tensor.stride():
        return copy.copy_(tensor)
    for to, of in zip(flat.split(_STEP), _flat(tensor).split(_STEP), strict=True):
        to.copy_(of)
        unread([of])
    return copy


@cache
def _torch() -> ctypes.CDLL:
    """Torch's own library, which has MKL inside."""
    path = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    return ctypes.CDLL(str(path), mode=os.RTLD_NOLOAD)


def in_memory(tensor: Tensor) -> Tensor:
    """`tensor`, or a copy of one that lies in a file; what was read of the file goes back.

    >>> weight = torch.ones(2048)
    >>> in_memory(weight) is weight
    True
    """
    if not _in_file(tensor):
        return tensor
    copy = apart(tensor)
    unread([tensor])
    return copy


def unread(tensors: Iterable[Tensor]) -> None:
    """Let the system have the memory again that reading `tensors` took, if they lie in a file."""
    if sys.platform != "linux":
        return
    page = mmap.PAGESIZE
    ranges: list[list[int]] = []
    for begin, size in sorted((t.data_ptr(), t.nbytes) for t in tensors if _in_file(t)):
        # The system gives back several pages at once: it must be asked for neighbours together.
        if not ranges or begin > ranges[-1][1] + page:
            ranges.append([-(-begin // page) * page, 0])
        ranges[-1][1] = begin + size
    for begin, end in ranges:
        if begin < end:
            # What was written stays: unlike MADV_DONTNEED, this never changes a value.
            ctypes.CDLL(None).madvise(
                ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _PAGEOUT
            )


def part_in_memory(tensor: Tensor, begin: int, size: int) -> None:
    """Let some bytes of a tensor that lies in a file be read without the many pages around them.

    A page that is read from a file brings its neighbours along; one that is written to is copied
    alone. So it is treated as if it were written to.
    """
    if sys.platform == "linux" and _in_file(tensor):
        page = begin // mmap.PAGESIZE * mmap.PAGESIZE
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(page), ctypes.c_size_t(begin + size - page), _POPULATE_WRITE
        )


def _in_file(tensor: Tensor) -> bool:
    return _is_plain(tensor) and any(
        begin <= tensor.data_ptr() < end for begin, end in list(_files.items())
    )


def shelve(tensors: Iterable[Tensor], folder: Path | None = None) -> list[Tensor]:
    """Let `tensors` lie in a file, those that share their memory with no other; return these.

    >>> weight = torch.ones(2048, 2048)
    >>> other = weight[0]
    >>> shelve([weight])
    []

    They stay what they are, tensors that can be written to, with the same strides.
    """
    chosen = [tensor for tensor in {id(t): t for t in tensors}.values() if _movable(tensor)]
    size = sum(_padded(tensor) for tensor in chosen)
    mapped = from_file((part for tensor in chosen for part in _bytes_of(tensor)), size, folder)
    if mapped is None:
        return []
    place = 0
    for tensor in chosen:
        flat = torch.frombuffer(mapped, dtype=tensor.dtype, count=tensor.numel(), offset=place)
        place += _padded(tensor)
        tensor.data = flat.as_strided(tensor.shape, tensor.stride())
    trim()
    return chosen


def bring_back(tensors: Iterable[Tensor], packed: Iterable[Tensor] = ()) -> None:
    """Bring into memory which of `tensors` lie in a file: every call reads them where they are.

    >>> weight = torch.ones(2048, 2048)
    >>> _ = shelve([weight])
    >>> bring_back([weight])
    >>> in_memory(weight) is weight
    True

    Those that kernels have `packed` stay in the file, and what was read of it goes back.
    """
    tensors, kept = list(tensors), {id(tensor) for tensor in packed}
    for tensor in tensors:
        if id(tensor) not in kept:
            tensor.data = in_memory(tensor.data)
    unread(tensors)
    trim()


def from_file(
    parts: Iterable[bytes | memoryview], size: int, folder: Path | None = None
) -> mmap.mmap | None:
    """All `parts`, `size` bytes, mapped from a file; None where none can be had, or for so few.

    The file has no name, so nobody can change or cut it. What is written to the bytes is not
    written to the file.
    """
    folder = cache_dir() if folder is None else folder
    if size < _LEAST:
        return None
    try:
        if not make_own(folder) or _is_memory(folder):
            return None
        with tempfile.TemporaryFile(dir=folder) as file:
            file.writelines(parts)
            file.flush()
            mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    except (OSError, ValueError):
        return None
    begin = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
    _files[begin] = begin + size
    weakref.finalize(mapped, _files.pop, begin).atexit = False
    return mapped


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a dense tensor, as they lie in memory."""
    return _flat(tensor).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def _movable(tensor: Tensor) -> bool:
    if not _is_plain(tensor) or tensor.nbytes < _SMALL or tensor.is_shared():
        return False
    whole = tensor.untyped_storage().nbytes() == tensor.nbytes
    return whole and _dense_strides(tensor) == tensor.stride() and _held_once(tensor)


def _is_plain(tensor: Tensor) -> bool:
    """Whether its numbers lie in memory, by its strides."""
    known = type(tensor) in (Tensor, nn.Parameter) and tensor.is_floating_point()
    return known and tensor.device.type == "cpu" and tensor.layout is torch.strided


def _dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Those that `empty_like` gives: the same, if it is dense in memory."""
    return torch.empty_like(tensor, device="meta").stride()


def _held_once(tensor: Tensor) -> bool:
    """Whether nothing else keeps the memory, as a kernel does that reads weights in place."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    storage = tensor.untyped_storage()
    # One is the tensor's, one is ours.
    return count is not None and count(storage._cdata) == 2


def _bytes_of(tensor: Tensor) -> Iterator[bytes | memoryview]:
    """Those of the tensor as they lie in memory, and as many more as fill the page."""
    yield raw(tensor)
    yield bytes(_padded(tensor) - tensor.nbytes)


def _padded(tensor: Tensor) -> int:
    return -(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _is_memory(folder: Path) -> bool:
    """Whether files in `folder` are themselves in memory, so that nothing would be gained."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    kinds = [line.split(" - ")[1].split()[0] for line in mounts if line.split()[2] == number]
    return bool(kinds) and kinds[-1] in ("tmpfs", "ramfs")
