"""What other programs take of the processor while something is timed.

Linux counts for each core what all programs had of it, and for each program what it had. What this
process and those it started did not have, others did: programs, or the host of a virtual machine.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")

_NOTICED = 0.25
"""Less of a core than this is what any machine does beside its work."""

_SHORTEST_S = 0.2
"""Linux counts in hundredths of a second: of shorter work it says too little."""


@dataclass(frozen=True)
class Others:
    """How many of `cores` other programs had, in the mean.

    >>> Others(taken=1.5, cores=2).in_the_way_of(2), Others(taken=1.5, cores=8).in_the_way_of(2)
    (True, False)
    """

    taken: float
    cores: int

    def in_the_way_of(self, threads: int) -> bool:
        """Whether they left less than a core to each of `threads`."""
        return self.cores - self.taken < threads - _NOTICED

    def __str__(self) -> str:
        return f"other programs had {self.taken:.1f} of {self.cores} cores"


def watch_others() -> Callable[[], Others | None]:
    """Begin to watch; what is returned tells what others had since then, where that is known.

    >>> others_since = watch_others()
    >>> others_since() is None  # too short a time
    True
    """
    began, before = time.monotonic(), _others_s()

    def others_since() -> Others | None:
        passed, now = time.monotonic() - began, _others_s()
        if before is None or now is None or passed < _SHORTEST_S:
            return None
        cores = len(os.sched_getaffinity(0))
        return Others(min(max(0.0, (now - before) / passed), cores), cores)

    return others_since


def _others_s() -> float | None:
    """The seconds for which others ever had this process's cores; None where nobody counts."""
    try:
        return (_all_ticks() - _own_ticks()) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None


def _all_ticks() -> int:
    """What all programs had of the cores that this process may use, and what the host withheld."""
    cores, ticks = {f"cpu{core}" for core in os.sched_getaffinity(0)}, 0
    for line in (_PROC / "stat").read_text().splitlines():
        name, *counts = line.split()
        if name in cores:
            user, nice, system, _idle, _waiting, irq, softirq, stolen = map(int, counts[:8])
            ticks += user + nice + system + irq + softirq + stolen
    return ticks


def _own_ticks() -> int:
    """What this process had, and those that descend from it, also those that have ended."""
    had = dict(_processes())
    own, ticks = {os.getpid()}, 0
    while own:
        ticks += sum(had[pid][1] for pid in own if pid in had)
        own = {pid for pid, (parent, _) in had.items() if parent in own}
    return ticks


def _processes() -> Iterator[tuple[int, tuple[int, int]]]:
    """Each process, with its parent and the ticks that it, and its children that ended, had."""
    for folder in _PROC.iterdir():
        if not folder.name.isdigit():
            continue
        try:
            # The name, in brackets, may hold anything.
            _, _, rest = (folder / "stat").read_text(errors="replace").rpartition(")")
        except OSError:
            continue  # It has ended.
        fields = rest.split()
        yield int(folder.name), (int(fields[1]), sum(map(int, fields[11:15])))
