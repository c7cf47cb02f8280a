"""`torch.compile` at its best: weights frozen into the program; on CUDA also max-autotune."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...formats import convert_
from .channels_last import to_channels_last
from .engine import Engine, Prepared


def prepare(model: nn.Module, inputs: tuple[Tensor, ...]) -> Prepared:
    import torch._inductor.config as inductor

    # Never reset: this process runs nothing else, and compilation happens at the first call.
    inductor.freezing = True
    mode = "max-autotune" if inputs[0].is_cuda else None
    return torch.compile(convert_(model), mode=mode), to_channels_last(inputs)


ENGINE = Engine(
    "compile_frozen",
    "torch.compile, frozen",
    prepare,
    autocasts=True,
    typical_setup_s=20.0,
)
