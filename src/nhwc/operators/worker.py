"""A process that checks and times operators, each in a child that may die.

It reads operators from stdin and writes what was measured of them, a line of JSON each. Started by
`pool.py` with `python -m nhwc.operators.worker DEVICE`.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import IO

import torch

from .cases import Case, summarize
from .entries import Entry, inventory
from .fragile import Died, Fragile, Task
from .own import Maker
from .probe import probe
from .samples import Enter
from .speed import time_samples
from .table import Operator, Row, Speed, operator_to_dict

_inventory = functools.cache(inventory)


LIST = Task("", "", "")
"""Asks for what there is; nothing is measured."""


def main(device: str) -> None:
    # Native code writes to stdout as it likes; the answers go through a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if device == "cpu":
        # Read once, for all children. Elsewhere reading starts the device, which no fork survives.
        _inventory()
    fragile = Fragile(_work)
    _answer(answers, fragile.do(LIST))
    for line in sys.stdin:
        _answer(answers, _measure(fragile, device, **json.loads(line)))


def _answer(answers: IO[str], answer: object) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _measure(
    fragile: Fragile, device: str, *, op: list[str], dtypes: list[str], timed: bool
) -> dict[str, object]:
    """One operator in every dtype: its place in the table, or why it has none."""
    name, variant, group = op
    operator = Operator(name, variant, group)
    rows: list[Row] = []
    speeds: list[Speed] = []
    failed: list[str] = []
    supported = False
    deadly: dict[str, str] = {}
    for dtype in dtypes:
        task = Task(operator.title, device, dtype, timed and dtype == dtypes[0], deadly)
        try:
            found = fragile.do(task)
        except Died as death:
            found = [str(death)]
        supported = supported or None not in found
        rows.extend(summarize([case for case in found if isinstance(case, Case)], dtype))
        speeds.extend(speed for speed in found if isinstance(speed, Speed))
        failed.extend(f"{dtype}: {problem}" for problem in found if isinstance(problem, str))
    if rows or failed:
        problem = "; ".join(failed) or None
        times = tuple(speeds) if rows else ()
        return operator_to_dict(replace(operator, rows=tuple(rows), speeds=times, problem=problem))
    if not supported:
        return {"left_out": f"does not take {', '.join(dtypes)} on this device"}
    return {"left_out": "no call with an unambiguous 4-D or 5-D input could be made of it"}


def _work(task: Task, enter: Enter, tell: Callable[[object], None]) -> None:
    """Tell of cases, speeds, a problem in words; of None where the dtype is not supported."""
    entries, problems = _inventory()
    if task == LIST:
        tell([[entry.name, entry.variant, entry.group] for entry in entries.values()])
        tell(problems)
        return
    try:
        _check(entries[task.title], task, enter, tell)
    except Exception as error:
        tell(f"{type(error).__name__}: {str(error).strip()[:160]}")


def _check(entry: Entry, task: Task, enter: Enter, tell: Callable[[object], None]) -> None:
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


if __name__ == "__main__":
    main(sys.argv[1])
