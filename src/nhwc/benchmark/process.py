"""The parent's end of a worker: start it, ask it, and survive its death."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

PATIENCE_S = 900.0
"""After so long without an answer a worker is ended: one that hangs must not stop a suite."""

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


class WorkerFailed(Exception):
    """The worker answered with a failure, or not at all; the message is fit for a table."""


class Worker:
    """A process that runs one engine on one case. Leaving the `with` block ends it."""

    def __init__(self, threads: int) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `close`
        self._process = subprocess.Popen(
            [sys.executable, "-m", "nhwc.benchmark.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=_environment(threads),
        )

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, request: dict[str, Any], sent: bytes = b"") -> None:
        """Send one request; `receive` waits for its answer."""
        assert self._process.stdin is not None
        # A process that is gone says so by the answer that does not come.
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(request).encode() + b"\n" + sent)
            self._process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        """Wait for the answer; WorkerFailed says why there is none."""
        assert self._process.stdout is not None
        watch = threading.Timer(PATIENCE_S, self._process.kill)
        watch.daemon = True
        watch.start()
        try:
            line = self._process.stdout.readline()
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
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
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


def _environment(threads: int) -> dict[str, str]:
    """The same number of threads for whoever counts them, and this very nhwc on the path."""
    path = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        **{name: str(threads) for name in _THREAD_VARIABLES},
        "PYTHONPATH": os.pathsep.join(part for part in path if part),
    }
