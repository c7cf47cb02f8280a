"""A network as a list of steps, and the smallest part of it that still fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class Step:
    """A call of `function`, or of the layer of this number, on the values of these numbers."""

    name: str
    function: Callable[..., Any]
    takes: tuple[int, ...]
    layer: int | None = None


class Network(nn.Module):
    def __init__(self, steps: Sequence[Step], layers: Sequence[nn.Module], returns: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.steps = tuple(steps)
        self.returns = returns

    def forward(self, a: Tensor, b: Tensor) -> Any:
        values: list[Any] = [a, b]
        for step in self.steps:
            given = [values[place] for place in step.takes]
            if step.layer is not None:
                given.insert(0, self.layers[step.layer])
            values.append(step.function(*given))
        if isinstance(self.returns, dict):
            return {name: values[place] for name, place in self.returns.items()}
        return self.returns.__class__(values[place] for place in self.returns)

    def text(self) -> str:
        """The steps, a line each, as a bug report shows them."""
        lines = [f"v{n}, input" for n in range(2)]
        for number, step in enumerate(self.steps, 2):
            layer = "" if step.layer is None else f" {self.layers[step.layer]}"
            given = ", ".join(f"v{place}" for place in step.takes)
            lines.append(f"v{number} = {step.name}({given}){layer}")
        return "\n".join([*lines, f"return {self.returns}"])


def smaller(model: Network, fails: Callable[[Network], bool], seconds: float = 150.0) -> Network:
    """The smallest network made of `model` by leaving out steps for which `fails` is still true.

    After so many `seconds` it is the smallest so far: what hears nothing for long is ended.
    """
    end = time.monotonic() + seconds
    found = True
    while found:
        found = False
        for place in reversed(range(len(model.steps))):
            for instead in model.steps[place].takes:
                if time.monotonic() > end:
                    return model
                less = _without(model, place, instead)
                if fails(less):
                    model, found = less, True
                    break
    return model


def _without(model: Network, place: int, instead: int) -> Network:
    gone = place + 2

    def now(value: int) -> int:
        value = instead if value == gone else value
        return value - (value > gone)

    steps = [
        replace(step, takes=tuple(map(now, step.takes)))
        for number, step in enumerate(model.steps)
        if number != place
    ]
    returns = model.returns
    if isinstance(returns, dict):
        returns = {name: now(value) for name, value in returns.items()}
    else:
        returns = returns.__class__(map(now, returns))
    return Network(steps, list(model.layers), returns).eval()
