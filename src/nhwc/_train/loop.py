"""`train`: epochs, evaluation after each, checkpoints in between."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from ..errors import InputError, of_kind
from ..machine.environment import usable_device
from ..models.kinds import check_devices, check_initialized, module_of
from ..models.preserve import cards
from ..operators.overrun import layers_that_overrun, overrun_told
from .checkpoint import load_checkpoint, save_checkpoint
from .data import Data
from .distributed import any_process, lost_processes_named, rank_and_world
from .evaluation import modes_kept
from .progress import Point, Training
from .recipe import Recipe, whole
from .trainer import Trainer


def train(
    model: nn.Module,
    data: Data,
    recipe: Recipe = Recipe(),  # noqa: B008 - frozen
    *,
    device: torch.device | str = "cpu",
    checkpoint: str | Path | None = None,
    checkpoint_every: int | None = None,
    resume: str | Path | None = None,
    stop: Callable[[], bool] = lambda: False,
    on_point: Callable[[Point], None] = lambda point: None,
    on_batch: Callable[[int, int], None] = lambda epoch, batch: None,
) -> Training:
    """Train `model` in place on `data`.

    >>> from nhwc.training import Recipe, synthetic
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    >>> data = synthetic(batch_size=16, shape=(16, 16, 3), classes=8, batches=4)
    >>> run = train(net, data, Recipe(epochs=2, channels_last=True))
    >>> [(point.epoch, point.batch) for point in run.points]
    [(0, 4), (1, 4)]

    In a torch.distributed process group each process calls this and takes its share of each
    batch. A checkpoint is written after each epoch, every `checkpoint_every` batches, and once
    `stop` returns true in any process, upon which the run ends; `resume` goes on from one, to the
    same numbers. `on_point` gets a point every ten batches and one per evaluation, `on_batch` the
    epoch and the number of batches done after each batch; both in each process.
    """
    model = module_of(model, "train")
    check_initialized(model)
    check_devices(model, [])
    for name, value, kind in (("data", data, Data), ("recipe", recipe, Recipe)):
        if not isinstance(value, kind):
            raise InputError(f"{name} is {of_kind(value)}. Give a nhwc.training.{kind.__name__}.")
    if checkpoint_every is not None:
        whole(1, checkpoint_every=checkpoint_every)
    device = usable_device(device)
    if recipe.channels_last and device.type == "cpu" and recipe.autocast_dtype(device) is None:
        _check_gradients(model)
    with lost_processes_named(), torch.random.fork_rng(devices=cards()), modes_kept(model):
        trainer = Trainer(model, data, recipe, device)
        if resume is not None:
            trainer.restore(load_checkpoint(resume), str(resume))
        while trainer.epoch < recipe.epochs:
            saved = trainer.batch
            for updated in trainer.batches(on_point):
                on_batch(trainer.epoch, trainer.batch)
                if not updated:
                    continue
                if any_process(stop()):
                    _save(trainer, checkpoint)
                    return trainer.result(stopped=True)
                if checkpoint_every is not None and trainer.batch - saved >= checkpoint_every:
                    _save(trainer, checkpoint)
                    saved = trainer.batch
            if data.val is not None:
                # Evaluation can take long; a run that is killed in it should not lose the epoch.
                _save(trainer, checkpoint)
            trainer.finish_epoch(on_point)
            _save(trainer, checkpoint)
    return trainer.result(stopped=False)


def _check_gradients(model: nn.Module) -> None:
    """Refuse layers whose gradients torch writes past their memory on a CPU in channels last."""
    for path, layer in layers_that_overrun(model):
        if layer.weight.requires_grad:
            told = overrun_told(path, layer)
            raise InputError(f"{told} Train without --channels-last, or with --amp.")


def _save(trainer: Trainer, path: str | Path | None) -> None:
    if path is None:
        return
    state = trainer.state()
    if rank_and_world()[0] == 0:
        save_checkpoint(path, state)
