"""The plain recipe: weights and inputs to channels last, nothing else."""

from __future__ import annotations

from torch import Tensor, nn

from ...formats import CHANNELS_LAST_OF, convert_, to_format
from .engine import Engine, Prepared


def to_channels_last(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Convert the inputs that have a channels-last format to it; keep the others as they are."""
    return tuple(
        to_format(x, CHANNELS_LAST_OF[x.ndim]) if x.ndim in CHANNELS_LAST_OF else x for x in inputs
    )


def prepare(model: nn.Module, inputs: tuple[Tensor, ...]) -> Prepared:
    return convert_(model), to_channels_last(inputs)


ENGINE = Engine("channels_last", "eager channels last", prepare, trains=True, autocasts=True)
