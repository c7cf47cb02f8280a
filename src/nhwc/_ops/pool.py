"""Measure operators in processes that may die, and skip the steps that killed one."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import Any

from ..errors import NhwcError
from ..machine.workers import Ended, Nursery, Worker
from .cases import Observation, summarize
from .table import Operator, Speed, Tally
from .worker import LIST, ProbeTask

ATTEMPTS = 12

SILENCE_S = 60.0
"""The longest wait for a step: an operator that overran its memory may hang instead of dying."""

START_S = 120.0
"""The longest wait for the first step: on an accelerator the worker reads torch's databases."""


class Died(NhwcError):
    """The process ended, or fell silent, at this step."""

    def __init__(self, step: str, how: str) -> None:
        super().__init__(f"{how} at {step}")
        self.step, self.how = step, how


class Lane:
    """Does tasks one after another in one process, and starts another when it dies."""

    def __init__(self, nursery: Nursery) -> None:
        self.nursery = nursery
        self.worker: Worker | None = None

    def __enter__(self) -> Lane:
        return self

    def __exit__(self, *_: object) -> None:
        if self.worker is not None:
            self.worker.end()

    def do(self, task: ProbeTask) -> list[Any]:
        """Return what was found; raise `Died` after `ATTEMPTS` processes died of the task."""
        for _ in range(ATTEMPTS):
            fresh = self.worker is None
            # Held while it works, so that whoever leaves early ends it.
            self.worker = self.worker or self.nursery.worker()
            try:
                return _ask(self.worker, task)
            except Died as death:
                self.worker = None
                # A used worker may die of memory that an earlier operator corrupted, so only a
                # death in a fresh one counts. After one such death the operator's others
                # count at once, in its other dtypes as well.
                if fresh or task.deadly:
                    task.deadly[death.step] = f"{death.how}, in {task.dtype}"
        raise Died("", f"the process died {ATTEMPTS} times: {'; '.join(task.deadly.values())}")


def _ask(worker: Worker, task: ProbeTask) -> list[Any]:
    found: list[Any] = []
    step = ""
    worker.send(task)
    while True:
        try:
            kind, value = worker.hear(SILENCE_S if step else START_S)
        except Ended as end:
            raise Died(step, end.how) from None
        if kind == "done":
            return found
        if kind == "at":
            step = value
        else:
            found.append(value)


def listed(lane: Lane) -> tuple[list[Operator], dict[str, str]]:
    """Return every operator of the inventory, and what could not be read."""
    names, problems = lane.do(LIST)
    return [Operator(*words) for words in names], problems


def measure(
    nursery: Nursery,
    lanes: Sequence[Lane],
    operators: Sequence[Operator],
    device: str,
    dtypes: Sequence[str],
    *,
    timed: bool,
    progress: Callable[[int, str], None],
) -> dict[str, Operator | str]:
    """Return, by title, each operator with its findings, or why the table leaves it out.

    `progress` gets the number of operators that are done, and the title of the latest.
    """
    idle: queue.SimpleQueue[Lane] = queue.SimpleQueue()
    for lane in lanes:
        idle.put(lane)

    def one(operator: Operator) -> Operator | str:
        lane = idle.get()
        try:
            return _measure(lane, operator, device, dtypes, timed)
        finally:
            idle.put(lane)

    answers: dict[str, Operator | str] = {}
    threads = ThreadPoolExecutor(len(lanes))
    try:
        waiting = {threads.submit(one, operator): operator.title for operator in operators}
        for future in as_completed(waiting):
            answers[waiting[future]] = future.result()
            progress(len(answers), waiting[future])
    except BaseException:
        # Do not wait for running measurements: closing the nursery ends them at once.
        nursery.close()
        raise
    finally:
        threads.shutdown(cancel_futures=True)
    return answers


def _measure(
    lane: Lane, operator: Operator, device: str, dtypes: Sequence[str], timed: bool
) -> Operator | str:
    """Measure one operator in every dtype; return it with its rows, or why it has none."""
    rows: list[Tally] = []
    speeds: list[Speed] = []
    failed: list[str] = []
    supported = False
    deadly: dict[str, str] = {}
    for dtype in dtypes:
        task = ProbeTask(operator.title, device, dtype, timed and dtype == dtypes[0], deadly)
        try:
            found = lane.do(task)
        except Died as death:
            found = [str(death)]
        supported = supported or None not in found
        rows.extend(summarize([case for case in found if isinstance(case, Observation)], dtype))
        speeds.extend(speed for speed in found if isinstance(speed, Speed))
        failed.extend(f"{dtype}: {problem}" for problem in found if isinstance(problem, str))
    if rows or failed:
        problem = "; ".join(failed) or None
        times = tuple(speeds) if rows else ()
        return replace(operator, rows=tuple(rows), speeds=times, problem=problem)
    if not supported:
        return f"does not take {', '.join(dtypes)} on this device"
    return "no call with an unambiguous 4-D or 5-D input could be made of it"
