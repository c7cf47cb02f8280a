"""How many places a window finds on an image: the size of what convolutions and poolings return."""

from __future__ import annotations

from typing import Any


def places(
    length: Any,
    size: int,
    *,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    ceil_mode: bool = False,
) -> Any:
    """The places of a window of `size` along a side of this length, an int or a symbol for one.

    >>> places(224, 7, stride=2, padding=3), places(112, 3, stride=2, ceil_mode=True)
    (112, 56)

    With `ceil_mode` a last window may reach over the end, if it begins before what pads that.
    """
    free = length + 2 * padding - dilation * (size - 1) - 1
    if not ceil_mode:
        return free // stride + 1
    count = (free + stride - 1) // stride + 1
    return count - 1 if (count - 1) * stride >= length + padding else count
