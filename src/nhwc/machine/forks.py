"""Refuse to compute in a forked process whose threads are gone.

torch keeps a pool of threads for each thread that calls it. A fork copies the thread that forks
and the record of its pool, but not the pool's threads: in the child, the first operator that is
large enough to be shared out waits for them for ever.
"""

from __future__ import annotations

import os
import threading

import torch

from ..errors import NhwcError


class _Forks(threading.local):
    """For each thread: whether it ran models on several threads, and was forked after that."""

    ran = False
    lost = False


_forks = _Forks()


def _after_fork() -> None:
    _forks.lost = _forks.ran


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def check_threads() -> None:
    """Refuse to compute in a forked child whose parent's threads are gone: it would hang.

    Only runs through `nhwc` are known: torch does not tell whether it has used its threads.
    """
    if torch.get_num_threads() == 1:
        return
    if _forks.lost:
        raise NhwcError(
            f"this process was forked after its parent had run a model on "
            f"{torch.get_num_threads()} threads, which the fork did not copy: torch would wait for "
            "them for ever. Call torch.set_num_threads(1) in the child, or start it by spawn."
        )
    _forks.ran = True
