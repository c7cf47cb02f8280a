"""A process that the nursery forked, as the one who asked for it sees it."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import subprocess

NUMBER = struct.Struct("i")
"""What the nursery tells of a worker: its process number, and in the end its exit status."""


class Forked:
    """Has of subprocess.Popen what a worker needs."""

    def __init__(self, nursery: socket.socket, ends: tuple[int, int, int]) -> None:
        self.returncode: int | None = None
        self._status, theirs = os.pipe()
        with contextlib.suppress(OSError):
            socket.send_fds(nursery, [b"w"], [*ends, theirs])
        os.close(theirs)
        self._pid = self._read()

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            ready, _, _ = select.select([self._status], [], [], timeout)
            if not ready:
                raise subprocess.TimeoutExpired("a worker", timeout or 0.0)
            self.returncode = self._read() or 0
            os.close(self._status)
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None and self._pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)

    def _read(self) -> int | None:
        data = os.read(self._status, NUMBER.size)
        return int(NUMBER.unpack(data)[0]) if data else None
