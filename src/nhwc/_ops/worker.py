"""The process that checks and times operators. One may kill it; `pool` starts another."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import torch

from .entries import Entry, inventory
from .own import Maker
from .probe import probe
from .samples import Enter
from .speed import time_samples

_inventory = functools.cache(inventory)


@dataclass(frozen=True)
class ProbeTask:
    """One operator in one dtype, to be checked and perhaps timed."""

    title: str
    device: str
    dtype: str
    timed: bool = False
    deadly: dict[str, str] = field(default_factory=dict)
    """Steps in which the process died, and how; the tasks of one operator share it."""


LIST = ProbeTask("", "", "")
"""Asks for the names of all operators; nothing is measured."""


Work = Callable[[ProbeTask, Enter, Callable[[object], None]], None]
"""Does a task: announces each step before it is made, and reports each finding."""


class Crash(RuntimeError):
    """The process died at this step when it was tried before."""


def warm(device: str) -> None:
    """Read torch's databases once, before workers are forked.

    Not for an accelerator: reading them starts it, and it does not survive a fork.
    """
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if device == "cpu":
        _inventory()


def serve(link: Connection) -> None:
    """Check and time operators until the parent hangs up."""
    do_tasks(link, _work)


def do_tasks(link: Connection, work: Work) -> None:
    """Do each task that arrives, and report on it in pairs.

    They are ("at", step) before each step, ("found", finding), and ("done", None) at the end.
    """
    with contextlib.suppress(EOFError):
        while True:
            task = link.recv()

            def enter(step: str, task: ProbeTask = task) -> None:
                if step in task.deadly:
                    raise Crash(task.deadly[step])
                link.send(("at", step))

            work(task, enter, lambda found: link.send(("found", found)))
            link.send(("done", None))


def _work(task: ProbeTask, enter: Enter, tell: Callable[[object], None]) -> None:
    """Report cases, speeds, a problem in words, or None where the dtype is not supported."""
    entries, problems = _inventory()
    if task == LIST:
        tell([(entry.name, entry.variant, entry.group) for entry in entries.values()])
        tell(problems)
        return
    try:
        _check(entries[task.title], task, enter, tell)
    except Exception as error:
        tell(f"{type(error).__name__}: {str(error).strip()[:160]}")


def _check(entry: Entry, task: ProbeTask, enter: Enter, tell: Callable[[object], None]) -> None:
    device, dtype = task.device, getattr(torch, task.dtype)
    if not entry.supports(device, dtype):
        tell(None)
        return
    torch.manual_seed(0)
    image = False
    for sample in entry.samples(device, dtype, enter):
        for case in probe(entry.name, sample, enter):
            image = image or case.dims == 4
            tell(case)
    if task.timed and (image or entry.own(Maker(device, dtype))):
        enter("timing")
        for speed in time_samples(entry.large(device, dtype), device, task.dtype):
            tell(speed)
    if device.startswith("cuda"):
        torch.cuda.synchronize()
