"""Save memory: return what malloc keeps, and move weights that are rarely read into a file.

A planned model has its weights twice: packed for its kernels, and as they were, for calls of other
shapes and for code that looks at them. The second copy moves into a file without a name, which
nobody else can open, and is mapped from there: it takes memory only when it is read, and writes to
it stay in this process. Without a disk to write to, the weights stay in memory.
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
"""Fewer bytes are not worth a file."""

_PAGEOUT = 21
"""madvise's MADV_PAGEOUT, which Python has no name for."""

_POPULATE_WRITE = 23
"""madvise's MADV_POPULATE_WRITE, since Linux 5.14."""

_SMALL = 1 << 14
"""Tensors of fewer bytes stay in memory: each takes whole pages of the file, to save little."""

_APART = 1 << 17
"""Tensors of fewer bytes are left to malloc: whole pages of their own would be too much."""

_STEP = 1 << 21
"""Numbers copied at a time, so that pages read from a file go back before more are read."""

_files: dict[int, int] = {}
"""Addresses of the bytes that `from_file` mapped: for the begin of each mapping, its end."""


def trim() -> None:
    """Return free memory to the system; malloc and MKL would keep it for later requests."""
    if sys.platform != "linux":
        return
    # torch may lack MKL, and C libraries other than glibc lack malloc_trim.
    with contextlib.suppress(OSError, AttributeError):
        _torch().mkl_serv_free_buffers()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def apart(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Copy a tensor, to `dtype` if given, into pages that the system gets back once it is freed.

    >>> apart(torch.ones(64, 64, 3, 3), torch.float64).dtype
    torch.float64

    A freed block of malloc's leaves a gap among blocks that stay, and later calls of a model would
    spread over all such gaps. The strides are those of `torch.empty_like`.
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
    """Return `tensor`, or if it lies in a file a copy, and give back the pages read for that.

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
    """Return the memory that reading `tensors` took to the system, if they lie in a file."""
    if sys.platform != "linux":
        return
    page = mmap.PAGESIZE
    ranges: list[list[int]] = []
    for begin, size in sorted((t.data_ptr(), t.nbytes) for t in tensors if _in_file(t)):
        # The system pages out several pages at a time, so neighbours must be named together.
        if not ranges or begin > ranges[-1][1] + page:
            ranges.append([-(-begin // page) * page, 0])
        ranges[-1][1] = begin + size
    for begin, end in ranges:
        if begin < end:
            # Pages that were written keep their values, which MADV_DONTNEED would drop.
            ctypes.CDLL(None).madvise(
                ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _PAGEOUT
            )


def part_in_memory(tensor: Tensor, begin: int, size: int) -> None:
    """Load some bytes of a tensor that lies in a file, without the many pages around them.

    Reading a page from a file brings its neighbours along; writing copies that page alone. So the
    pages are loaded as if they were written to.
    """
    if sys.platform == "linux" and _in_file(tensor):
        page = begin // mmap.PAGESIZE * mmap.PAGESIZE
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(page), ctypes.c_size_t(begin + size - page), _POPULATE_WRITE
        )


def _in_file(tensor: Tensor) -> bool:
    # A copy: other threads map files meanwhile, and the garbage collector ends mappings.
    files = _files.copy().items()
    return _is_plain(tensor) and any(begin <= tensor.data_ptr() < end for begin, end in files)


def shelve(tensors: Iterable[Tensor], folder: Path | None = None) -> list[Tensor]:
    """Move those `tensors` into a file that share their memory with no other; return these.

    >>> weight = torch.ones(2048, 2048)
    >>> other = weight[0]
    >>> shelve([weight])
    []

    They remain tensors that can be written to, with the same strides.
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
    """Map all `parts`, `size` bytes, from a file; None if there can be none or `size` is small.

    The file has no name, so nobody can change or cut it. Writes to the mapped bytes do not reach
    the file.
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
    """Whether this is an ordinary tensor of floats in the CPU's memory, addressed by strides."""
    known = type(tensor) in (Tensor, nn.Parameter) and tensor.is_floating_point()
    return known and tensor.device.type == "cpu" and tensor.layout is torch.strided


def _dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """The strides that `empty_like` gives: the tensor's own, if it is dense in memory."""
    return torch.empty_like(tensor, device="meta").stride()


def _held_once(tensor: Tensor) -> bool:
    """Whether nothing else holds the memory, such as a kernel that reads weights in place."""
    count = getattr(torch._C, "_storage_Use_Count", None)
    storage = tensor.untyped_storage()
    # One reference is the tensor's, the other is `storage`.
    return count is not None and count(storage._cdata) == 2


def _bytes_of(tensor: Tensor) -> Iterator[bytes | memoryview]:
    """Yield the bytes of the tensor as they lie in memory, then zeros to the end of the page."""
    yield raw(tensor)
    yield bytes(_padded(tensor) - tensor.nbytes)


def _padded(tensor: Tensor) -> int:
    return -(-tensor.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _is_memory(folder: Path) -> bool:
    """Whether `folder` keeps its files in memory, so that moving tensors there saves nothing."""
    device = os.stat(folder).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return False
    kinds = [line.split(" - ")[1].split()[0] for line in mounts if line.split()[2] == number]
    return bool(kinds) and kinds[-1] in ("tmpfs", "ramfs")
