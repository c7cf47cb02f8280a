"""torch.jit: traced, frozen, `optimize_for_inference` (oneDNN's blocked layouts on a CPU)."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from .engine import Engine, Prepared


def prepare(model: nn.Module, inputs: tuple[Tensor, ...]) -> Prepared:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(model, inputs, strict=False)
        return torch.jit.optimize_for_inference(torch.jit.freeze(traced)), inputs


ENGINE = Engine(
    "jit",
    "torch.jit for inference",
    prepare,
    typical_setup_s=1.0,
)
