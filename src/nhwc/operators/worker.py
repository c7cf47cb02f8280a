"""A process of its own that checks and times operators: it may die, and another takes its place.

It reads tasks from stdin and writes what it finds, a line of JSON each. Started by `pool.py` with
`python -m nhwc.operators.worker`.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from dataclasses import asdict
from typing import Any

import torch

from .entries import Entry, inventory
from .own import Maker
from .probe import probe
from .speed import time_samples


class Crash(RuntimeError):
    """The process died at this step when it was tried before."""


def main() -> None:
    # Native code writes to stdout as it likes; the answers go through a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)

    def tell(**answer: Any) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    entries, problems = inventory()
    tell(inventory=[[e.title, e.name, e.variant, e.group] for e in entries.values()])
    tell(problems=problems)
    for line in sys.stdin:
        task = json.loads(line)
        try:
            _work(entries[task["title"]], task, tell)
        except Exception as error:
            tell(problem=f"{type(error).__name__}: {str(error).strip()[:160]}")
        tell(done=True)
        if task["device"].startswith("cuda"):
            torch.cuda.synchronize()


def _work(entry: Entry, task: dict, tell: Any) -> None:
    device, dtype = task["device"], getattr(torch, task["dtype"])
    if not entry.supports(device, dtype):
        tell(unsupported=True)
        return

    def enter(step: str) -> None:
        if step in task["deadly"]:
            raise Crash(task["deadly"][step])
        tell(at=step)

    torch.manual_seed(0)
    image = False
    for sample in entry.samples(device, dtype, enter):
        for case in probe(entry.name, sample, enter):
            image = image or case.dims == 4
            tell(case={**asdict(case), "outcome": case.outcome.value})
    if task["time"] and (image or entry.own(Maker(device, dtype))):
        enter("timing")
        speeds = time_samples(entry.large(device, dtype), device, task["dtype"])
        tell(speeds=[list(vars(speed).values()) for speed in speeds])


if __name__ == "__main__":
    main()
