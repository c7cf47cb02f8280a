"""A tape: compiled steps, walked by all threads in one parallel region.

Entering a region costs microseconds, and so does every call from Python; a model of two hundred
operators cannot pay that for each. On a tape it is paid once: each thread calls the steps in order
and waits at a barrier of a few hundred nanoseconds where the next step needs what others wrote.

    tape       conv | barrier | add   pool | barrier | linear
    thread 0   ====>| waits   | =>    ===> | waits   | ====>
    thread 1   =====|===>     | ==>   =>   |         | ===>

A step is called by all threads, with its number and how many there are, and takes its share of the
work by itself (`Emitter.share`). Between `add` and `pool` there is no barrier, since neither reads
what the other writes: a thread that is done with one goes on to the other.

The barrier is a counter that only grows: with n threads all are through the first when it reaches
n, through the second at 2 n. Nobody has to set it back while another may still be looking at it; it
is reset before a walk begins. Each arrival releases what the thread wrote, and each look acquires
what others did (`acq_rel`, `acquire`), so that behind a barrier a thread sees all that came before.
Waiting threads spin, for steps are short. After `_SPINS` turns they give up the core between looks:
the thread they wait for may need it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from functools import cache

from ..language.compiler import Args, Kernel
from ..language.values import INT, WORD, Value
from ..language.vectors import Emitter
from . import threads

ENTRY_WORDS = 3
"""int64 per entry: address of the kernel, address of its arguments, 1 for a barrier after it."""

_SPINS = 4000
_ARRIVED = 16
"""The word of the block that counts arrivals, alone on its cache line: all threads write there, and
would else take from one another the words that they read.
"""


def _emit_walk(e: Emitter, a: Args, thread: Value, count_of_threads: Value) -> None:
    awaited = e.variable(0)
    with e.range(0, a.count) as i:
        entry = a.entries.integers() + i * ENTRY_WORDS
        function, args, barrier = (e.read(entry + j) for j in range(ENTRY_WORDS))
        e.call(function, None, (args, thread, count_of_threads))
        with e.when((barrier != 0) & (i + 1 < a.count) & (count_of_threads > 1)):
            awaited.value = awaited.value + count_of_threads
            _emit_wait(e, a, awaited.value)


def _emit_wait(e: Emitter, a: Args, awaited: Value) -> None:
    """Count this thread in, then wait until all are: first spinning, then giving way."""
    arrived = a.arrived.integers()
    e.builder.atomic_rmw("add", arrived.llvm, e.i64(1).llvm, "acq_rel")
    check = e.builder.append_basic_block("check")
    spin = e.builder.append_basic_block("spin")
    through = e.builder.append_basic_block("through")
    spins = e.variable(0)
    e.builder.branch(check)
    e.builder.position_at_end(check)
    seen = Value(e, e.builder.load_atomic(arrived.llvm, "acquire", 8, typ=INT))
    e.builder.cbranch((seen < awaited).llvm, spin, through)
    e.builder.position_at_end(spin)
    spins.value = spins.value + 1
    e.pause()
    with e.when((spins.value > _SPINS) & (a.give_way != 0)):
        e.call(a.give_way, WORD, ())
    e.builder.branch(check)
    e.builder.position_at_end(through)


WALK = Kernel("walk", ("entries", "count", "arrived", "give_way"), _emit_walk)


class Tape:
    """Steps, each (address of the kernel, address of its arguments, barrier after it).

    What the arguments point to, and the tape itself, serve one call of `run` at a time.
    """

    def __init__(self, steps: Sequence[tuple[int, int, bool]], threads_wanted: int) -> None:
        words = [int(word) for step in steps for word in step]
        self._entries = (ctypes.c_int64 * len(words))(*words)
        self._block = (ctypes.c_int64 * (2 * _ARRIVED))()
        start, entries = ctypes.addressof(self._block), ctypes.addressof(self._entries)
        self._block[:4] = [entries, len(steps), start + 8 * _ARRIVED, _give_way()]
        self._enter = threads.region(_walk(), start, threads_wanted)

    def run(self) -> None:
        """Walk the tape once, with all threads."""
        self._block[_ARRIVED] = 0
        self._enter()


@cache
def _walk() -> int:
    return WALK.address


@cache
def _give_way() -> int:
    """The address of the system's call that lets another thread have the core; 0 if unknown."""
    if os.name != "posix":
        return 0
    try:
        yield_ = ctypes.CDLL(None).sched_yield
    except (OSError, AttributeError):
        return 0
    return int(ctypes.cast(yield_, ctypes.c_void_p).value or 0)
