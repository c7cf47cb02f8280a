"""PyTorch as it comes: NCHW tensors, no rewriting. What everything else is measured against."""

from __future__ import annotations

from torch import Tensor, nn

from .engine import Engine, Prepared


def prepare(model: nn.Module, inputs: tuple[Tensor, ...]) -> Prepared:
    return model, inputs


ENGINE = Engine("eager", "eager NCHW", prepare, trains=True, autocasts=True)
