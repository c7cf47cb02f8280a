"""The parent's end of a worker: start it, ask it, and survive its death."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO, Any, Protocol

from .forked import Forked

PATIENCE_S = 900.0
"""After so long without an answer a worker is ended: one that hangs must not stop a suite."""

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class WorkerFailed(Exception):
    """The worker answered with a failure, or not at all; the message is fit for a table."""


class Process(Protocol):
    """What a worker's end asks of its process; subprocess.Popen is one."""

    returncode: int | None

    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


class Nursery:
    """Starts workers, each with so many threads.

    Where the system can fork, they come from one process that has imported torch and torchvision:
    that takes seconds, and there are as many workers as variants.
    """

    def __init__(self, threads: int) -> None:
        self._environment = _environment(threads)
        self._control: socket.socket | None = None
        if sys.platform == "linux":
            self._control, theirs = socket.socketpair()
            with theirs:
                command = _python("nhwc.benchmark.nursery", str(theirs.fileno()))
                self._parent = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env=self._environment,
                )

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        if self._control is not None:
            self._control.close()
            self._parent.wait()

    def worker(self) -> Worker:
        requests_end, requests = os.pipe()
        answers, answers_end = os.pipe()
        said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the worker
        try:
            process: Process
            if self._control is not None:
                process = Forked(self._control, (requests_end, answers_end, said.fileno()))
            else:
                process = subprocess.Popen(
                    _python("nhwc.benchmark.worker"),
                    stdin=requests_end,
                    stdout=answers_end,
                    stderr=said,
                    env=self._environment,
                )
        finally:
            os.close(requests_end)
            os.close(answers_end)
        return Worker(process, os.fdopen(requests, "wb"), os.fdopen(answers, "rb"), said)


class Worker:
    """A process that runs one engine on one case. Leaving the `with` block ends it."""

    def __init__(
        self, process: Process, requests: IO[bytes], answers: IO[bytes], said: IO[bytes]
    ) -> None:
        self._process, self._requests, self._answers = process, requests, answers
        self._said = said

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, request: dict[str, Any], sent: bytes = b"") -> None:
        """Send one request; `receive` waits for its answer."""
        # A process that is gone says so by the answer that does not come.
        with contextlib.suppress(OSError):
            self._requests.write(json.dumps(request).encode() + b"\n" + sent)
            self._requests.flush()

    def receive(self) -> dict[str, Any]:
        """Wait for the answer; WorkerFailed says why there is none."""
        watch = threading.Timer(PATIENCE_S, self._process.kill)
        watch.daemon = True
        watch.start()
        try:
            line = self._answers.readline()
        finally:
            watch.cancel()
        if not line:
            raise WorkerFailed(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        if "failure" in answer:
            raise WorkerFailed(answer["failure"])
        return answer

    def close(self) -> None:
        """End the process and give back what it holds."""
        for pipe in (self._requests, self._answers):
            with contextlib.suppress(OSError):
                pipe.close()
        try:
            # Most have nothing left to do; an engine's own teardown may still hang.
            self._process.wait(timeout=0.5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._said.close()

    def _last_words(self) -> str:
        """Why a process that said nothing more has ended."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        code = self._process.returncode
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").strip().splitlines()
        said = f": {lines[-1].strip()[:200]}" if lines else ""
        if code is not None and code < 0:
            hint = ", out of memory?" if code == -9 else ""
            return f"its process was ended by signal {-code}{hint}{said}"
        return f"its process ended with status {code}{said}"


def _python(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", module, *arguments]


def _environment(threads: int) -> dict[str, str]:
    """The same number of threads for whoever counts them, and this very nhwc on the path."""
    path = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        **{name: str(threads) for name in _THREAD_VARIABLES},
        "PYTHONPATH": os.pathsep.join(part for part in path if part),
    }
