"""The whole state of a run in one place, so that it can stop anywhere and go on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import InputError, NhwcError, is_out_of_memory
from ..formats import Format, convert_
from ..machine.environment import Environment
from ..models.preserve import seed_generators
from ..shown import misfit
from .data import Data
from .distributed import parallel, rank_and_world
from .evaluation import check_width, evaluate
from .loader import Batch
from .optimizer import build_optimizer, learning_rate, load_optimizer_, running_average
from .progress import Meter, Point, Training, nothing_readable
from .recipe import Recipe
from .step import Normalize, TrainingStep

LOG_EVERY = 10


class Trainer:
    """A run at some epoch and batch, driven by `train` or by a loop of your own."""

    def __init__(self, model: nn.Module, data: Data, recipe: Recipe, device: torch.device) -> None:
        self.model = model.to(device)
        if recipe.channels_last:
            convert_(model, Format.CHANNELS_LAST)
        self.data, self.recipe, self.device = data, recipe, device
        self.average = running_average(model, recipe)
        self.normalize = Normalize(channels_last=recipe.channels_last)
        self.optimizer = build_optimizer(model, recipe)
        # Gradients that the caller left there would count in the first update.
        self.optimizer.zero_grad(set_to_none=True)
        wrapped = parallel(model, device)
        self.step = TrainingStep(
            cast(nn.Module, torch.compile(wrapped)) if recipe.compile else wrapped,
            self.optimizer,
            loss=self._loss,
            dtype=recipe.autocast_dtype(device),
            clip=recipe.clip,
            average=self.average,
        )
        self.epoch = self.batch = 0
        self.points: list[Point] = []
        self.meter = self._new_meter()

    def batches(self, on_point: Callable[[Point], None]) -> Iterator[bool]:
        """Train one epoch, or what is left of it; yields after each batch.

        It yields whether the weights moved: a run can be stored only after an update.
        """
        self.model.train()
        self.meter.start()
        for batch in self.data.train.batches(self.epoch, self.batch):
            lr = self._lr
            update = self._train_on(batch)
            self.batch += 1
            if self.batch % LOG_EVERY == 0 or self.batch == len(self.data.train):
                self._log(self.meter.point(self.batch, step=self._step, lr=lr), on_point)
            yield update
        if self.batch == 0:
            raise nothing_readable("train")

    def finish_epoch(self, on_point: Callable[[Point], None]) -> None:
        """Evaluate, with the averaged weights if there are any, and turn to the next epoch."""
        if self.data.val is not None:
            model = self.average.module if self.average is not None else self.model
            point = evaluate(
                model, self.data.val, self.recipe, device=self.device, epoch=self.epoch
            )
            self._log(replace(point, step=self._step, lr=self._lr), on_point)
        self.epoch, self.batch = self.epoch + 1, 0
        self.meter = self._new_meter()

    def state(self) -> dict[str, Any]:
        """Return the content of a checkpoint. In a process group every process must call this."""
        meter = self.meter.state()
        if not self.step.scaler.is_enabled():
            # Weights that are lost already would replace those of the last checkpoint.
            self._check(meter["sums"][1])
        return {
            "state_dict": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.step.scaler.state_dict(),
            "average": None if self.average is None else self.average.state_dict(),
            "epoch": self.epoch,
            "batch": self.batch,
            "meter": meter,
            "order": self._order,
            "points": [point.to_dict() for point in self.points],
            "classes": list(self.data.classes),
            "recipe": self.recipe.to_dict(),
        }

    def restore(self, state: dict[str, Any], name: str) -> None:
        """Go on from `state`; errors say that it is from `name`."""
        changed = any(self._order.get(key) != value for key, value in state["order"].items())
        if state["batch"] and changed:
            was = ", ".join(f"{key} {value}" for key, value in state["order"].items())
            raise InputError(
                f"{name} stopped inside an epoch, and this run would go through it in another "
                f"order. Use the same settings ({was}), or a checkpoint from the end of an epoch."
            )
        classes = list(self.data.classes)
        if state.get("classes", classes) != classes:
            raise InputError(
                f"{name} was trained for other classes, or for these in another order. Use the "
                "same folders."
            )
        try:
            self.model.load_state_dict(state["state_dict"])
            load_optimizer_(self.optimizer, state["optimizer"])
            if self.average is not None and state["average"] is not None:
                self.average.load_state_dict(state["average"])
            elif self.average is not None:
                self.average.module.load_state_dict(state["state_dict"])
            if self.step.scaler.is_enabled() and state["scaler"]:
                self.step.scaler.load_state_dict(state["scaler"])
            self.epoch, self.batch = state["epoch"], state["batch"]
            self.meter = self._new_meter()
            self.meter.restore(state["meter"], self.batch)
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            if is_out_of_memory(error):
                raise
            raise InputError(
                f"{name} does not fit this model and optimizer: {misfit(error)} Resume with those "
                "that it was saved from."
            ) from error
        self.points = [Point(**point) for point in state["points"]]

    def result(self, *, stopped: bool) -> Training:
        at = (self.epoch, self.batch) if stopped else None
        return Training(self.recipe, tuple(self.points), Environment.here(self.device), at)

    def _train_on(self, batch: Batch) -> bool:
        """Take one step; returns whether the weights moved."""
        first, last = self._window()
        for group in self.optimizer.param_groups:
            group["lr"] = self._lr
        # The seed depends on the place in the run alone: a resumed run draws the same numbers,
        # and no checkpoint has to hold the state of each process's generator.
        rank, world = rank_and_world()
        seed_generators(self.recipe.seed + self._step * world + rank)
        pixels = self.normalize(batch.images.to(self.device, non_blocking=True))
        labels = batch.labels.to(self.device, non_blocking=True)
        update = self.batch + 1 == last
        loss, logits = self.step(pixels, labels, share=1 / (last - first), update=update)
        self.meter.add(loss, logits, labels)
        return update

    def _window(self) -> tuple[int, int]:
        """The range of batches that share an update with this one; an epoch's last may be short."""
        first = self.batch - self.batch % self.recipe.accumulate
        return first, min(first + self.recipe.accumulate, len(self.data.train))

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        check_width(logits.shape[1], len(self.data.classes))
        return F.cross_entropy(logits, labels, label_smoothing=self.recipe.label_smoothing)

    def _log(self, point: Point, on_point: Callable[[Point], None]) -> None:
        self.points.append(point)
        on_point(point)
        if point.phase == "train":
            self._check(point.loss)

    def _check(self, loss: float) -> None:
        if not math.isfinite(loss):
            raise NhwcError(
                f"the loss is {loss} in epoch {self.epoch} after batch {self.batch}. Lower the "
                "learning rate, warm it up, or clip gradients."
            )

    def _new_meter(self) -> Meter:
        return Meter(self.device, phase="train", epoch=self.epoch, batches=len(self.data.train))

    @property
    def _step(self) -> int:
        return self.epoch * len(self.data.train) + self.batch

    @property
    def _lr(self) -> float:
        each = math.ceil(len(self.data.train) / self.recipe.accumulate)
        update = self.epoch * each + self.batch // self.recipe.accumulate
        return learning_rate(update, self.recipe.epochs * each, self.recipe)

    @property
    def _order(self) -> dict[str, int]:
        loader = self.data.train
        return {
            "batch_size": loader.batch_size,
            "seed": loader.seed,
            "batches": len(loader),
            "images": loader.order.length,
            "accumulate": self.recipe.accumulate,
        }
