"""`torch.compile` with its defaults, in channels last."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...formats import convert_
from .channels_last import to_channels_last
from .engine import Engine, Prepared


def prepare(model: nn.Module, inputs: tuple[Tensor, ...]) -> Prepared:
    return torch.compile(convert_(model)), to_channels_last(inputs)


ENGINE = Engine(
    "compile",
    "torch.compile",
    prepare,
    trains=True,
    autocasts=True,
    typical_setup_s=20.0,
)
