"""One pool of threads: torch's own.

A second pool would spin for work while torch's works, each taking the other's cores. torch computes
on an OpenMP library that came with it, and that library runs compiled functions of others, too:

    Python --> GOMP_parallel(entry, block, threads)       with the GIL released
                 entry, once on each thread: asks the library for its number and the count,
                                             then calls function(args, number, count, number)

`find_openmp` looks among the libraries that the process has loaded, torch's first, and never loads
another: its threads would be a second pool. Where none is found (macOS, Windows), and in a forked
child, whose copy of the pool has no threads behind it, plain Python threads do the same, somewhat
slower.

Steps go by the count of threads that OpenMP gave, not by the one it was asked for. No thread waits
for one that has not begun (see walk.py), so Python's threads may serve several calls at once.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..language.compiler import Args, Kernel
from ..language.values import WORD, Value
from ..language.vectors import Emitter

_NAMES = ("gomp", "iomp", "libomp")


@dataclass(frozen=True)
class OpenMP:
    """Functions of the library, as addresses; `parallel` is its GOMP_parallel, to be called."""

    path: str
    parallel: Any
    thread_number: int
    thread_count: int


def region(function: int, args: int, threads: int) -> Callable[[], None]:
    """Make a function that calls the compiled `function` on each thread.

    It gets `args`, the thread's number, the number of threads, and its own number once more, as the
    worker's. The made function returns when all are done. The GIL is free meanwhile; several
    callers may be in it at once.
    """
    call, openmp = _call(function), find_openmp()
    if threads == 1:
        return lambda: call(args, 0, 1, 0)
    if openmp is None:
        return lambda: _run_in_python(function, args, threads)
    block = (ctypes.c_int64 * 4)(function, args, openmp.thread_number, openmp.thread_count)
    parallel, entry = openmp.parallel, _entry()

    def run() -> None:
        if _is_fork():
            _run_in_python(function, args, threads)
        else:
            parallel(entry, block, threads, 0)

    return run


def first(function: int, args: int, threads: int) -> Callable[[], None]:
    """Make a function that makes the first thread's call of a region, and no other."""
    call = _call(function)
    return lambda: call(args, 0, threads, 0)


@cache
def find_openmp() -> OpenMP | None:
    """The OpenMP library that torch has loaded, or None; never loads another."""
    for path in sorted(_mapped_libraries(), key=lambda path: ("torch" not in path, path)):
        try:
            library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
            parallel = library.GOMP_parallel
            number, count = library.omp_get_thread_num, library.omp_get_num_threads
        except (OSError, AttributeError):
            continue
        parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        parallel.restype = None
        return OpenMP(path, parallel, _address(number), _address(count))
    return None


def _mapped_libraries() -> set[str]:
    import torch  # noqa: F401  (its library must be there to be found)

    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return set()
    paths = (line.split(maxsplit=5)[5] for line in lines if "/" in line)
    return {path for path in paths if any(name in Path(path).name for name in _NAMES)}


def _address(function: Any) -> int:
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)


def _emit_entry(e: Emitter, a: Args, part: Value, parts: Value) -> None:
    """OpenMP passes the block alone: ask the library who we are, then call as always."""
    del part, parts
    number = e.call(a.thread_number, WORD, ())
    count = e.call(a.thread_count, WORD, ())
    thread = e.widen(number)
    e.call(a.function, None, (a.args, thread, e.widen(count), thread))


ENTRY = Kernel("entry", ("function", "args", "thread_number", "thread_count"), _emit_entry)


@cache
def _entry() -> int:
    return ENTRY.address


@cache
def _call(function: int) -> Any:
    kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, *[ctypes.c_int64] * 3)
    return kind(function)


@cache
def _is_fork() -> bool:
    """Whether this process was forked; the cached False is forgotten in a forked child."""
    return os.getpid() != _PARENT


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads - 1, thread_name_prefix="nhwc")


def _run_in_python(function: int, args: int, threads: int) -> None:
    pool = _pool(threads)
    others = [pool.submit(_call(function), args, i, threads, i) for i in range(1, threads)]
    _call(function)(args, 0, threads, 0)
    for other in others:
        if not other.cancel():
            other.result()


def _after_fork() -> None:
    _is_fork.cache_clear()
    _pool.cache_clear()


_PARENT = os.getpid()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
