"""Training on a terminal: log lines on stdout, a moving line below them on stderr."""

from __future__ import annotations

import time

import torch
from torch import nn

from .._train import Point, Recipe
from .._train.distributed import rank_and_world
from ..machine.environment import Environment
from ..render.train_text import log_line
from .progress import ProgressLine, note, put


def headline(
    name: str, model: nn.Module, recipe: Recipe, batch_size: int, device: torch.device
) -> str:
    """Describe in a line what runs, how and where, to head the log."""
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
    """Prints points as lines, with a progress line below them."""

    def __init__(self, epochs: int, batches: int, *, text: bool) -> None:
        self._epochs, self._batches, self._text = epochs, batches, text
        self._line = ProgressLine()
        self._began: tuple[float, int] | None = None

    def show(self, point: Point) -> None:
        self.clear()
        if self._text:
            put(log_line(point))

    def tick(self, epoch: int, batch: int) -> None:
        done, total = epoch * self._batches + batch, self._epochs * self._batches
        now = time.monotonic()
        if self._began is None:
            # The first batch includes work that happens once, so the prediction leaves it out.
            self._began = now, done
        began, first = self._began
        left = (now - began) / (done - first) * (total - done) if done > first else None
        place = f"epoch {epoch + 1} of {self._epochs}, batch {batch} of {self._batches}"
        self._line.update(place, done / total, left)

    def clear(self) -> None:
        self._line.clear()


class OnceEach:
    """Reports each text only once: a corrupt image comes up in every epoch."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def __call__(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            note(f"skipped: {text}")
