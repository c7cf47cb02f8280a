"""Processes that compile: what LLVM takes of memory, and keeps, goes with them.

It is as much as a small model. As many kernels are compiled at once as there are cores, each by a
process; one that is done goes on with a kernel that waits, or else ends.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from ...machine.environment import available_cores
from . import assembler

_PATIENCE_S = 120
"""How long a process may take for a kernel."""


class _Queue:
    """The kernels that wait for their turn, and the processes that wait for them, no more than they
    are."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turns = threading.BoundedSemaphore(available_cores())
        self._waiting = 0
        self._idle: list[_Process] = []

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        with self._lock:
            self._waiting += 1
        try:
            self._turns.acquire()
        finally:
            with self._lock:
                self._waiting -= 1
        try:
            yield
        finally:
            self._turns.release()

    def take(self) -> _Process:
        """A process that waits, or a new one; OSError if there can be none."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
        return _Process()

    def keep(self, process: _Process) -> bool:
        """Let `process` wait for another kernel, if there will be one."""
        with self._lock:
            wanted = self._waiting > len(self._idle)
            self._idle += [process] * wanted
        return wanted


class _Process:
    """One that runs assembler.py."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", assembler.__file__, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )

    def compiled(self, assembly: str, features: str) -> bytes | None:
        """The object code; None if the process died, or had to be ended."""
        assert self._process.stdin
        assert self._process.stdout
        alarm = threading.Timer(_PATIENCE_S, self._process.kill)
        alarm.start()
        try:
            assembler.send(self._process.stdin, features.encode(), assembly.encode())
            return assembler.receive(self._process.stdout)
        except OSError:
            return None
        finally:
            alarm.cancel()

    def end(self) -> None:
        # What it has not read of a request cannot be sent any more.
        with contextlib.suppress(OSError), self._process:
            self._process.kill()


def _after_fork() -> None:
    # A child has none of the threads that may have held a lock when it was forked, and its parent's
    # processes are not its own.
    global _queue
    _queue = _Queue()


_queue = _Queue()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def turn() -> contextlib.AbstractContextManager[None]:
    """Wait until fewer kernels than there are cores are being compiled."""
    return _queue.turn()


def object_code(assembly: str, features: str) -> bytes:
    """Compile `assembly` for this machine, with `features` of its processor."""
    return _compiled_elsewhere(assembly, features) or assembler.compiled(assembly, features)


def _compiled_elsewhere(assembly: str, features: str) -> bytes | None:
    """None where no other process can do it: where Python is part of some other program, say."""
    python = sys.executable or ""
    if "python" not in Path(python).name.lower() or getattr(sys, "frozen", False):
        return None
    queue = _queue
    try:
        process = queue.take()
    except OSError:
        return None
    code, kept = None, False
    try:
        code = process.compiled(assembly, features)
        kept = code is not None and queue.keep(process)
    finally:
        if not kept:
            process.end()
    return code
