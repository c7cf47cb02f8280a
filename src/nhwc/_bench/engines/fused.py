"""`nhwc.fuse`, in channels last: convolution and batch norm folded, no kernels of our own."""

from __future__ import annotations

from torch import Tensor, nn

from ...formats import convert_
from .channels_last import to_channels_last
from .engine import Engine, Prepared


def prepare(model: nn.Module, inputs: tuple[Tensor, ...]) -> Prepared:
    # Called through the public interface, because the verbs must not import one another.
    import nhwc

    return convert_(nhwc.fuse(model)), to_channels_last(inputs)


ENGINE = Engine("fused", "nhwc fuse", prepare, ours=True, autocasts=True)
