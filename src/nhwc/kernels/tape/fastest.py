"""The most multiply-adds a second that the threads reach together: nothing computes faster."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import torch

from ..language.compiler import Kernel
from ..language.isa import host
from . import threads

_SUMS = 12
"""Chains of sums in registers: enough to hide the latency of a multiply-add."""

_ROUNDS = 2_000_000
_TRIALS = 20


def _emit(e: Any, a: Any, thread: Any, threads: Any) -> None:
    sums = [e.variable(float(i)) for i in range(_SUMS)]
    factor = e.load(a.y.floats())
    with e.range(0, a.rounds):
        for one in sums:
            one.value = e.fma(one.value, factor, factor)
    for number, one in enumerate(sums):
        e.store(one.value, a.y.floats() + (thread * _SUMS + number) * e.width)


_KERNEL = Kernel("peak", ("y", "rounds"), _emit)


def peak_flops() -> float:
    """Measure the float32 operations a second on registers alone, of torch's present threads.

    >>> peak_flops() > 1e8
    True
    """
    count = torch.get_num_threads()
    room = torch.zeros(_SUMS * host().width * count)
    args = (ctypes.c_int64 * 2)(room.data_ptr(), _ROUNDS)
    enter = threads.region(_KERNEL.address, ctypes.addressof(args), count)
    best = float("inf")
    for _ in range(_TRIALS):
        start = time.perf_counter()
        enter()
        best = min(best, time.perf_counter() - start)
    return 2.0 * _ROUNDS * _SUMS * host().width * count / best
