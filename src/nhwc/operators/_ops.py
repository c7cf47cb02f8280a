"""The verb: measure the operators of the installed torch."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import torch

from ..environment import Environment, available_cores
from ..errors import InputError, NhwcError
from .inside import layout_copies
from .pool import Task, Worker, WorkerDied, run_tasks
from .table import Operator, OperatorTable, Row, summarize

DTYPES = ("float32", "bfloat16", "float16", "uint8")

Progress = Callable[[int, int, str], None]
"""Called with the tasks done, the tasks in all, and the name of the latest."""


def ops(
    *names: str,
    device: torch.device | str = "cpu",
    dtypes: Sequence[str] = DTYPES,
    timed: bool = True,
    progress: Progress | None = None,
) -> OperatorTable:
    """Measure which operators keep channels last: those named, or all.

    >>> table = ops("nn.functional.grid_sample", dtypes=("float32",), timed=False)
    >>> table.operators[0].outcome()
    <Outcome.LOSES: 'loses'>

    A name may be short (`grid_sample`), or a pattern (`nn.functional.*pool*`). Speed is measured in
    the first dtype. Operators run in processes of their own: one that crashes is in the table.
    """
    dtypes = tuple(_check_dtype(dtype) for dtype in dtypes)
    device = str(device)
    start = time.monotonic()
    found, problems = _inventory()
    wanted = [op for op in found if not names or any(op.answers_to(name) for name in names)]
    _check_names(names, wanted, found, problems)
    if names:
        problems = {name: why for name, why in problems.items() if name in names}
    tasks = _tasks(wanted, device, dtypes, timed)
    report = progress or (lambda done, total, title: None)
    # One process at a time on an accelerator: two would wait for each other, and time each other.
    workers = min(4, available_cores()) if device == "cpu" else 1
    run_tasks(tasks, workers, lambda done, title: report(done, len(tasks), title))
    return _assemble(wanted, tasks, problems, device, dtypes, time.monotonic() - start)


def _tasks(wanted: list[Operator], device: str, dtypes: tuple[str, ...], timed: bool) -> list[Task]:
    tasks = []
    for op in wanted:
        deadly: dict[str, str] = {}
        for dtype in dtypes:
            tasks.append(Task(op.title, device, dtype, timed and dtype == dtypes[0], deadly))
    return tasks


def _check_dtype(name: str) -> str:
    if not isinstance(getattr(torch, name, None), torch.dtype):
        raise InputError(f"torch has no dtype {name!r}. Try float32, bfloat16, float16 or uint8.")
    return name


def _inventory() -> tuple[list[Operator], dict[str, str]]:
    """What there is, asked of a process like those that will do the work."""
    try:
        worker = Worker()
    except WorkerDied as death:
        raise NhwcError(
            f"the process that reads torch's operators did not start: {death.how}. "
            "Try: python -m nhwc.operators.worker"
        ) from death
    worker.close()
    found = [Operator(name, variant, group) for _, name, variant, group in worker.inventory]
    return found, worker.problems


def _check_names(
    names: Sequence[str], wanted: list[Operator], found: list[Operator], problems: dict[str, str]
) -> None:
    for name in names:
        if any(op.answers_to(name) for op in wanted):
            continue
        if name in problems:
            raise InputError(f"operator {name!r} is not checked: {problems[name]}.")
        import difflib

        known = {op.name.rpartition(".")[2] for op in found} | {op.name for op in found}
        near = difflib.get_close_matches(name, sorted(known), n=3)
        hint = f"Did you mean {', '.join(near)}?" if near else "List them with: nhwc ops"
        raise InputError(f"this torch has no operator {name!r}. {hint}")


def _assemble(
    wanted: list[Operator],
    tasks: list[Task],
    problems: dict[str, str],
    device: str,
    dtypes: tuple[str, ...],
    seconds: float,
) -> OperatorTable:
    by_title: dict[str, list[Task]] = {}
    for task in tasks:
        by_title.setdefault(task.title, []).append(task)
    operators, left_out = [], dict(problems)
    for op in wanted:
        mine = by_title[op.title]
        rows = tuple(row for task in mine for row in _rows(task))
        failed = [f"{task.dtype}: {task.problem}" for task in mine if task.problem]
        if rows or failed:
            speeds = tuple(speed for task in mine for speed in task.speeds)
            problem = "; ".join(failed) or None
            operators.append(
                dataclasses.replace(op, rows=rows, speeds=speeds if rows else (), problem=problem)
            )
        elif not any(task.supported for task in mine):
            left_out[op.title] = f"does not take {', '.join(dtypes)} on this device"
        else:
            left_out[op.title] = "no call with an unambiguous 4-D or 5-D input could be made of it"
    return OperatorTable(
        environment=Environment.here(device).to_dict(),
        device=device,
        dtypes=dtypes,
        operators=tuple(sorted(operators, key=lambda op: op.title)),
        left_out=left_out,
        notes=_notes(),
        seconds=seconds,
    )


def _rows(task: Task) -> tuple[Row, ...]:
    return summarize(task.cases, task.dtype)


def _notes() -> tuple[str, ...]:
    """What could not be observed on this torch."""
    image = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    if layout_copies(image.contiguous):
        return ()
    return ("torch's profiler shows no copies inside operators here, so none is reported",)
