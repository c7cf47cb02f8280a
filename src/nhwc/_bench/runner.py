"""`bench`: one or many cases, measured one after the other; what was measured is never lost."""

from __future__ import annotations

import dataclasses
import io
import math
import pickle
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from ..errors import InputError
from ..machine.environment import Environment, available_cores, usable_device
from ..machine.workers import Nurseries
from ..models.kinds import module_of, true_or_false
from ..models.scripts import bytes_of_script
from .engines import QUICK, chosen, find_engine
from .paired import FEWEST, WORKER, Task, measure
from .results import Benchmark, Case, Measurement, Row

Model = str | nn.Module | ExportedProgram

SECONDS = 10.0
"""The time for all turns of one case, without set-up."""


@dataclass(frozen=True)
class Progress:
    """The state of a benchmark: what it is doing, and the share of the whole that is done."""

    case: Case
    doing: str
    share: float
    elapsed_s: float

    @property
    def remaining_s(self) -> float | None:
        """The seconds left at the present pace; None until 2 % are done."""
        return self.elapsed_s * (1 - self.share) / self.share if self.share > 0.02 else None


def bench(
    model: Model | Sequence[Model],
    *,
    shape: tuple[int, ...] = (1, 3, 224, 224),
    variants: str | Sequence[str] = QUICK,
    batches: Sequence[int] = (),
    threads: Sequence[int] = (),
    train: bool = False,
    amp: bool = False,
    device: str = "cpu",
    weights: str | None = None,
    seed: int = 0,
    seconds: float = SECONDS,
    progress: Callable[[Progress], None] | None = None,
) -> Benchmark:
    """Time ways to run a model side by side, each in its own process, all in one run.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    >>> result = bench(net, shape=(1, 3, 8, 8), variants=("eager", "channels_last"), seconds=0.1)
    >>> len(result.rows[0].comparison("channels_last", "eager").interval)
    2

    A model is a name as on the command line, a module or an exported program; the last two are
    sent to the processes as they are. `batches` and `threads` measure every combination; the
    variant "all" stands for every engine that is installed. Ctrl-C returns what was measured so
    far, with `interrupted` set.
    """
    several = isinstance(model, Sequence) and not isinstance(model, str)
    models: list[Any] = list(model) if several else [model]  # type: ignore[arg-type]
    if not isinstance(shape, (tuple, list)) or not all(isinstance(n, int) and n > 0 for n in shape):
        raise InputError(f"{shape!r:.80} is no shape. Give one: shape=(1, 3, 224, 224).")
    if not isinstance(seconds, (int, float)) or not 0 < seconds < math.inf:
        raise InputError(f"seconds {seconds!r:.80} is no time to measure for. Use 10, say.")
    true_or_false(train=train, amp=amp)
    device = str(usable_device(device))
    names, sent = _names_and_bytes(models)
    tasks = [
        Task(Case(name, (shape,), count, train, amp, device, seed, weights), chosen(variants))
        for name in names
        for count in threads or (available_cores(),)
    ]
    tasks = [
        dataclasses.replace(task, case=task.case.with_batch(batch))
        for task in tasks
        for batch in batches or (task.case.batch,)
    ]
    return run(tasks, seconds=seconds, sent=sent, progress=progress)


def run(
    tasks: Sequence[Task],
    *,
    title: str = "",
    seconds: float = SECONDS,
    sent: dict[str, bytes] | None = None,
    done: Benchmark | None = None,
    progress: Callable[[Progress], None] | None = None,
    checkpoint: Callable[[Benchmark], None] | None = None,
) -> Benchmark:
    """Measure the tasks that `done` does not hold; `checkpoint` gets the result after each."""
    tasks = _once(tasks)
    for task in tasks:
        _check(task)
    result = _begin(tasks, title, done)
    kept = {row.case: row for row in result.rows}
    missing = _missing(tasks, result)
    whole_s = sum(task.expected_s for task in missing)
    start = time.perf_counter()
    with Nurseries(WORKER) as nurseries:
        for position, task in enumerate(missing):
            before_s = sum(earlier.expected_s for earlier in missing[:position])

            def tell(
                doing: str, share: float, task: Task = task, before_s: float = before_s
            ) -> None:
                if progress:
                    done_s = before_s + share * task.expected_s
                    elapsed_s = time.perf_counter() - start
                    progress(Progress(task.case, doing, done_s / whole_s, elapsed_s))

            own = (sent or {}).get(task.case.model, b"")
            row, interrupted = measure(
                task, nurseries.of(task.case.threads), seconds=seconds, sent=own, progress=tell
            )
            # A row that is whole is worth more than one with fewer turns.
            if not interrupted or (row.measured and task.case not in kept):
                kept[task.case] = row
            rows = _in_order(kept, tasks)
            last = position == len(missing) - 1
            result = dataclasses.replace(result, rows=rows, interrupted=interrupted or not last)
            if checkpoint:
                checkpoint(result)
            if interrupted:
                return result
    return dataclasses.replace(result, interrupted=False)


def left_to_do(tasks: Sequence[Task], done: Benchmark | None) -> list[Task]:
    """The tasks that a run that goes on from `done` will measure."""
    return _missing(_once(tasks), _begin(tasks, "", done))


def _once(tasks: Sequence[Task]) -> list[Task]:
    return [*{task.case: task for task in tasks}.values()]


def _missing(tasks: Sequence[Task], result: Benchmark) -> list[Task]:
    kept = {row.case: row for row in result.rows}
    left = [task for task in tasks if not _holds(kept.get(task.case), task)]
    return [_with_variants_of(kept.get(task.case), task) for task in left]


def _with_variants_of(row: Row | None, task: Task) -> Task:
    """`task`, with what was measured of its case before: only what ran in turns is comparable."""
    before = [m.variant for m in row.measurements] if row else []
    return dataclasses.replace(task, variants=tuple(dict.fromkeys((*task.variants, *before))))


def _begin(tasks: Sequence[Task], title: str, done: Benchmark | None) -> Benchmark:
    device = tasks[0].case.device if tasks else "cpu"
    most = max((task.case.threads for task in tasks), default=available_cores())
    here = dataclasses.replace(Environment.here(device), threads=most)
    if done is None:
        baseline = "eager" if any("eager" in task.variants for task in tasks) else ""
        baseline = baseline or (tasks[0].variants[0] if tasks else "eager")
        return Benchmark(here, baseline=baseline, title=title)
    if dataclasses.replace(done.environment, threads=most) != here:
        raise InputError(
            f"cannot resume: that was measured on {done.environment}, this is {here}. "
            "Measure it anew, into another file."
        )
    # A row that Ctrl-C cut short has too few turns for a verdict, so it is measured again.
    whole = [row for row in done.rows if not (done.interrupted and _cut_short(row))]
    return dataclasses.replace(done, rows=tuple(whole))


def _cut_short(row: Row) -> bool:
    return any(0 < len(m.turns) < FEWEST for m in row.measurements)


def _holds(row: Row | None, task: Task) -> bool:
    if row is None or row.failure:
        return False
    return set(task.variants) <= {m.variant for m in row.measurements if not _may_run_now(m)}


def _may_run_now(found: Measurement) -> bool:
    """Whether it was not run for want of a package that is here now."""
    engine = find_engine(found.variant)
    return found.failure == engine.not_installed and not engine.missing


def _in_order(kept: dict[Case, Row], tasks: Iterable[Task]) -> tuple[Row, ...]:
    order = [task.case for task in tasks]
    others = [case for case in kept if case not in order]
    return tuple(kept[case] for case in [*others, *order] if case in kept)


def _check(task: Task) -> None:
    for variant in task.variants:
        find_engine(variant)
    if task.case.threads < 1:
        raise InputError(f"{task.case.threads} threads cannot run anything. Ask for 1 or more.")
    if task.case.batch < 1:
        raise InputError(f"a batch of {task.case.batch} is empty. Ask for 1 or more.")


def _names_and_bytes(models: Sequence[Model]) -> tuple[list[str], dict[str, bytes]]:
    names: list[str] = []
    sent: dict[str, bytes] = {}
    for named in models:
        if isinstance(named, str):
            names.append(named)
            continue
        model = named if isinstance(named, ExportedProgram) else module_of(named, "bench")
        kind = type(named).__name__
        name = kind if kind not in names else f"{kind} ({len(names) + 1})"
        names.append(name)
        sent[name] = _pickled(model)
    return names, sent


def _pickled(model: nn.Module | ExportedProgram) -> bytes:
    """Pickle the model for other processes, which import its class by name.

    They cannot import a class defined in a script or notebook; cloudpickle, where it is
    installed, sends its code along.
    """
    try:
        if isinstance(model, torch.jit.ScriptModule):
            return bytes_of_script(model)
        if isinstance(model, ExportedProgram):
            file = io.BytesIO()
            torch.export.save(model, file)
            return file.getvalue()
        homes = {type(module).__module__ for module in model.modules()}
        if "__main__" not in homes:
            return pickle.dumps(model)
        import cloudpickle

        return bytes(cloudpickle.dumps(model))
    except Exception as error:
        # Pickling runs the model's own code, which may raise anything.
        raise InputError(
            f"{type(model).__name__} cannot be sent to another process ({error}). "
            "Give it by name, 'file.py:callable', or: pip install cloudpickle."
        ) from error
