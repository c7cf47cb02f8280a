"""The paired runner: one case, its variants in turns, one at work while the others sleep."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..machine.others import watch_others
from ..machine.workers import Ended, Nursery, Worker
from .engines import find_engine
from .results import Case, Measurement, Published, Row

REST_S = 0.02
"""The pause between two bursts: an engine's idle threads spin for a while after its last call."""

BURST_S = 0.1
MOST_CALLS = 20
FEWEST, MOST = 9, 25
"""Limits on the turns of each variant: fewer prove nothing, more add nothing."""

PATIENCE_S = 900.0
"""A worker that is silent for this long is ended: one that hangs must not stop a suite."""

WORKER = "nhwc._bench.worker"

CONVERSION_S = 600.0
"""The time limit of a converter: some need minutes for a large model, some never end."""


@dataclass(frozen=True)
class Task:
    """A case, the variants to compare on it, and what somebody published about it."""

    case: Case
    variants: tuple[str, ...]
    published: Published | None = None
    expected_s: float = 1.0
    """What it is thought to take; beside those of other tasks, its share of the whole."""


def calls_in_a_turn(call_s: float) -> int:
    """How many calls make a turn: a tenth of a second's worth, `MOST_CALLS` at most.

    >>> calls_in_a_turn(0.01), calls_in_a_turn(3.0)
    (10, 1)
    """
    return max(1, min(MOST_CALLS, round(BURST_S / call_s)))


@dataclass
class _Side:
    """One variant while it is being measured."""

    variant: str
    worker: Worker | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    turns: list[list[float]] = field(default_factory=list)
    failure: str = ""

    def send(self, request: dict[str, Any]) -> None:
        if self.worker and not self.failure:
            self.worker.send(request)

    def receive(self, patience_s: float | None = None) -> dict[str, Any]:
        """Return the worker's answer; on failure, note the reason and return an empty one."""
        if self.worker is None or self.failure:
            return {}
        try:
            answer: dict[str, Any] = self.worker.hear(patience_s or PATIENCE_S)
        except Ended as error:
            answer = {"failure": str(error)}
        self.failure = answer.get("failure", "")
        return {} if self.failure else answer

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        self.send(request)
        return self.receive()

    @property
    def calls(self) -> int:
        return calls_in_a_turn(float(self.facts["seconds"]))

    @property
    def turn_s(self) -> float:
        calls = self.calls + self.facts["warm_calls"]
        return float(calls * self.facts["seconds"]) + REST_S

    def measurement(self, rounds: int) -> Measurement:
        if not self.failure and rounds == 0:
            self.failure = "interrupted before it was measured"
        if self.failure:
            return Measurement(self.variant, failure=self.failure)
        return Measurement(
            self.variant,
            turns=tuple(tuple(turn) for turn in self.turns[:rounds]),
            setup_s=self.facts["setup_s"],
            peak_bytes=self.facts.get("peak_bytes"),
            error=self.facts["error"],
            version=self.facts["version"],
            folded=self.facts.get("folded"),
            left=self.facts.get("left"),
        )


def measure(
    task: Task,
    nursery: Nursery,
    *,
    seconds: float,
    sent: bytes = b"",
    progress: Callable[[str, float], None] | None = None,
) -> tuple[Row, bool]:
    """Measure one case for about `seconds`, each variant in a worker of the `nursery`.

    Also return whether Ctrl-C cut it short.
    """
    tell = progress or (lambda doing, share: None)
    sides = [_Side(variant) for variant in task.variants]
    row = Row(task.case, published=task.published)
    interrupted = False
    with contextlib.ExitStack() as stack:
        try:
            row = _set_up(row, sides, nursery, stack, sent, tell)
            if not row.failure:
                others_since = watch_others()
                _take_turns(sides, seconds, tell)
                row = dataclasses.replace(row, others=others_since())
            for side in sides:
                side.facts.update(side.ask({"do": "finish"}))
        except Ended as error:
            row = dataclasses.replace(row, failure=str(error))
        except KeyboardInterrupt:
            interrupted = True
    # Drop a round that was cut short: its samples lack their partners.
    running = [len(side.turns) for side in sides if not side.failure]
    rounds = min(running, default=0)
    if not row.failure:
        measured = tuple(side.measurement(rounds) for side in sides)
        row = dataclasses.replace(row, measurements=measured)
    return row, interrupted


def _set_up(
    row: Row,
    sides: Sequence[_Side],
    nursery: Nursery,
    stack: contextlib.ExitStack,
    sent: bytes,
    tell: Callable[[str, float], None],
) -> Row:
    """Start a process per variant and make each ready, one after the other."""
    case = row.case
    tell("starting", 0.0)
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nhwc-bench-")))
    truth = str(folder / "truth.npz")
    order = {"do": "build", "case": case, "sent": sent}
    for side in sides:
        side.failure = find_engine(side.variant).obstacle(
            train=case.train, amp=case.amp, device=case.device
        )
    able = [side for side in sides if not side.failure]
    with nursery.worker() as process:
        judge = _Side("", process)
        # All processes import and build at the same time, because nothing is timed yet.
        for side in able:
            side.worker = stack.enter_context(nursery.worker())
        for side in (judge, *able):
            side.send(order)
        judge.receive()
        judge.send({"do": "truth", "truth": truth})
        for side in able:
            side.receive()
        found = judge.receive()
    if judge.failure:
        return dataclasses.replace(row, failure=judge.failure)
    for position, side in enumerate(able):
        tell(f"setting up {side.variant}", 0.1 + 0.4 * position / len(able))
        with tempfile.TemporaryDirectory(dir=folder) as files:
            request = {"variant": side.variant, "truth": truth, "folder": files}
            took_s = _convert(side, nursery, order, request)
            side.facts = side.ask({"do": "prepare", **request})
        if side.failure and side.worker is not None:
            # A failed engine would only hold memory that the others may need.
            side.worker.end()
        else:
            side.facts["setup_s"] += took_s
    return dataclasses.replace(row, propagation=found["propagation"], floor=found["floor"])


def _convert(
    side: _Side, nursery: Nursery, order: dict[str, Any], request: dict[str, Any]
) -> float:
    """Convert the model for an engine that reads files; return the seconds that it took.

    The converter has a process of its own, so that its memory is free before anything is timed.
    """
    if side.failure or find_engine(side.variant).convert is None:
        return 0.0
    with nursery.worker() as process:
        converter = _Side(side.variant, process)
        converter.ask(order)
        converter.send({"do": "convert", **request})
        facts = converter.receive(CONVERSION_S)
    if converter.failure:
        side.failure = f"conversion failed: {converter.failure}"
    return float(facts.get("setup_s", 0.0))


def _take_turns(sides: Sequence[_Side], seconds: float, tell: Callable[[str, float], None]) -> None:
    able = [side for side in sides if not side.failure]
    if not able:
        return
    fitting = math.floor(seconds / sum(side.turn_s for side in able))
    rounds = max(FEWEST, min(MOST, fitting))
    for turn in range(rounds):
        # Each round starts with another variant: a fixed order favours one after a light one.
        shift = turn % len(able)
        for side in [*able[shift:], *able[:shift]]:
            tell(f"{side.variant}, turn {turn + 1} of {rounds}", 0.5 + 0.5 * turn / rounds)
            time.sleep(REST_S)
            answer = side.ask({"do": "burst", "calls": side.calls})
            if answer:
                side.turns.append(answer["seconds"])
