"""Work that may kill the process it runs in: done in a child, and again past each step it died in.

The child is forked from a process that has read torch's databases: a death costs milliseconds.
"""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from .samples import Enter

ATTEMPTS = 12

SILENCE_S = 60.0
"""An operator that has overrun its memory does not always die: it may wait for itself. No step
takes so long on a machine that does much else besides."""

START_S = 120.0
"""Until the first step: a child on an accelerator reads torch's databases itself."""


@dataclass
class Task:
    """One operator in one dtype, to be checked and perhaps timed."""

    title: str
    device: str
    dtype: str
    timed: bool = False
    deadly: dict[str, str] = field(default_factory=dict)
    """Steps in which the process died, and how; the tasks of one operator share it."""


Work = Callable[[Task, Enter, Callable[[object], None]], None]
"""Does a task: tells each step before it is made, and each thing that it finds."""


class Crash(RuntimeError):
    """The process died at this step when it was tried before."""


class Died(Exception):
    """The process ended, or fell silent, at this step."""

    def __init__(self, step: str, how: str) -> None:
        super().__init__(f"{how} at {step}")
        self.step, self.how = step, how


class Fragile:
    """Does tasks in a child that takes the next one as long as it lives."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.child: _Child | None = None

    def do(self, task: Task) -> list[Any]:
        """What the work found; raises `Died` where it dies again and again."""
        for _ in range(ATTEMPTS):
            fresh = self.child is None
            child = self.child or _Child(self.work)
            self.child = None
            try:
                found = child.do(task)
            except Died as death:
                # A used child may die of what an operator before this one did to its memory; an
                # operator that has died alone is believed at once, in its other dtypes as well.
                if fresh or task.deadly:
                    task.deadly[death.step] = f"{death.how}, in {task.dtype}"
            else:
                self.child = child
                return found
        raise Died("", f"the process died {ATTEMPTS} times: {'; '.join(task.deadly.values())}")


class _Child:
    def __init__(self, work: Work) -> None:
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(work, theirs, self.pipe), daemon=True)
        self.process.start()
        theirs.close()

    def do(self, task: Task) -> list[Any]:
        found: list[Any] = []
        step = ""
        try:
            self.pipe.send(task)
            while self.pipe.poll(limit := SILENCE_S if step else START_S):
                kind, value = self.pipe.recv()
                if kind == "done":
                    return found
                if kind == "at":
                    step = value
                else:
                    found.append(value)
        except (EOFError, OSError):
            self.process.join()
            raise Died(step, f"the process died ({_status(self.process.exitcode or 0)})") from None
        self.process.kill()
        self.process.join()
        raise Died(step, f"it took longer than {limit:.0f} s")


def _serve(work: Work, pipe: Connection, others: Connection) -> None:
    others.close()  # Or the end of the parent would never be heard of.
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return

        def enter(step: str, task: Task = task) -> None:
            if step in task.deadly:
                raise Crash(task.deadly[step])
            pipe.send(("at", step))

        work(task, enter, lambda found: pipe.send(("found", found)))
        pipe.send(("done", None))


def _status(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"
