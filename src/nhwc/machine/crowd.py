"""Run torch on one thread while other programs have the cores.

Torch's threads wait for one another at the end of every operation. Where another program has the
core of one, that is until the system gives it back, which may take a hundred times as long as the
operation itself. One thread waits for nobody.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from .timing import interleave

_PARTS, _OF = 64, 1 << 14
"""So few numbers are added by one thread, so many times as many by all."""

_WAITING = 2.0
"""Threads that take so many times as long as one alone would wait for one another."""


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
    """Whether torch's threads wait for one another just now."""
    if torch.get_num_threads() == 1:
        return False
    few, many = (torch.ones(count, device="cpu") for count in (_OF, _PARTS * _OF))
    taken = interleave({"one": few.sum, "all": many.sum}, rounds=5)
    one, every = (statistics.median(samples.seconds) for samples in taken.values())
    return every > _WAITING * _PARTS * one


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
