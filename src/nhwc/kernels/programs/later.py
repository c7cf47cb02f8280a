"""Weights that are asked for before it is their turn.

A linear layer does little but read its weights, and these come from far away. The product before it
computes and reads little: it can ask meanwhile for as much as memory answers until it is done. What
it asks for beyond that it would wait for itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..convolutions.direct import LATER, products_of
from ..tape.steps import Argument, Step

_NEAR = 3
"""Weights asked for more steps ahead than this are gone again when they are read."""
_MOST = 1 << 22
"""The most floats to ask for: caches hold no more."""
_WORK = 32
"""Multiply-adds for each float: memory is about that much slower than the processor."""


def foreseen(steps: Sequence[Step]) -> tuple[Step, ...]:
    """`steps`, in which a product asks for the weights of the linear layer that comes soon."""
    found = list(steps)
    for index, step in enumerate(steps):
        if step.kernel.name != "linear":
            continue
        for before in range(index - 1, max(-1, index - 1 - _NEAR), -1):
            if steps[before].kernel.name == "linear":
                break
            if LATER[0] in steps[before].kernel.fields:
                found[before] = _asking(steps[before], step)
                break
    return tuple(found)


def _asking(step: Step, linear: Step) -> Step:
    weight = linear.given["weights"]
    assert isinstance(weight, Tensor)
    asked: dict[str, Argument] = {
        LATER[0]: weight,
        LATER[1]: min(weight.numel(), _MOST, products_of(step) // _WORK),
    }
    return step.but(**asked)
