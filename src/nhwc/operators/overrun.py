"""Convolutions whose weight gradient is written past its memory in channels last.

oneDNN 3.12.0 gathers the pixels that a stride leaves into a buffer that is too small where the
image has fewer channels than a register has numbers: docs/upstream/strided-1x1-overrun.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from .windows import sides_of

_LANES = 16
"""Numbers of a register with AVX-512; AVX2 has 8."""


def overruns(
    weight: Sequence[int], *, stride: Sequence[int], padding: Sequence[int], groups: int
) -> bool:
    """Whether the gradient of such weights of a float32 convolution may spoil other memory.

    >>> overruns((48, 3, 1, 1), stride=(2, 2), padding=(0, 0), groups=1)
    True
    >>> overruns((48, 3, 1, 1), stride=(1, 1), padding=(0, 0), groups=1)
    False
    """
    _, channels, *size = weight
    alone = len(size) == 2 and max(size) == groups == 1 and not any(padding)
    return alone and max(stride) > 1 and 1 < channels < _LANES


def layers_that_overrun(model: nn.Module) -> Iterator[tuple[str, nn.Conv2d]]:
    """The layers of a model, with their paths, whose weights may have such a gradient.

    >>> [path for path, _ in layers_that_overrun(nn.Sequential(nn.Conv2d(3, 8, 1, stride=2)))]
    ['0']
    """
    for path, layer in model.named_modules():
        if isinstance(layer, nn.Conv2d):
            padding = (0, 0) if isinstance(layer.padding, str) else layer.padding
            # Not the weight's own shape: lazy ones have none, and sharded ones another.
            weight = (layer.out_channels, layer.in_channels // layer.groups, *layer.kernel_size)
            stride, padding = (sides_of(one, 2) for one in (layer.stride, padding))
            if overruns(weight, stride=stride, padding=padding, groups=layer.groups):
                yield path, layer


def overrun_told(path: str, layer: nn.Conv2d) -> str:
    """What is wrong with such a layer, in a sentence that says where."""
    return (
        f"torch may write the weight gradient of {path or 'the model'} past its memory on a CPU in "
        f"channels last: a 1x1 convolution of {layer.in_channels} channels with stride "
        f"{sides_of(layer.stride, 2)}."
    )
