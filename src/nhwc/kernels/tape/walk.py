"""A tape: compiled steps, walked by all threads in one parallel region.

Entering a region costs microseconds, and so does every call from Python; a model of two hundred
operators cannot pay that for each. On a tape it is paid once: each thread calls the steps in order
and waits for a few hundred nanoseconds where the next step needs what others wrote.

    tape       conv || add   pool || linear         three phases
    part 0     ====>|| =>    ===> || ====>
    part 1     ===> || ==>   =>   || ===>

Steps of one phase are apart: none reads what another writes. A step is called once for each part,
with the part's number and how many there are, and takes its share of the work by itself
(`Emitter.share`). Each thread has a part of its own, or several where a phase is long. It claims
one, does the steps of the phase, and counts it as done, until none of its own is left; then it
waits until all parts of the phase are done.

Cores are not equally fast: one serves other programs, too, or shares its units with a neighbour, or
is a small one. So who has done its own parts of a long phase claims those of others that nobody has
begun, the last ones first:

    thread 0   claims 0: conv, 1: conv, 2: conv, 5: conv | ...
    thread 1   claims 3:  c o n v ,  4:  c o n v         | ...

On a busy machine a thread may not be there at all: it is asleep, or another program has its core. A
thread that has waited for a while therefore claims what nobody has begun of a short phase, too:

    thread 0   claims 0: conv | waits, claims 1: conv | claims 0: add, pool | ...
    thread 1                  (has no core)                     | 1 is taken | claims 1: add ...

The thread that comes late finds its parts claimed and passes on. So nobody waits for a thread that
has not begun, and one thread alone can walk to the end. While all are there, the claims of a part
are touched by its own thread alone, and cost nothing.

The region ends when all threads have come, be it for nothing. Where the others came too late for a
walk, the first thread therefore walks alone: once, then twice, up to `_MOST_ALONE` times before it
asks the others again.

All counters only grow during a walk, and are reset before it. The claim of a part is one more than
the last phase in which it was begun: who raises it to p + 1 does it in phase p. All parts are done
when the one count of what is done reaches their number, that of the phases before included. Doing a
part releases what was written, and each look acquires it (`acq_rel`, `acquire`), so that in a phase
a thread sees all that came before. Waiting threads spin, for steps are short. After `_SPINS` turns
they give up the core between looks: the thread they wait for may need it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache

from ..language.compiler import Args, Kernel
from ..language.values import INT, POINTER, WORD, Value
from ..language.vectors import Emitter
from . import threads

_FIELDS = ("phases", "entries", "ends", "parts", "done", "claims", "late", "patience", "give_way")

_PATIENCE = 1000
"""Turns for which a thread waits before it does the parts of others. Those who have the core need
less time between two phases, so that each keeps the part whose data its cache has."""

_SPINS = 4000
_MOST_ALONE = 64
_LATE = 0.9
"""The share of phases that were done without its thread, from which on it was no help."""

_LINE = 16
"""The int64 from one counter to the next: two cache lines, as processors fetch these in pairs."""

MOST_PARTS = _LINE
"""How many parts a thread may have in one phase: their claims lie on its two lines."""


def _emit_walk(e: Emitter, a: Args, thread: Value, threads: Value) -> None:
    do_part = e.function("do_part", [POINTER, *[INT] * 5], _emit_part)
    claim = a.claims.integers() + thread * _LINE
    late, awaited = e.variable(0), e.variable(0)
    with e.range(0, a.phases) as phase:
        each = e.read(a.parts.integers() + phase)
        awaited.value = awaited.value + each * threads

        def do(owner: Value, number: Value, phase: Value = phase, each: Value = each) -> None:
            do_part(a.words, phase, owner, number, each * threads, thread)

        with e.when(look(e, claim) > phase):
            late.value = late.value + 1
        with e.range(0, each) as number:
            do(thread, number)
        further = e.select(each > 1, threads, e.i64(1))
        with e.range(1, further) as distance, e.range(1, each + 1) as before:
            do((thread + distance) % threads, each - before)
        with (
            e.when(threads > 1),
            _waiting(e, a, awaited.value),
            e.range(0, threads) as owner,
            e.range(0, each) as number,
        ):
            do(owner, number)
    with e.when(late.value > 0):
        e.builder.atomic_rmw("add", a.late.integers().llvm, late.value.llvm, "monotonic")


def _emit_part(
    e: Emitter, words: Value, phase: Value, owner: Value, number: Value, parts: Value, worker: Value
) -> None:
    """Do the steps of a phase for one part of those that `owner` has, unless that was begun."""
    given = words.integers()
    named = {name: e.read(given + i).integers() for i, name in enumerate(_FIELDS)}
    entries, ends, done, claims = (named[name] for name in ("entries", "ends", "done", "claims"))
    claim = claims + (owner * _LINE + number)
    part = owner * e.read(named["parts"] + phase) + number
    # To look is cheaper than to write what others look at, too.
    seen = look(e, claim)
    with e.when(seen <= phase):
        tried = e.builder.cmpxchg(claim.llvm, seen.llvm, (phase + 1).llvm, "acq_rel", "acquire")
        with e.when(Value(e, e.builder.extract_value(tried, 1))):
            with e.range(e.read(ends + phase), e.read(ends + (phase + 1))) as i:
                function, args = (e.read(entries + (i * 2 + j)) for j in range(2))
                e.call(function, None, (args, part, parts, worker))
            e.builder.atomic_rmw("add", done.llvm, e.i64(1).llvm, "acq_rel")


@contextmanager
def _waiting(e: Emitter, a: Args, awaited: Value) -> Iterator[None]:
    """Wait until so many parts are done; the body comes between looks once patience has ended."""
    check = e.builder.append_basic_block("check")
    spin = e.builder.append_basic_block("spin")
    through = e.builder.append_basic_block("through")
    spins = e.variable(0)
    e.builder.branch(check)
    e.builder.position_at_end(check)
    missing = look(e, a.done.integers()) < awaited
    e.builder.cbranch(missing.llvm, spin, through)
    e.builder.position_at_end(spin)
    spins.value = spins.value + 1
    e.pause()
    with e.when(spins.value > a.patience):
        yield
    with e.when((spins.value > _SPINS) & (a.give_way != 0)):
        e.call(a.give_way, WORD, ())
    e.builder.branch(check)
    e.builder.position_at_end(through)


def look(e: Emitter, counter: Value) -> Value:
    """The counter's value now, and all that was written before it was counted so far."""
    return Value(e, e.builder.load_atomic(counter.llvm, "acquire", 8, typ=INT))


WALK = Kernel("walk", _FIELDS, _emit_walk)


def parts_each(pieces: int, threads: int) -> int:
    """How many parts each thread has where the work comes in so many pieces.

    >>> parts_each(14, 2), parts_each(40, 2), parts_each(1, 2), parts_each(14, 1)
    (7, 10, 1, 1)
    """
    if threads == 1:
        return 1
    together = -(-pieces // (threads * MOST_PARTS))
    return max(1, -(-pieces // (threads * max(together, 1))))


class Tape:
    """Phases of steps, each step (address of the kernel, address of its arguments).

    In each phase a thread has as many parts as `each` says, by default one. What the arguments
    point to, and the tape itself, serve one call of `run` at a time.
    """

    def __init__(
        self,
        phases: Sequence[Sequence[tuple[int, int]]],
        threads_wanted: int,
        each: Sequence[int] = (),
    ) -> None:
        words = [word for phase in phases for step in phase for word in step]
        ends = [sum(map(len, phases[:count])) for count in range(len(phases) + 1)]
        self._entries = (ctypes.c_int64 * len(words))(*words)
        self._ends = (ctypes.c_int64 * len(ends))(*ends)
        self._parts = (ctypes.c_int64 * len(phases))(*(each or [1] * len(phases)))
        self._counters = (ctypes.c_int64 * (_LINE * (threads_wanted + 2)))()
        arrays = (self._entries, self._ends, self._parts, self._counters)
        entries, ends_at, parts_at, start = map(ctypes.addressof, arrays)
        done = -(-start // (8 * _LINE)) * 8 * _LINE
        self._late = ctypes.c_int64.from_address(done + 8)
        given = {
            "phases": len(phases),
            "entries": entries,
            "ends": ends_at,
            "parts": parts_at,
            "done": done,
            "claims": done + 8 * _LINE,
            "late": done + 8,
            "patience": _PATIENCE,
            "give_way": _give_way(),
        }
        self._block = (ctypes.c_int64 * len(_FIELDS))(*(given[name] for name in _FIELDS))
        block = ctypes.addressof(self._block)
        self._together = threads.region(_walk(), block, threads_wanted)
        self._alone = threads.first(_walk(), block, threads_wanted)
        self._left_alone, self._next_alone = 0, 1
        self._too_late = _LATE * len(phases) * (threads_wanted - 1)

    def run(self) -> None:
        """Walk the tape once, with all threads, or alone if others came too late the last time."""
        ctypes.memset(self._counters, 0, ctypes.sizeof(self._counters))
        alone = self._left_alone > 0
        self._block[_FIELDS.index("patience")] = 0 if alone else _PATIENCE
        if alone:
            self._left_alone -= 1
            self._alone()
            return
        self._together()
        if 0 < self._too_late <= self._late.value:
            self._left_alone = self._next_alone
            self._next_alone = min(2 * self._next_alone, _MOST_ALONE)
        else:
            self._next_alone = 1


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
