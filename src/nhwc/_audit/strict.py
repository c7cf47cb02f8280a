"""`strict()`: stop at the first operator that drops channels last."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch
from torch import nn

from ..errors import FormatLost, InputError, of_kind
from ..watch.calls import Call, described
from ..watch.effects import Effect, Tracker
from ..watch.recorder import Recorder, tell, was_in_script
from .remedies import remedy


@contextlib.contextmanager
def strict(model: nn.Module | None = None) -> Iterator[None]:
    """Raise `FormatLost` at the first operator that gets channels last and returns another format.

    >>> import torch
    >>> x = torch.rand(2, 3, 8, 8).to(memory_format=torch.channels_last)
    >>> with strict():
    ...     x.tril()
    Traceback (most recent call last):
    nhwc.errors.FormatLost: torch.Tensor.tril lost channels last ...

    To an error of an operator itself it adds that operator's inputs, as they lie in memory.
    Give the `model` to have the module's path in the message. Conversions that the code asks for
    (`.contiguous()`, a reshape that must copy) and views are no loss. It watches the thread that
    enters it, forward and backward. TorchScript shows single kernels, unless it runs under
    `torch.inference_mode()`. Nothing tells whether its code asked for a conversion between two
    kernels, so the first one is warned of.
    """
    if model is not None and not isinstance(model, nn.Module):
        raise InputError(
            f"cannot watch {of_kind(model)}: it is no torch.nn.Module. "
            "Write `with strict(): ...` for code without one."
        )
    tracker = Tracker()
    lost: list[FormatLost] = []
    unclear: list[Call] = []

    def check(call: Call) -> None:
        outcome = tracker.follow(call)
        if outcome.effect in (Effect.LOSES, Effect.MISREADS):
            lost.append(FormatLost(_message(call, outcome.effect)))
            raise lost[-1]
        if outcome.effect is Effect.CONVERTS and _is_of_script(call) and not unclear:
            unclear.append(call)
            place = call.site.file or "TorchScript", call.site.line
            warnings.warn_explicit(_unclear(call), UserWarning, *place)

    recorder = Recorder(model, on_call=check)
    try:
        with recorder:
            yield
    except RuntimeError as error:
        if was_in_script(error):
            if lost:
                raise lost[-1] from error
            tell(error, recorder.failed)
        raise


def _is_of_script(call: Call) -> bool:
    """Whether TorchScript ran this kernel: calls from Python are named `torch...`."""
    kernel = call.operator.startswith("aten::") and not call.backward
    return kernel and not torch.is_inference_mode_enabled()


def _unclear(call: Call) -> str:
    return (
        f"{call.operator} converted to {call.outputs[0].format} inside TorchScript "
        f"{call.site.words}: asked for, or inside an operator that drops the format. Run it under "
        "torch.inference_mode(), which shows operators whole."
    )


def _message(call: Call, effect: Effect) -> str:
    phase = " in the backward pass" if call.backward else ""
    source = f": {call.site.source!r}" if call.site.source else ""
    return (
        f"{call.operator} lost channels last{phase} {call.site.words}{source}. "
        f"Inputs: {described(call.inputs)}. Outputs: {described(call.outputs)}. "
        f"{remedy(call, effect)}"
    )
