"""The verb: measure the operators of the installed torch."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence

import torch

from ..errors import InputError
from ..machine.environment import Environment, available_cores, usable_device
from ..machine.workers import Nursery
from .inside import layout_copies
from .pool import Lane, listed, measure
from .table import Operator, OperatorTable

DTYPES = ("float32", "bfloat16", "float16", "uint8")

Progress = Callable[[int, int, str], None]
"""Called with the number of operators done, their total, and the name of the latest."""


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
    the first dtype. Operators run in processes of their own: the table reports one that crashes.
    """
    if isinstance(dtypes, str) or not dtypes or not all(isinstance(one, str) for one in dtypes):
        raise InputError('dtypes are names in a tuple, one or more. Give them: ("float32",).')
    dtypes = tuple(_check_dtype(dtype) for dtype in dtypes)
    if not all(isinstance(name, str) for name in names):
        raise InputError(
            f'names are given one by one, as in ops("pad", "relu"); {names[0]!r:.80} is no name.'
        )
    device = str(usable_device(device))
    start = time.monotonic()
    report = progress or (lambda done, total, title: None)
    # An accelerator gets one process at a time: two would slow each other, and time that.
    count = min(4, available_cores()) if device == "cpu" else 1
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    with contextlib.ExitStack() as stack:
        nursery = stack.enter_context(
            Nursery("nhwc._ops.worker", device, threads=1, environment=hidden)
        )
        lanes = [stack.enter_context(Lane(nursery)) for _ in range(count)]
        found, problems = listed(lanes[0])
        wanted = [op for op in found if not names or any(op.answers_to(name) for name in names)]
        _check_names(names, wanted, found, problems)
        total = len(wanted)
        answers = measure(
            nursery,
            lanes,
            wanted,
            device,
            dtypes,
            timed=timed,
            progress=lambda done, title: report(done, total, title),
        )
    operators = [answer for answer in answers.values() if isinstance(answer, Operator)]
    left_out = {name: why for name, why in problems.items() if not names or name in names}
    left_out.update((title, why) for title, why in answers.items() if isinstance(why, str))
    return OperatorTable(
        environment=Environment.here(device).to_dict(),
        device=device,
        dtypes=dtypes,
        operators=tuple(sorted(operators, key=lambda op: op.title)),
        left_out=dict(sorted(left_out.items())),
        notes=_notes(),
        seconds=time.monotonic() - start,
    )


def _check_dtype(name: str) -> str:
    if not isinstance(getattr(torch, name, None), torch.dtype):
        raise InputError(f"torch has no dtype {name!r}. Try float32, bfloat16, float16 or uint8.")
    return name


def _check_names(
    names: Sequence[str], wanted: list[Operator], found: list[Operator], problems: dict[str, str]
) -> None:
    for name in names:
        if any(op.answers_to(name) for op in wanted):
            continue
        if name in problems:
            raise InputError(f"operator {name!r} is not checked: {problems[name]}.")
        unread = [f"{what} {why}" for what, why in problems.items() if "database" in what]
        if unread:
            advice = " pip install 'nhwc[ops]'." if "expecttest" in unread[0] else ""
            raise InputError(f"operator {name!r} is not known: {unread[0]}.{advice}")
        import difflib

        known = {op.name.rpartition(".")[2] for op in found} | {op.name for op in found}
        near = difflib.get_close_matches(name, sorted(known), n=3)
        hint = f"Did you mean {', '.join(near)}?" if near else "List them with: nhwc ops"
        raise InputError(f"this torch has no operator {name!r}. {hint}")


def _notes() -> tuple[str, ...]:
    """Say what could not be observed on this torch."""
    image = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    if layout_copies(image.contiguous):
        return ()
    return ("torch's profiler shows no copies inside operators here, so none is reported",)
