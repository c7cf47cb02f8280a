"""What a model answers in float64, and how much of an error is the model's own.

Some models enlarge whatever rounding comes in: a layer norm over three nearly equal numbers, an
image that is sampled where a convolution says. Two runs in float32 that round in another order are
far apart, and neither is at fault. So an answer that is farther from the exact one than eager's is
held against the model itself. That is asked in float64 again, with the numbers of its inputs and
weights moved by at most the rounding of float32, that of the largest number of the same tensor: the
error of fast algorithms, Winograd's among them, is bounded by this, not by each number's own. So
is what each layer answers: pixels of a plain background may be equal whatever goes in, and which of
them a pooling takes is up to the rounding of a layer. What the model then strays by no run in
float32 can be blamed for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nhwc.models.preserve import copy_as_is

TIMES = 16
"""An error may be so many times that of eager, or of one rounding of what goes in."""

_LEAST = 2e-5
_ROUNDING = 2.0**-24
_RUNS = 4

Ask = Callable[[nn.Module, tuple[Any, ...]], list[Any]]


class Exact:
    """The leaves of the exact answer, and `steep`: what was right by the model's own measure."""

    def __init__(self, ask: Ask, model: nn.Module, inputs: tuple[Any, ...]) -> None:
        """`ask` calls a model in float64 and gives the leaves of its answer: none if it raises."""
        self._ask, self._model, self._inputs = ask, model, inputs
        self.leaves = ask(self._doubled(), _wide(inputs))
        self.steep: list[str] = []

    def farther(self, place: int, expected: Tensor, given: Tensor) -> str:
        """Say if `given` is much farther from the exact values than the model can be blamed for."""
        if not torch.equal(given.isfinite(), expected.isfinite()):
            return "is finite at other places"
        if not expected.numel():
            return ""
        theirs, ours = self._off(place, expected), self._off(place, given)
        if ours <= max(TIMES * theirs, _LEAST):
            return ""
        rounded = max(
            (self._off(place, near[place]) for near in self._rounded if near), default=0.0
        )
        said = f"is off by {ours:.1e}, eager by {theirs:.1e}"
        if ours > TIMES * rounded:
            return f"{said}, rounded inputs and weights by {rounded:.1e}"
        self.steep.append(f"{said}, the model itself by {rounded:.1e} if what goes in is rounded")
        return ""

    def _off(self, place: int, found: Tensor) -> float:
        """The largest error of `found`, as a share of the largest value."""
        exact = self.leaves[place]
        scale = exact.abs().nan_to_num(0, 0, 0).max().clamp(min=1e-30)
        return float((found.double() - exact).abs().nan_to_num(0, 0, 0).max() / scale)

    @cached_property
    def _rounded(self) -> list[list[Any]]:
        """The answers if inputs, weights and results of layers are moved by a rounding."""
        return [self._moved(seed) for seed in range(_RUNS)]

    def _moved(self, seed: int) -> list[Any]:
        generator = torch.Generator().manual_seed(seed)
        model = self._doubled()
        for weight in (*model.parameters(), *model.buffers()):
            weight.data = _moved(weight.data, generator)
        moved = lambda value: pytree.tree_map_only(Tensor, lambda x: _moved(x, generator), value)
        for layer in model.modules():
            if not any(layer.children()):
                layer.register_forward_hook(lambda layer, given, result: moved(result))
        return self._ask(model, moved(_wide(self._inputs)))

    def _doubled(self) -> nn.Module:
        return copy_as_is(self._model).double()


def _wide(inputs: tuple[Any, ...]) -> Any:
    return pytree.tree_map_only(
        Tensor, lambda x: x.double() if x.is_floating_point() else x, inputs
    )


def _moved(x: Tensor, generator: torch.Generator) -> Tensor:
    if not x.is_floating_point():
        return x
    largest = x.abs().nan_to_num(0, 0, 0).max() if x.numel() else 0.0
    return (
        x + (torch.rand(x.shape, dtype=x.dtype, generator=generator) * 2 - 1) * largest * _ROUNDING
    )
