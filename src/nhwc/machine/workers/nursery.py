"""The process that starts workers and ends them; `nhwc.machine.workers.Nursery` alone runs it.

`python -m nhwc.machine.workers.nursery ROLE DESCRIPTOR MODULE ARGUMENT...`: in the roles `warm` and
`cold` it serves the socket DESCRIPTOR. A warm one forks workers that have everything loaded; a cold
one has loaded nothing, and each of its forks starts Python anew, in the role `worker`.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import sys
import time
from multiprocessing.connection import Connection


def main() -> None:
    role, descriptor, module, *arguments = sys.argv[1:]
    if role == "cold":
        link = nurse(socket.socket(fileno=int(descriptor)))
        if link is not None:
            os.set_inheritable(link, True)
            again = ["-m", "nhwc.machine.workers.nursery", "worker", str(link), module, *arguments]
            os.execv(sys.executable, [sys.executable, *again])
        return
    work = importlib.import_module(module)
    work.warm(*arguments)
    warm = role == "warm"
    link = nurse(socket.socket(fileno=int(descriptor))) if warm else int(descriptor)
    if link is not None:
        work.serve(Connection(link))


def nurse(control: socket.socket) -> int | None:
    """Fork and end workers on request; return None at the end, and in each worker its link."""
    # SIGTERM ends a nursery that is still getting ready; from here on it has workers to end first.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    workers: set[int] = set()
    while True:
        request, ends, _, _ = socket.recv_fds(control, 64, 2)
        if not request:
            break
        answer = None
        if ends:
            answer = os.fork()
            if answer == 0:
                control.close()
                return _settle(*ends)
            for end in ends:
                os.close(end)
            workers.add(answer)
        else:
            number, grace_s = json.loads(request)
            if number in workers:
                workers.remove(number)
                answer = _end(number, grace_s)
        try:
            control.sendall(json.dumps(answer).encode())
        except OSError:
            break
    # Wait for the workers, so that their memory counts in what our parent learns of ours.
    for number in workers:
        _end(number, 0.0)
    return None


def _settle(link: int, said: int) -> int:
    """Become a worker: lead a group that can be ended as one, and print everything to one file."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for place, end in enumerate((nothing, said, said)):
        os.dup2(end, place)
    os.close(nothing)
    os.close(said)
    return link


def _end(number: int, grace_s: float) -> int:
    """End a worker and what it started; return its exit status, below zero for a signal."""
    deadline = time.monotonic() + grace_s
    ended, status = os.waitpid(number, os.WNOHANG)
    while not ended and time.monotonic() < deadline:
        time.sleep(0.005)
        ended, status = os.waitpid(number, os.WNOHANG)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(number, signal.SIGKILL)
    if not ended:
        # The process may not have made its own group yet.
        with contextlib.suppress(ProcessLookupError):
            os.kill(number, signal.SIGKILL)
        _, status = os.waitpid(number, 0)
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    main()
