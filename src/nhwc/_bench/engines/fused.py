"""`nhwc.fuse`, in channels last: convolution and batch norm folded, no kernels of our own."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ...formats import convert_
from .channels_last import to_channels_last
from .engine import Engine, Folding, Prepared


def prepare(model: nn.Module, inputs: tuple[Tensor, ...]) -> Prepared:
    # Called through the public interface, because the verbs must not import one another.
    import nhwc

    return convert_(nhwc.fuse(model)), to_channels_last(inputs)


def folding(fused: Any) -> Folding:
    """Count the batch norms that `nhwc.fuse` folded, and those that it left."""
    return Folding(len(fused.report.applied), len(fused.report.skipped))


ENGINE = Engine(
    "fused",
    "fuse channels last",
    prepare,
    ours=True,
    autocasts=True,
    beyond="channels_last",
    step="folding, channels last",
    folding=folding,
)
