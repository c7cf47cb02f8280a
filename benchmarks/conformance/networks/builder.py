"""Grow a network step by step, each tried on real tensors."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .network import Network, Step

_MOST = 1 << 16
"""No value has more elements than this: a case should take milliseconds."""

Made = tuple[str, Callable[..., Any], tuple[int, ...], nn.Module | None]
"""A step to be: its name, its function, the other values that it takes, and its layer."""

Maker = Callable[["Builder", Tensor], Made | None]


class Builder:
    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        torch.manual_seed(draw.randrange(1 << 30))
        dims = draw.choice((2, 2, 2, 2, 1, 3))
        batch = draw.choice((1, 1, 2, 3, 0)) if draw.random() < 0.3 else draw.choice((1, 2))
        most = {1: 40, 2: 20, 3: 9}[dims]
        shape = (
            batch,
            draw.choice((1, 3, 4, 8, 12, 17)),
            *(draw.randint(5, most) for _ in range(dims)),
        )
        self.steps: list[Step] = []
        self.layers: list[nn.Module] = []
        self.values: list[Tensor] = [torch.randn(shape), torch.randn(self._beside(shape))]
        if dims == 2 and draw.random() < 0.3:
            self.values = [channels_last(x) for x in self.values]
        self.inputs = tuple(x.clone() for x in self.values)

    def _beside(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the second input: the first's, another image's, or that of a few numbers."""
        draw, (batch, channels, *sides) = self.draw, shape
        kind = draw.random()
        if kind < 0.7:
            return shape
        if kind < 0.9:
            return (batch, draw.choice((channels, 2, 5)), *(max(1, side // 2) for side in sides))
        return (batch, channels)

    def grow(self, makers: Sequence[Maker]) -> None:
        """Add a step by one of the `makers`; try others where PyTorch refuses one."""
        for _ in range(20):
            make = self.draw.choice(makers)
            if self._adds(make):
                return

    def _adds(self, make: Maker) -> bool:
        known = len(self.layers)
        place = self._some_value()
        made = make(self, self.values[place])
        if made is None:
            return False
        name, function, others, layer = made
        layer_place = None
        if layer is not None:
            randomize(layer)
            self.layers.append(layer.eval())
            layer_place = known
        takes = (place, *others)
        # Writes reach the values that share memory, as they do when the network runs.
        given = [self.values[p] for p in takes]
        try:
            with torch.no_grad():
                value = function(*([] if layer is None else [layer]), *given)
        except (RuntimeError, ValueError, IndexError, NotImplementedError, AssertionError):
            del self.layers[known:]
            return False
        if not isinstance(value, Tensor) or value.numel() > _MOST or not value.dim():
            del self.layers[known:]
            return False
        if value.is_floating_point() and not bool(value.isfinite().all()):
            del self.layers[known:]
            return False
        self.steps.append(Step(name, function, takes, layer_place))
        self.values.append(value)
        return True

    def _some_value(self) -> int:
        """A value, most likely one of the last."""
        last = len(self.values) - 1
        return max(0, last - int(self.draw.expovariate(0.7)))

    def like(self, x: Tensor) -> int | None:
        """Another value of the same shape."""
        found = [place for place, y in enumerate(self.values) if y.shape == x.shape]
        return self.draw.choice(found) if found else None

    def finished(self) -> tuple[Network, tuple[Tensor, ...]]:
        taken = {place for step in self.steps for place in step.takes}
        unread = [place for place in range(2, len(self.values)) if place not in taken]
        returned = unread[-3:] or [len(self.values) - 1]
        kind = self.draw.choice((tuple, list, dict))
        returns = {f"out{n}": p for n, p in enumerate(returned)} if kind is dict else kind(returned)
        return Network(self.steps, self.layers, returns).eval(), self.inputs


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x


def randomize(layer: nn.Module) -> None:
    """Give statistics and scales values that would show a fold that is wrong."""
    for name, value in [*layer.named_parameters(), *layer.named_buffers()]:
        if "var" in name:
            nn.init.uniform_(value, 0.5, 2.0)
        elif "mean" in name or (value.dim() == 1 and value.is_floating_point()):
            nn.init.uniform_(value, -1.0, 1.0)
