"""Run torch on one thread while other programs have the cores.

Torch's threads wait for one another at the end of every operation. Where another program has the
core of one, that is until the system gives it back, which may take a hundred times as long as the
operation itself. One thread waits for nobody.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

_NUMBERS = 1 << 18
"""So many each thread adds in a fraction of a millisecond; of a few, torch gives some threads none.
"""

_BURST_S = 0.02
"""Whoever begins to compute is given a core at once, and has to share it only some time later."""

_SHARE = 0.8
"""Threads that get less of their cores than this have neighbours."""


@contextmanager
def one_thread_if_crowded() -> Iterator[None]:
    """For what is not timed: all of torch's threads, or one where they would wait.

    >>> with one_thread_if_crowded():
    ...     torch.ones(2).sum()
    tensor(2.)
    """
    with _one_thread() if crowded() else nullcontext():
        yield


def crowded() -> bool:
    """Whether torch's threads get less than a core each just now."""
    threads = torch.get_num_threads()
    if threads == 1:
        return False
    numbers = torch.ones(threads * _NUMBERS, device="cpu")
    began, had = time.perf_counter(), time.process_time()
    while (passed := time.perf_counter() - began) < _BURST_S:
        numbers.sum()
    return time.process_time() - had < _SHARE * threads * passed


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
