"""Convolutions that kill the process in channels last, known before they run.

In oneDNN 3.12.0 the kernels `brg_conv_fwd` make the code that adds the bias to columns of padding
by the taps that touch the image. A row that sees nothing but padding has none, and they call code
that was never made: docs/upstream/conv3d-channels-last-crash.md.
"""

from __future__ import annotations

from .windows import places


def sees_no_column(
    width: int, size: int, *, stride: int = 1, padding: int = 0, dilation: int = 1
) -> bool:
    """Whether each window along a row of `width` pixels has all of its taps in the padding.

    >>> sees_no_column(1, 1, stride=2, padding=1), sees_no_column(2, 1, stride=2, padding=1)
    (True, False)

    A row that is too short for one window is torch's error.
    """
    windows = places(width, size, stride=stride, padding=padding, dilation=dilation)
    return windows > 0 and not any(
        0 <= window * stride - padding + tap * dilation < width
        for window in range(windows)
        for tap in range(size)
    )
