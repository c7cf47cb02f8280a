"""The process that runs the cases of one group, with bounded memory."""

from __future__ import annotations

import importlib
import resource
from multiprocessing.connection import Connection
from pathlib import Path

from .judging import VERBS, judge

MEMORY = 8 << 30
"""How much a case may take, in bytes, beyond what the process had before."""


def warm(suite: str) -> None:
    import torch

    torch.set_num_threads(1)
    importlib.import_module(suite)


def serve(link: Connection) -> None:
    """Answer with an outcome for each case and verb of the groups asked for, and None after each."""
    # Much of the address space is not memory, so the limit counts only what is added from now on.
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))
    while True:
        try:
            suite, group, verbs = link.recv()
        except EOFError:
            return
        chosen = {verb: VERBS[verb] for verb in verbs}
        for case in importlib.import_module(suite).cases(group):
            link.send(("begins", case.name))
            for outcome in judge(case, chosen):
                link.send(outcome)
        link.send(None)
