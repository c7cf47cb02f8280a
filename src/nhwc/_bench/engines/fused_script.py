"""`torch.jit.script` of what `nhwc.fuse` returns, in NCHW: the last number of the FX tutorial."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

from . import fused_nchw
from .engine import Engine, Prepared

CALLS = 3
"""Calls until TorchScript has seen the shapes and compiled for them."""


def prepare(model: nn.Module, inputs: tuple[Tensor, ...]) -> Prepared:
    fused, inputs = fused_nchw.prepare(model, inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = torch.jit.script(fused)
    with torch.inference_mode():
        for _ in range(CALLS):
            scripted(*inputs)
    return scripted, inputs


ENGINE = Engine(
    "fused_script",
    "scripted fuse NCHW",
    prepare,
    ours=True,
    beyond="fused_nchw",
    step="jit.script, NCHW",
)
