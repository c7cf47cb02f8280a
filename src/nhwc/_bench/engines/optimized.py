"""`nhwc.optimize`: everything this library does to make a model fast."""

from __future__ import annotations

from torch import Tensor, nn

from .channels_last import to_channels_last
from .engine import Engine, Prepared


def prepare(model: nn.Module, inputs: tuple[Tensor, ...]) -> Prepared:
    import nhwc

    inputs = to_channels_last(inputs)
    return nhwc.optimize(model, *inputs), inputs


ENGINE = Engine(
    "optimized", "nhwc optimize", prepare, ours=True, autocasts=True, typical_setup_s=10.0
)
