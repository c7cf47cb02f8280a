"""`nhwc.fuse` in NCHW: against eager NCHW, what folding batch norm alone gains."""

from __future__ import annotations

from torch import Tensor, nn

from .engine import Engine, Prepared
from .fused import folding


def prepare(model: nn.Module, inputs: tuple[Tensor, ...]) -> Prepared:
    # Called through the public interface, because the verbs must not import one another.
    import nhwc

    return nhwc.fuse(model), inputs


ENGINE = Engine(
    "fused_nchw",
    "fuse NCHW",
    prepare,
    ours=True,
    autocasts=True,
    beyond="eager",
    step="folding, NCHW",
    folding=folding,
)
