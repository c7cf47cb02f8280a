"""Compare the values of two results."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
    torch.complex64: 1e-4,
    torch.complex128: 1e-9,
}
"""Relative to the result's largest value; enough for another order of summation, no more."""


def difference_of(expected: Sequence[Tensor], got: Sequence[Tensor], *, ties: bool) -> str:
    """Say in words how `got` differs from `expected`; the empty string where it does not.

    With `ties`, indices are not compared: equal inputs leave open which of them comes first.
    """
    if len(expected) != len(got):
        return f"{len(got)} results instead of {len(expected)}"
    for number, (a, b) in enumerate(zip(expected, got, strict=True)):
        if ties and a.dtype is torch.int64:
            continue
        words = _difference(a, b)
        if words:
            return f"result {number}: {words}" if len(expected) > 1 else words
    return ""


def _difference(a: Tensor, b: Tensor) -> str:
    if a.shape != b.shape:
        return f"shape {tuple(b.shape)} instead of {tuple(a.shape)}"
    if a.dtype != b.dtype:
        return f"{b.dtype} instead of {a.dtype}"
    if a.layout is not torch.strided or a.is_quantized or a.numel() == 0:
        return ""
    if a.dtype not in TOLERANCE:
        wrong = a != b
        return f"{int(wrong.sum())} of {a.numel()} values differ" if bool(wrong.any()) else ""
    return _float_difference(a, b, TOLERANCE[a.dtype])


def _float_difference(a: Tensor, b: Tensor, tolerance: float) -> str:
    wide = torch.complex128 if a.is_complex() else torch.float64
    a, b = a.detach().cpu().to(wide), b.detach().cpu().to(wide)
    finite = torch.isfinite(a)
    scale = float(a[finite].abs().max()) if bool(finite.any()) else 0.0
    off = (a - b).abs()
    # Infinity minus itself is NaN, so equal values must not be judged by their difference.
    same = (a == b) | (torch.isnan(a) & torch.isnan(b))
    # Small results may be differences of larger numbers, whose rounding errors they keep.
    wrong = ~same & ~(off <= tolerance * max(scale, 0.05))
    if not bool(wrong.any()):
        return ""
    worst = float(off[torch.isfinite(off)].max()) if bool(torch.isfinite(off).any()) else scale
    return f"{int(wrong.sum())} of {a.numel()} values differ, by up to {worst:.3g}"
