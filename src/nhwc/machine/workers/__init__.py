"""Processes that work for this one: started warm, asked in plain values, ended with their children.

    here                        nursery                     worker
     |-- fork, with two ends ---->|-- fork ------------------>|
     |<-- its number -------------|                           |
     |-- request -------------------------------------------->|
     |<-- answers --------------------------------------------|
     |-- end, number, grace ----->|-- SIGKILL, to its group ->x
     |<-- its exit status --------|

A worker is a module with two functions: `warm(*arguments)` imports and reads what every worker
needs, and starts no threads, which no fork survives; `serve(link)` answers requests until the link
ends. The nursery calls the first one once and the second one in each process that it forks. Values
travel pickled over an unnamed socket, which nobody but this process and its worker has.

`multiprocessing` has the links that are used here, but not the rest: its processes import the
user's script anew, share one environment and leave their own children alive.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from pathlib import Path
from typing import IO, Any

from ...errors import NhwcError

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

_GRACE_S = 0.5
"""How long a worker may take to exit: most have nothing left to do, some would never end."""

_DYING_S = 5.0
"""How long a worker that has hung up may take until its exit status is known."""


class Ended(NhwcError):
    """A worker died, or fell silent and was ended. `how` is the short form of the message."""

    def __init__(self, how: str, said: str = "") -> None:
        hint = ", out of memory?" if "SIGKILL" in how else ""
        super().__init__(f"{how}{hint}{': ' * bool(said)}{said}")
        self.how = how


class Nursery:
    """Starts the workers of one module, all with the same environment. Leaving `with` ends them.

    Where the system forks well they are forked from one process that is warm, which takes
    milliseconds; elsewhere each starts afresh. Ctrl-C reaches none of them.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        threads: int,
        environment: Mapping[str, str] | None = None,
        warm: bool = sys.platform == "linux",
    ) -> None:
        self._module = module
        self._turn = threading.Lock()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the nursery
        self._control, theirs = socket.socketpair()
        role = "warm" if warm else "cold"
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", f"{__name__}.nursery"),
                    *(role, str(theirs.fileno()), module, *arguments),
                ],
                stdin=subprocess.DEVNULL,
                stdout=self._said,
                stderr=self._said,
                pass_fds=[theirs.fileno()],
                env={**_environment(threads), **(environment or {})},
                start_new_session=True,
            )

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every worker; threads that wait for one are told at once."""
        # Another thread may be waiting for an answer, and closing alone would not wake it.
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        # One that is still importing would only look at its socket when it is done.
        self._process.terminate()
        self._process.wait()
        with self._turn:  # Another thread may be reading the last words.
            self._said.close()

    @property
    def has_died(self) -> bool:
        return self._process.poll() is not None

    def worker(self) -> Worker:
        """Start a worker."""
        return Worker(self)

    def ask(self, request: object, ends: Sequence[int] = ()) -> Any:
        """Ask the nursery's process to fork or end a worker; raise `Ended` if it is gone."""
        with self._turn:
            try:
                socket.send_fds(self._control, [json.dumps(request).encode()], ends)
                answer = self._control.recv(64)
            except OSError:
                answer = b""
            except BaseException:
                # After a broken exchange, the next answer might belong to this request.
                self._control.close()
                raise
            if not answer:
                raise Ended(
                    f"the process that starts workers died ({_status(self._process.wait())})",
                    f"{_last_line(self._said) or 'it said nothing'}. "
                    f"Try: python -c 'import {self._module}'",
                )
        return json.loads(answer)


class Nurseries:
    """A nursery of one module for each number of threads, made when it is first asked for, and
    anew if it has died. Leaving `with` ends them."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._made: dict[int, Nursery] = {}

    def __enter__(self) -> Nurseries:
        return self

    def __exit__(self, *_: object) -> None:
        for nursery in self._made.values():
            nursery.close()

    def of(self, threads: int) -> Nursery:
        """Return the nursery whose workers have so many threads."""
        made = self._made.get(threads)
        if made is None or made.has_died:
            if made is not None:
                made.close()
            self._made[threads] = Nursery(self._module, threads=threads)
        return self._made[threads]


class Worker:
    """The asking side of a process that answers requests. Leaving `with` ends the process."""

    def __init__(self, nursery: Nursery) -> None:
        self._nursery = nursery
        self._status: int | None = None
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the worker
        self._last_line = ""
        self._link, theirs = Pipe()
        self._number: int | None = None
        try:
            with theirs:
                self._number = nursery.ask("fork", [theirs.fileno(), self._said.fileno()])
        except BaseException:
            self._link.close()
            self._said.close()
            raise

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.end(_GRACE_S)

    def send(self, request: Any) -> None:
        """Send one request; `hear` waits for the answer."""
        # If the process is gone, `hear` will report it.
        with contextlib.suppress(OSError):
            self._link.send(request)

    def hear(self, patience_s: float) -> Any:
        """Wait for the next answer, and end a silent worker; `Ended` says why there is none."""
        try:
            if self._link.poll(patience_s):
                return self._link.recv()
        except (EOFError, OSError):
            self.end(_DYING_S)
            raise Ended(f"the process died ({_status(self._status)})", self._last_line) from None
        self.end()
        raise Ended(f"it took longer than {patience_s:.0f} s", self._last_line)

    def end(self, grace_s: float = 0.0) -> None:
        """Give the process `grace_s` to exit, then end it and all that it started."""
        self._link.close()
        if self._number is None:
            return
        number, self._number = self._number, None
        with contextlib.suppress(Ended):
            self._status = self._nursery.ask([number, grace_s])
        self._last_line = _last_line(self._said)
        self._said.close()


def _environment(threads: int) -> dict[str, str]:
    """The environment of a worker: `threads` for every library, and this very nhwc on the path."""
    path = [str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        **{name: str(threads) for name in _THREAD_VARIABLES},
        "PYTHONPATH": os.pathsep.join(part for part in path if part),
    }


def _status(code: int | None) -> str:
    if code is None or code >= 0:
        return "nobody knows how" if code is None else f"exit status {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _last_line(said: IO[bytes]) -> str:
    if said.closed:
        return ""
    said.seek(0)
    lines = said.read().decode(errors="replace").strip().splitlines()
    return lines[-1].strip()[:200] if lines else ""
