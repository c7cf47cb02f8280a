"""Processes that measure operators: each is given one after another."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from ..errors import NhwcError
from .table import Operator


class Worker:
    """A process running `worker.py`."""

    def __init__(self, device: str) -> None:
        here = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        if device == "cpu":
            env["CUDA_VISIBLE_DEVICES"] = ""
        # A session of its own, to be ended with the child that it forks.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "nhwc.operators.worker", device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=env,
            start_new_session=True,
        )
        self.inventory: list[Operator]
        self.problems: dict[str, str]
        try:
            listed, self.problems = self._answer()
            self.inventory = [Operator(*words) for words in listed]
        except BaseException:
            self.close()
            raise

    def measure(self, op: Operator, dtypes: Sequence[str], *, timed: bool) -> dict[str, Any]:
        assert self.process.stdin is not None
        request = {"op": (op.name, op.variant, op.group), "dtypes": dtypes, "timed": timed}
        with contextlib.suppress(BrokenPipeError):  # That it has ended is said by the answer.
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        answer: dict[str, Any] = self._answer()
        return answer

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise NhwcError(
                f"the process that measures operators ended with status {self.process.wait()}. "
                "Try: python -m nhwc.operators.worker cpu"
            )
        return json.loads(line)

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()


class Pool:
    """The workers of one device; the first is there from the start, for it knows the inventory."""

    def __init__(self, device: str, most: int) -> None:
        self.device, self.most = device, most
        self.first = Worker(device)
        self._workers = [self.first]

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for worker in self._workers:
            worker.close()

    def measure(
        self,
        operators: Sequence[Operator],
        dtypes: Sequence[str],
        *,
        timed: bool,
        progress: Callable[[int, str], None],
    ) -> dict[str, dict[str, Any]]:
        """The answer for each operator by its title; `progress` is told how many are there."""
        # To start another worker takes as long as to measure a dozen operators.
        count = min(self.most, 1 + len(operators) // 12)
        idle: queue.SimpleQueue[Worker | None] = queue.SimpleQueue()
        for worker in (self.first, *[None] * (count - 1)):
            idle.put(worker)

        def one(op: Operator) -> tuple[str, dict[str, Any]]:
            worker = idle.get()
            try:
                if worker is None:
                    worker = Worker(self.device)
                    self._workers.append(worker)
                return op.title, worker.measure(op, dtypes, timed=timed)
            finally:
                idle.put(worker)

        answers = {}
        threads = ThreadPoolExecutor(count)
        try:
            for future in as_completed([threads.submit(one, op) for op in operators]):
                title, answer = future.result()
                answers[title] = answer
                progress(len(answers), title)
        except BaseException:
            # What is still being measured is not waited for: with its worker it ends at once.
            threads.shutdown(wait=False, cancel_futures=True)
            self.close()
            raise
        finally:
            threads.shutdown()
        return answers
