"""`strict()`: stop at the first operator that drops channels last."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from .errors import FormatLost, InputError
from .watch.calls import Call, TensorSpec
from .watch.effects import Effect, Tracker
from .watch.recorder import Recorder
from .watch.remedies import remedy


@contextlib.contextmanager
def strict(model: nn.Module | None = None) -> Iterator[None]:
    """Raise `FormatLost` at the first operator that gets channels last and returns another format.

    >>> import torch
    >>> x = torch.rand(2, 3, 8, 8).to(memory_format=torch.channels_last)
    >>> with strict():
    ...     x.tril()
    Traceback (most recent call last):
    nhwc.errors.FormatLost: torch.Tensor.tril lost channels last ...

    Give the `model` to have the module's path in the message. Conversions that the code asks for
    (`.contiguous()`, a reshape that must copy) and views are no loss. It holds for the thread that
    enters it, forward and backward.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise InputError(
            f"cannot watch a {type(model).__name__}: it is no torch.nn.Module. "
            "Write `with strict(): ...` for code without one."
        )
    tracker = Tracker()

    def check(call: Call) -> None:
        outcome = tracker.follow(call)
        if outcome.effect in (Effect.LOSES, Effect.MISREADS):
            raise FormatLost(_message(call, outcome.effect))

    with Recorder(model, on_call=check):
        yield


def _message(call: Call, effect: Effect) -> str:
    site = call.site
    where = f"{site.file}:{site.line}" if site.file else "an unknown line"
    name = f"module {site.module}" if site.module else "the model"
    module = f" in {name} ({site.module_type})" if site.module_type else ""
    phase = " in the backward pass" if call.backward else ""
    inputs = "; ".join(_describe(i) for i in call.inputs)
    outputs = "; ".join(_describe(o) for o in call.outputs)
    return (
        f"{call.operator} lost channels last{phase} at {where}{module}: {site.source!r}. "
        f"Inputs: {inputs}. Outputs: {outputs}. {remedy(call, effect)}"
    )


def _describe(spec: TensorSpec) -> str:
    return f"shape {spec.shape} strides {spec.strides} ({spec.format})"
