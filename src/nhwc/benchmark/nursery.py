"""A process that has imported what every worker needs, and forks the workers.

`python -m nhwc.benchmark.nursery FD` is started by `process.Nursery` alone. For each message on
the socket FD it forks a worker onto the three ends of pipes that came along. Nothing has run here
that starts threads, which no fork would survive.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys

from .forked import NUMBER


def main() -> None:
    # Ctrl-C reaches the whole group; the parent decides what becomes of us.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    from ..vision import import_torchvision_if_present
    from .worker import main as work

    import_torchvision_if_present()
    while True:
        message, ends, _, _ = socket.recv_fds(control, 1, 4)
        if not message:
            break
        if os.fork() == 0:
            control.close()
            _fork_and_keep(*ends)
            return work()
        for end in ends:
            os.close(end)
    # Waited for, they count in what whoever started us learns of our memory.
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


def _fork_and_keep(requests: int, answers: int, said: int, status: int) -> None:
    """Return in a new process, on these ends; the one it was forked from says how it ends."""
    worker = os.fork()
    if worker == 0:
        for place, end in enumerate((requests, answers, said)):
            os.dup2(end, place)
        for end in (requests, answers, said, status):
            os.close(end)
        return
    for end in (requests, answers, said):
        os.close(end)
    with contextlib.suppress(OSError):
        os.write(status, NUMBER.pack(worker))
        _, code = os.waitpid(worker, 0)
        os.write(status, NUMBER.pack(os.waitstatus_to_exitcode(code)))
    os._exit(0)


if __name__ == "__main__":
    main()
