"""What a callback of Lightning does, whichever of its two packages it comes from."""

from __future__ import annotations

import contextlib
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from .._audit.step import FirstStep, StepWatch
from ..render.step_text import step_text
from .hooked import LastImages, before_step, convert_unless_sharded_, refuse_overruns

_SHARDED = ("FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy")


class LightningHooks:
    """Converts before the strategy wraps the model; watches the first step from batch to update."""

    first_step: FirstStep | None = None
    """What the first step did, once there was one."""

    def __init__(self) -> None:
        super().__init__()
        self._images: LastImages | None = None
        self._watch: StepWatch | None = None
        self._open = contextlib.ExitStack()
        self._made: list[Any] = []
        self._handles: list[Any] = []
        self._guards: list[Any] = []

    def _say(self, text: str) -> None:
        raise NotImplementedError

    def setup(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        self._convert_(trainer, pl_module)

    def on_fit_start(self, trainer: Any, pl_module: nn.Module) -> None:
        # `configure_model` makes layers after `setup`.
        self._convert_(trainer, pl_module)
        self._guards = refuse_overruns(pl_module)

    def on_fit_end(self, trainer: Any, pl_module: nn.Module) -> None:
        for guard in self._guards:
            guard.remove()

    def on_train_batch_start(
        self, trainer: Any, pl_module: nn.Module, batch: Any, batch_idx: int
    ) -> None:
        self._mark_(pl_module, batch)
        if self.first_step is None and self._watch is None:
            self._watch = StepWatch(pl_module)
            for optimizer in trainer.optimizers:
                self._handles.append(optimizer.register_step_pre_hook(before_step))
                self._handles.append(optimizer.register_step_post_hook(self._updated))
            self._made = self._open.enter_context(self._watch.forward(batch))

    def on_before_backward(self, trainer: Any, pl_module: nn.Module, loss: Tensor) -> None:
        self._made.append(loss)
        self._close()

    def on_train_batch_end(
        self, trainer: Any, pl_module: nn.Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._close()
        if self.first_step is not None:
            self._forget()

    def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:
        self._close()
        self._forget()
        self.on_fit_end(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Any, pl_module: nn.Module) -> None:
        # A module that skips a batch, and with it the epoch, skips what follows the batch, too.
        self._close()
        self._forget()

    def on_validation_batch_start(
        self,
        trainer: Any,
        pl_module: nn.Module,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._mark_(pl_module, batch)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    def _convert_(self, trainer: Any, model: nn.Module) -> None:
        sharded = any(kind.__name__ in _SHARDED for kind in type(trainer.strategy).__mro__)
        convert_unless_sharded_(model, sharded=sharded)
        self._images = LastImages.of(model)

    def _mark_(self, model: nn.Module, batch: Any) -> None:
        images = self._images or LastImages.of(model)
        apply_to_collection(batch, Tensor, images.mark_, allow_frozen=True)

    def _updated(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._watch is not None and self.first_step is None:
            self._close()
            self.first_step = self._watch.result([optimizer])
            self._say(step_text(self.first_step))

    def _close(self) -> None:
        self._open.close()
        self._made = []

    def _forget(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._watch = None
