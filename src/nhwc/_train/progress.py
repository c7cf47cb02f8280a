"""The record of a run: one point per line of its log, and the sums that points are made from."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..displayed import Displayed
from ..errors import InputError
from ..machine.environment import Environment
from .distributed import rank_and_world, sum_over_processes
from .recipe import Recipe


@dataclass(frozen=True)
class Point:
    """The state of training after a batch, over all processes; `mean_` is over the epoch so far.

    `step` counts the batches of the whole run. For `phase` "val" there is one point per epoch, and
    the means are over the whole set.
    """

    phase: str
    epoch: int
    batch: int
    batches: int
    step: int
    time_s: float
    mean_time_s: float
    images_per_s: float
    mean_images_per_s: float
    loss: float
    mean_loss: float
    prec1: float
    mean_prec1: float
    prec5: float
    mean_prec5: float
    lr: float

    def to_dict(self) -> dict[str, float | str]:
        return asdict(self)


@dataclass(frozen=True)
class Training(Displayed):
    """A run: its points in order, and where it stopped if it was told to.

    >>> import nhwc
    >>> run = Training(Recipe(), (), nhwc.Environment.here("cpu"))
    >>> run.of("train"), run.to_dict()["schema"]
    ((), 1)

    `nhwc.train` returns one with a point for each line that it prints.
    """

    recipe: Recipe
    points: tuple[Point, ...]
    environment: Environment
    stopped_at: tuple[int, int] | None = None

    def of(self, phase: str) -> tuple[Point, ...]:
        """The points of "train" or "val"."""
        return tuple(point for point in self.points if point.phase == phase)

    def to_dict(self) -> dict[str, object]:
        return {
            "schema": 1,
            "recipe": self.recipe.to_dict(),
            "environment": self.environment.to_dict(),
            "stopped_at": self.stopped_at,
            "points": [point.to_dict() for point in self.points],
        }


def nothing_readable(phase: str) -> InputError:
    return InputError(f"the {phase} set has no readable image. Look at its files.")


class Meter:
    """Sums of an epoch, kept on the device: reading them waits for it, adding to them does not."""

    def __init__(self, device: torch.device, *, phase: str, epoch: int, batches: int) -> None:
        self.phase, self.epoch, self.batches = phase, epoch, batches
        # Images, loss, right at first guess, right within five: of the epoch and of one batch.
        self.sums = torch.zeros(4, device=device, dtype=torch.float64)
        self.last = torch.zeros_like(self.sums)
        self.elapsed_s, self.batch, self._seen = 0.0, 0, 0.0
        self._clock = time.perf_counter()

    def start(self) -> None:
        """Count time from now on."""
        self._clock = time.perf_counter()

    def add(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        guesses = logits.topk(min(5, logits.shape[1])).indices
        right = guesses.eq(labels[:, None])
        count = torch.full_like(self.sums[0], len(labels))
        self.last = torch.stack([count, loss * count, right[:, 0].sum(), right.sum()])
        self.sums += self.last

    def point(self, batch: int, *, step: int = 0, lr: float = 0.0) -> Point:
        """Read the sums, of all processes together. Every process must call this."""
        last, sums = sum_over_processes(torch.stack([self.last, self.sums])).tolist()
        if sums[0] == 0:
            raise nothing_readable(self.phase)
        passed, seen = self._lap(), sums[0] - self._seen
        done = batch - self.batch
        self.batch, self._seen = batch, sums[0]
        return Point(
            phase=self.phase,
            epoch=self.epoch,
            batch=batch,
            batches=self.batches,
            step=step,
            time_s=passed / done,
            mean_time_s=self.elapsed_s / batch,
            images_per_s=seen / passed,
            mean_images_per_s=sums[0] / self.elapsed_s,
            loss=last[1] / max(last[0], 1),
            mean_loss=sums[1] / sums[0],
            prec1=100 * last[2] / max(last[0], 1),
            mean_prec1=100 * sums[2] / sums[0],
            prec5=100 * last[3] / max(last[0], 1),
            mean_prec5=100 * sums[3] / sums[0],
            lr=lr,
        )

    def state(self) -> dict[str, Any]:
        """Return what `restore` needs, summed over all processes. Every process must call this."""
        sums = sum_over_processes(self.sums).tolist()
        return {"sums": sums, "elapsed_s": self.elapsed_s + time.perf_counter() - self._clock}

    def restore(self, state: dict[str, Any], batch: int) -> None:
        """Go on from `state`, as it was after `batch` batches."""
        if not isinstance(state["sums"], list) or len(state["sums"]) != len(self.sums):
            raise ValueError(f"the sums of its meter are no {len(self.sums)} numbers.")
        sums = torch.tensor(state["sums"], dtype=self.sums.dtype)
        self.batch, self._seen, self.elapsed_s = batch, float(sums[0]), float(state["elapsed_s"])
        # Only one process may hold the earlier sums, because `point` adds up all processes.
        if rank_and_world()[0] == 0:
            self.sums += sums.to(self.sums.device)

    def _lap(self) -> float:
        now = time.perf_counter()
        passed, self._clock = now - self._clock, now
        self.elapsed_s += passed
        return passed
