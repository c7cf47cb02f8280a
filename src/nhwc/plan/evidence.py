"""What is known of rivals: their times, taken in turns, in one sitting or in several.

In a sitting each rival is called a few times, in turns. What disturbs a call only makes it longer,
so the least time of all sittings is the estimate. Each sitting says besides how far apart two
rivals were at one moment, and only that is held against other moments:

    sitting        1         2        3
    direct       4.0 ms    4.1 ms   4.0 ms     4.0 ms, leads after the first sitting
    onednn       7.5 ms    2.5 ms   2.4 ms     2.4 ms: the first sitting was disturbed
    torch       19.0 ms      -        -        too far behind to be called again

A rival is decided when two calm sittings, and two of three, agree that it is behind, or when three
cannot tell it from the leader. Until then the evidence is open, and each later `optimize` holds
another sitting, of the rivals that are still in question. Rivals that cannot be told apart are no
matter of luck either: `evened` gives them one time, and the first in a fixed order is taken.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..machine.timing import SAME
from .implementation import Timed, Timings
from .ledger import is_time

_NEAR = 4.0
"""A rival that one sitting found this many times as slow as the best was not merely disturbed."""

_CALM = 1.25
"""A rival was disturbed if the median of its turns is this many times the least of them."""

_ENOUGH = 3
"""In as many calm sittings two rivals are told apart, or they are the same."""

_MOST = 6
"""After as many sittings what is still open stays as it is: this machine is never calm."""


@dataclass(frozen=True)
class RivalTime:
    """The times that one rival took in one sitting."""

    least_s: float
    median_s: float
    turns: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> RivalTime:
        return cls(min(seconds), statistics.median(seconds), len(seconds))

    @property
    def calm(self) -> bool:
        return self.median_s <= _CALM * self.least_s

    def less(self, seconds: float) -> RivalTime:
        """The same calls without `seconds` that others share in, or with hardly any time left."""
        least, median = (max(one - seconds, 0.05 * one) for one in (self.least_s, self.median_s))
        return RivalTime(least, median, self.turns)


Sitting = Mapping[str, RivalTime]
"""The rivals that were called in turns, by their names."""


@dataclass(frozen=True)
class Evidence:
    """The sittings that were held over some rivals; the first one was over all of them.

    >>> first = {"a": RivalTime(1.0, 1.1, 5), "b": RivalTime(1.5, 1.6, 5)}
    >>> Evidence().with_sitting(first).settled, Evidence().with_sitting(first).open
    (False, ('a', 'b'))
    >>> Evidence((first, first)).settled, Evidence((first, first)).leader
    (True, 'a')
    """

    sittings: tuple[Sitting, ...] = ()

    @property
    def rivals(self) -> tuple[str, ...]:
        return tuple(self.sittings[0])

    @property
    def seconds(self) -> dict[str, float]:
        """The least time of every rival."""
        return {name: min(one.least_s for one in self._of(name)) for name in self.rivals}

    @property
    def turns(self) -> dict[str, int]:
        return {name: sum(one.turns for one in self._of(name)) for name in self.rivals}

    @property
    def spread(self) -> dict[str, float]:
        """By what share the median of its turns lay above the least, in each one's best sitting."""
        best = {name: min(self._of(name), key=lambda one: one.least_s) for name in self.rivals}
        return {n: one.median_s / one.least_s - 1 if one.least_s else 0 for n, one in best.items()}

    @property
    def leader(self) -> str:
        return min(self.rivals, key=self.seconds.__getitem__)

    @property
    def open(self) -> tuple[str, ...]:
        """The rivals that one more sitting is to compare; none if all are decided."""
        if len(self.sittings) >= _MOST:
            return ()
        leader, seconds = self.leader, self.seconds
        undecided = {name for name in self.rivals if not self._decided(name, leader, seconds)}
        return tuple(n for n in self.rivals if n in undecided or n == leader) if undecided else ()

    @property
    def settled(self) -> bool:
        return not self.open

    @property
    def even(self) -> tuple[str, ...]:
        """The rivals that cannot be told from the leader, and the leader itself."""
        seconds = self.seconds
        limit = (1 + SAME) * seconds[self.leader]
        return tuple(name for name in self.rivals if seconds[name] <= limit)

    @property
    def sureness(self) -> str:
        """`settled`; `even` if rivals were found to be the same; `open` if more is to be asked."""
        if not self.settled:
            return "open"
        return "even" if len(self.even) > 1 else "settled"

    @property
    def alone_is_sure(self) -> bool:
        """Whether the time of what has no rival is known: by two calm sittings, or by all."""
        calm = sum(one.calm for one in self._of(self.leader))
        return calm >= 2 or len(self.sittings) >= _MOST

    @property
    def calm(self) -> bool:
        """Whether nobody was disturbed in the latest sitting."""
        return all(one.calm for one in self.sittings[-1].values())

    def with_sitting(self, sitting: Sitting) -> Evidence:
        return replace(self, sittings=(*self.sittings, sitting))

    def to_entry(self) -> dict[str, Any]:
        """Plain values for the ledger: for each rival, what it took in each sitting."""
        return {
            name: [
                [one.least_s, one.median_s, one.turns] if one else None
                for one in (sitting.get(name) for sitting in self.sittings)
            ]
            for name in self.rivals
        }

    def _of(self, name: str) -> list[RivalTime]:
        return [sitting[name] for sitting in self.sittings if name in sitting]

    def _decided(self, name: str, leader: str, seconds: Mapping[str, float]) -> bool:
        if name == leader or not seconds[leader]:
            return True
        pairs = [(s[name], s[leader]) for s in self.sittings if name in s and leader in s]
        calm = [a.least_s / b.least_s for a, b in pairs if a.calm and b.calm and b.least_s]
        if any(ratio > _NEAR for ratio in calm):
            return True
        if seconds[name] <= (1 + SAME) * seconds[leader]:
            return len(calm) >= _ENOUGH
        behind = sum(ratio > 1 + SAME for ratio in calm)
        return behind >= 2 and _ENOUGH * behind >= 2 * len(calm)


def evidence_of(entry: Any) -> Evidence | None:
    """The evidence that an entry of the ledger has; None if it has none, or is anything else."""
    if not isinstance(entry, dict) or not entry:
        return None
    rows = list(entry.values())
    if not all(isinstance(row, list) for row in rows):
        return None
    count = len(rows[0])
    if not 0 < count <= _MOST or any(len(row) != count or row[0] is None for row in rows):
        return None
    try:
        taken = [[None if one is None else _taken(*one) for one in row] for row in rows]
    except (TypeError, ValueError):
        return None
    columns = zip(*taken, strict=True)
    sittings = ({n: one for n, one in zip(entry, column, strict=True) if one} for column in columns)
    return Evidence(tuple(sittings))


def _taken(least: Any, median: Any, turns: Any) -> RivalTime:
    if not (is_time(least) and is_time(median) and type(turns) is int and turns >= 0):
        raise ValueError("no times")
    return RivalTime(least, median, turns)


def evened(timings: Timings) -> Timings:
    """`timings` in a fixed order, in which those that cannot be told apart take the same time.

    So measuring anew makes the same choice: that of the first of them. Kernels of ours come first,
    which can share a program, and among these exact ones, and ones that hold less memory.
    """
    return {node: _evened(timed) for node, timed in timings.items()}


def _evened(timed: tuple[Timed, ...]) -> tuple[Timed, ...]:
    ordered = sorted(timed, key=_rank)
    alike: dict[object, list[float]] = {}
    for one in ordered:
        alike.setdefault(_likeness(one), []).append(one.seconds)
    every = min((one.seconds for one in ordered), default=0.0)

    def told(one: Timed) -> float:
        """Its time, or that of the best which it cannot be told from."""
        # Of those that are to their neighbours what it is, since the choice may be among them.
        best = min(alike[_likeness(one)])
        same = best if one.seconds <= (1 + SAME) * best else one.seconds
        return every if same <= (1 + SAME) * every else same

    return tuple(replace(one, seconds=told(one)) for one in ordered)


def _likeness(timed: Timed) -> tuple[object, ...]:
    one = timed.implementation
    return one.reads, one.writes, one.ours


def _rank(timed: Timed) -> tuple[bool, bool, float, str, str]:
    one = timed.implementation
    return not one.ours, not one.exact, one.copies, one.name, str(one.reads)
