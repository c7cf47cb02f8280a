"""Convolutions whose weight gradient is written past its memory in channels last.

oneDNN 3.12.0 gathers the pixels that a stride leaves into a buffer that is too small where the
image has fewer channels than a register has numbers: docs/upstream/strided-1x1-overrun.md.
"""

from __future__ import annotations

from collections.abc import Sequence

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
