"""Workers that may die: tasks go out, cases come back, and a crash costs one step of one task."""

from __future__ import annotations

import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .table import Case, Outcome, Speed

ATTEMPTS = 12
TIMEOUT_S = 20.0
START_S = 120.0


@dataclass
class Task:
    """One operator in one dtype, to be checked and perhaps timed, and what came of it."""

    title: str
    device: str
    dtype: str
    time: bool = False
    deadly: dict[str, str] = field(default_factory=dict)
    """Steps in which the process died, and how; the tasks of one operator share it."""
    cases: list[Case] = field(default_factory=list)
    speeds: list[Speed] = field(default_factory=list)
    supported: bool = True
    problem: str | None = None

    def to_line(self) -> str:
        keys = ("title", "device", "dtype", "time", "deadly")
        return json.dumps({key: getattr(self, key) for key in keys}) + "\n"


class WorkerDied(Exception):
    """The process ended, or gave no answer in time, at this step."""

    def __init__(self, step: str, how: str) -> None:
        super().__init__(f"{how} at {step}")
        self.step, self.how = step, how


class Worker:
    """A process running `worker.py`, started when it is first needed."""

    def __init__(self) -> None:
        here = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "nhwc.operators.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        self.used = False
        self.buffer = b""
        self.inventory: list[list[str]] = self._answer("start", START_S)["inventory"]
        self.problems: dict[str, str] = self._answer("start", START_S)["problems"]

    def do(self, task: Task) -> None:
        """Have one task done; what it finds is put into the task as it comes."""
        assert self.process.stdin is not None
        task.cases.clear()
        task.speeds.clear()
        step = "start"
        try:
            self.process.stdin.write(task.to_line().encode())
            self.process.stdin.flush()
        except BrokenPipeError:
            raise WorkerDied(step, "the process had ended") from None
        while not (answer := self._answer(step)).get("done"):
            step = answer.get("at", step)
            _take(task, answer)
        self.used = True

    def _answer(self, step: str, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as waiting:
            waiting.register(self.process.stdout, selectors.EVENT_READ)
            while b"\n" not in self.buffer:
                if not waiting.select(max(deadline - time.monotonic(), 0)):
                    self.close()
                    raise WorkerDied(step, f"it took longer than {timeout_s:.0f} s")
                read = os.read(self.process.stdout.fileno(), 1 << 16)
                if not read:
                    raise WorkerDied(step, f"the process died ({_status(self.process.wait())})")
                self.buffer += read
        line, _, self.buffer = self.buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


def _take(task: Task, answer: dict[str, Any]) -> None:
    if "case" in answer:
        case = answer["case"]
        task.cases.append(Case(**{**case, "outcome": Outcome(case["outcome"])}))
    for values in answer.get("speeds", ()):
        task.speeds.append(Speed.from_list(values))
    if "unsupported" in answer:
        task.supported = False
    task.problem = answer.get("problem", task.problem)


def _status(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def run_tasks(tasks: list[Task], workers: int, progress: Callable[[int, str], None]) -> None:
    """Have all tasks done by so many processes; `progress` is told how many are finished."""
    waiting: queue.SimpleQueue[Task] = queue.SimpleQueue()
    for task in tasks:
        waiting.put(task)
    done: queue.SimpleQueue[Task | BaseException] = queue.SimpleQueue()
    stop = threading.Event()
    threads = [
        threading.Thread(target=_serve, args=(waiting, done, stop), daemon=True)
        for _ in range(min(workers, len(tasks)))
    ]
    for thread in threads:
        thread.start()
    try:
        for finished in range(1, len(tasks) + 1):
            result = done.get()
            if isinstance(result, BaseException):
                raise result
            progress(finished, result.title)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _serve(waiting: queue.SimpleQueue, done: queue.SimpleQueue, stop: threading.Event) -> None:
    worker: Worker | None = None
    try:
        while not stop.is_set():
            task = waiting.get_nowait()
            worker = _do_at_last(task, worker)
            done.put(task)
    except queue.Empty:
        pass
    except BaseException as error:
        done.put(error)
    finally:
        if worker is not None:
            worker.close()


def _do_at_last(task: Task, worker: Worker | None) -> Worker | None:
    """Try again after each death, past the step it died in; return a worker that lives."""
    for _ in range(ATTEMPTS):
        worker = worker or Worker()
        try:
            worker.do(task)
            return worker
        except WorkerDied as death:
            # A used worker may die of what an operator before this one did to its memory; an
            # operator that has died alone is believed at once, in its other dtypes as well.
            if not worker.used or task.deadly:
                task.deadly[death.step] = f"{death.how}, in {task.dtype}"
            worker.close()
            worker = None
    task.problem = f"the process died {ATTEMPTS} times: {'; '.join(task.deadly.values())}"
    return worker
