"""Training on a terminal: log lines on stdout, a moving line below them on stderr."""

from __future__ import annotations

import sys
import time

import torch
from torch import nn

from ..environment import Environment
from ..render.training_text import log_line
from ..training import Point, Recipe
from ..training.distributed import rank_and_world
from .common import note


def headline(
    name: str, model: nn.Module, recipe: Recipe, batch_size: int, device: torch.device
) -> str:
    """What runs, and where: what a log is worth little without."""
    size = sum(p.numel() for p in model.parameters()) / 1e6
    layout = "channels last" if recipe.channels_last else "contiguous"
    dtype = str(recipe.autocast_dtype(device) or torch.float32).removeprefix("torch.")
    world = rank_and_world()[1]
    many = f" on {world} processes" if world > 1 else ""
    return (
        f"{name}: {size:.1f} million parameters, {layout}, {dtype}, batch {batch_size}{many}; "
        f"{Environment.here(device)}"
    )


class Screen:
    """Prints points as lines; where stderr is a terminal, keeps a line with the time left."""

    def __init__(self, epochs: int, batches: int, *, text: bool) -> None:
        self._epochs, self._batches, self._text = epochs, batches, text
        self._live = sys.stderr.isatty()
        self._began: tuple[float, int] | None = None

    def show(self, point: Point) -> None:
        self.clear()
        if self._text:
            print(log_line(point), flush=True)

    def tick(self, epoch: int, batch: int) -> None:
        done, total = epoch * self._batches + batch, self._epochs * self._batches
        now = time.monotonic()
        if self._began is None:
            # The first batch carries all that happens once; the rest is predicted without it.
            self._began = now, done
        if not self._live:
            return
        began, first = self._began
        left = ""
        if done > first:
            left = f", {_clock((now - began) / (done - first) * (total - done))} left"
        line = f"epoch {epoch + 1} of {self._epochs}, batch {batch} of {self._batches}{left}"
        print(f"\r\x1b[2K{line}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._live:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


class OnceEach:
    """Says each thing the first time only: a corrupt image comes by in every epoch."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def __call__(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            note(f"skipped: {text}")


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
