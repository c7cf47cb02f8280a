"""Whether a GPU multiplies float32 numbers whole, or rounds them to TF32 first."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

_ROUNDED = "tf32"


@contextlib.contextmanager
def whole_float32() -> Iterator[None]:
    """Let cuDNN multiply float32 numbers as they are; by default it rounds them to TF32.

    >>> with whole_float32():
    ...     rounds_convolutions()
    False
    """
    # The switches in torch.backends refuse to move once torch.testing has frozen them.
    try:
        before = torch._C._get_cudnn_allow_tf32()
    except RuntimeError:
        # Set for convolutions alone, which the older switch for all refuses to describe.
        with _whole_convolutions():
            yield
        return
    torch._C._set_cudnn_allow_tf32(False)
    try:
        yield
    finally:
        torch._C._set_cudnn_allow_tf32(before)


@contextlib.contextmanager
def _whole_convolutions() -> Iterator[None]:
    cudnn: Any = torch.backends.cudnn
    before = cudnn.conv.fp32_precision
    cudnn.conv.fp32_precision = "ieee"
    try:
        yield
    finally:
        cudnn.conv.fp32_precision = before


def rounds_convolutions() -> bool:
    """Whether the user lets convolutions of float32 numbers round them, as torch does by default.

    >>> rounds_convolutions()
    True
    """
    cudnn: Any = torch.backends.cudnn
    return bool(cudnn.conv.fp32_precision == _ROUNDED)


def rounds_products() -> bool:
    """Whether the user lets products of float32 matrices round them; torch does not by default.

    >>> rounds_products()
    False
    """
    return bool(torch.backends.cuda.matmul.fp32_precision == _ROUNDED)
