"""How long it takes until one core sees what another wrote.

Two cores that share a cache need some 50 ns, two that are far apart several hundred; a virtual
machine may be given either, and changed from one to the other. A program hands over at the end of
every phase, so thin models feel it.

    thread 0   writes 1     waits for 2, writes 3 ...
    thread 1        waits for 1, writes 2 ...
"""

from __future__ import annotations

import ctypes
import time

import torch

from ..language.compiler import Args, Kernel
from ..language.values import Value
from ..language.vectors import Emitter, Variable
from . import threads
from .walk import look

_TURNS = 2000
_TRIALS = 20

_PATIENCE = 10_000_000
"""Looks in all after which a thread gives up: the other one may have no core."""

_APART = 16
"""Numbers on both sides of the counter, so that nothing else lies on its cache lines."""


def _emit(e: Emitter, a: Args, thread: Value, parts: Value) -> None:
    counter, looks = a.counter.integers(), e.variable(0)
    with e.when((parts > 1) & (thread < 2)), e.range(0, a.turns) as turn:
        there = _await(e, counter, turn * 2 + thread, looks)
        with e.when(there):
            e.builder.atomic_rmw("add", counter.llvm, e.i64(1).llvm, "acq_rel")


def _await(e: Emitter, counter: Value, awaited: Value, looks: Variable) -> Value:
    """Look until the counter is there, and return whether it is; not once patience has ended."""
    check, through = (e.builder.append_basic_block(name) for name in ("check", "through"))
    e.builder.branch(check)
    e.builder.position_at_end(check)
    looks.value = looks.value + 1
    seen = look(e, counter)
    more = (seen < awaited) & (looks.value < _PATIENCE)
    e.builder.cbranch(more.llvm, check, through)
    e.builder.position_at_end(through)
    return seen >= awaited


_KERNEL = Kernel("handover", ("counter", "turns"), _emit)


def handover_seconds() -> float | None:
    """Measure the least time from one core to the other, of torch's present threads.

    None where only one computes, or the second has no core.

    >>> import torch
    >>> torch.set_num_threads(1)
    >>> handover_seconds() is None
    True
    """
    count = torch.get_num_threads()
    room = (ctypes.c_int64 * (2 * _APART + 1))()
    args = (ctypes.c_int64 * 2)(ctypes.addressof(room) + 8 * _APART, _TURNS)
    enter = threads.region(_KERNEL.address, ctypes.addressof(args), count)
    taken = []
    for _ in range(_TRIALS):
        room[_APART] = 0
        began = time.perf_counter()
        enter()
        seconds = time.perf_counter() - began
        if room[_APART] == 2 * _TURNS:
            taken.append(seconds)
    return min(taken) / (2 * _TURNS) if taken else None
