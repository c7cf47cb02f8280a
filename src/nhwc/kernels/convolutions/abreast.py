"""A convolution with few filters: neighbouring pixels of a line side by side, in one vector.

The last layer of a network that makes images has 1 to 3 filters, where a vector has room for 8 or
16 columns of a product. Here several pixels of a line fill it. Together they see a window a little
wider than one does, in which each has its taps and zeros beside them. Two filters a and b of three
taps, four pixels abreast:

                       columns
                a0 b0 a1 b1 a2 b2 a3 b3
    taps   0     a  b
           1     a  b  a  b                     6 rows of 8 columns for 4 pixels,
           2     a  b  a  b  a  b               not 4 times 3 rows of 8 columns
           3           a  b  a  b  a  b         with 2 of them in use
           4                 a  b  a  b
           5                       a  b

That is a convolution of wider filters which moves by four pixels, so `direct` computes it. Its
result lies as the line does, since pixels without gaps follow one another as columns do.

A zero times infinity is no zero: what is not finite reaches the pixels abreast of those that see
it. So this kernel is none of the exact ones.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..language import isa as isas
from ..tape.steps import Step, View
from . import direct
from .spec import ConvSpec

_LEAST_GAIN = 1.2
"""How many times as many products in the usual way are worth another kernel to be measured."""


def serves(spec: ConvSpec) -> bool:
    """Whether pixels abreast save products."""
    return pixels_abreast(spec) > 1


def pixels_abreast(spec: ConvSpec) -> int:
    """How many pixels of a line are computed as one; 1 if more gain nothing.

    >>> pixels_abreast(ConvSpec(1, 64, 56, 56, 256, 3, 3, padding=(1, 1)))
    1
    """
    width = isas.host().width
    if spec.groups > 1 or spec.dilation[1] > 1:
        return 1

    def cost(abreast: int) -> float:
        """The products for each pixel; to pack a tap takes as long as one by a vector."""
        return _taps(spec, abreast) * (1 - (-abreast * spec.k // width)) / abreast

    counts = [n for n in range(2, width // spec.k + 1) if spec.out_w % n == 0]
    best = min(counts, key=cost, default=1)
    return best if cost(1) >= _LEAST_GAIN * cost(best) else 1


def _taps(spec: ConvSpec, abreast: int) -> int:
    """How many taps of a line so many pixels see together."""
    return (abreast - 1) * spec.stride[1] + spec.s


def _wide(spec: ConvSpec) -> ConvSpec:
    """The convolution whose filters are those of all pixels abreast."""
    abreast = pixels_abreast(spec)
    return replace(
        spec,
        k=abreast * spec.k,
        s=_taps(spec, abreast),
        stride=(spec.stride[0], abreast * spec.stride[1]),
        wanted=(spec.out_h, spec.out_w // abreast),
    )


def pack_abreast(spec: ConvSpec, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The weights of `spec` as `abreast_steps` takes them."""
    wide = _wide(spec)
    abreast = wide.k // spec.k
    filters = torch.zeros(abreast, *weight.shape[:-1], wide.s)
    for pixel, part in enumerate(filters):
        part[..., pixel * spec.stride[1] :][..., : spec.s] = weight
    every = None if bias is None else bias.repeat(abreast)
    return direct.pack_direct(wide, filters.flatten(0, 1), every)


def packed_floats(spec: ConvSpec) -> int:
    """How many numbers `pack_abreast` returns."""
    return direct.packed_floats(_wide(spec))


def abreast_steps(
    spec: ConvSpec, x: View, y: View, packed: Tensor | View, residual: View | None = None
) -> tuple[Step, ...]:
    """The convolution as one step; `y` and `residual` lie without gaps."""
    wide = _wide(spec)
    n, _, h, _ = y.shape

    def whole(view: View) -> View:
        return view.as_numbers(n, wide.k, h, wide.out_w)

    beside = None if residual is None else whole(residual)
    return direct.direct_steps(wide, x, whole(y), packed, beside)
