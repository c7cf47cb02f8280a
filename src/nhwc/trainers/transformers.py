"""A callback for Hugging Face's Trainer: `Trainer(..., callbacks=[ChannelsLast()])`."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn
from tqdm.auto import tqdm
from transformers import TrainerCallback

from .._audit.step import FirstStep
from ..render.step_text import step_text
from .hooked import Hooked, convert_unless_sharded_


class ChannelsLast(TrainerCallback):
    """Train in channels last, and say what the first step did to memory formats.

    >>> callback = ChannelsLast()

    Afterwards `callback.first_step` holds the audit of the first step.
    """

    def __init__(self) -> None:
        self.first_step: FirstStep | None = None
        self._hooked: Hooked | None = None

    def on_init_end(
        self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **kwargs: Any
    ) -> None:
        # Here the model is not wrapped yet: DistributedDataParallel keeps the strides it meets.
        if model is not None:
            convert_unless_sharded_(model, sharded=_sharded(args))

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any
    ) -> None:
        self._unhook()
        # `model_init` makes the model anew.
        convert_unless_sharded_(model, sharded=_sharded(args))

        def tell(step: FirstStep) -> None:
            self.first_step = step
            if state.is_world_process_zero:
                # As the Trainer's own callback does: this leaves its progress bar whole.
                tqdm.write(step_text(step), file=sys.stderr)

        self._hooked = Hooked(model, tell)
        optimizer = kwargs.get("optimizer")
        self._hooked.follow([getattr(optimizer, "optimizer", optimizer)] if optimizer else [])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._unhook()

    def _unhook(self) -> None:
        if self._hooked is not None:
            self._hooked.remove()
            self._hooked = None


def _sharded(args: Any) -> bool:
    return bool(args.fsdp or args.deepspeed)
