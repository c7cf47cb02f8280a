"""Transposed convolution: as many ordinary ones as its stride has places, put side by side.

With a stride of 2 every second output pixel sees every second tap of the filter, so the even and
the odd pixels of a row are two ordinary convolutions of the input, each with half of the taps:

    taps          a b c            even pixels  . b .      one tap
    stride 2, padding 1            odd pixels   a . c      two taps, the last one first

`class_of` finds the taps of one side. The convolutions write next to one another, each in channels
of its own, and `PLACE` moves these to the pixels they belong to. Where all see the same window
(2x2 with stride 2, as in a U-Net) they are one product with more columns.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..language.compiler import Args, Kernel
from ..language.loops import each_vector
from ..language.values import Value
from ..language.vectors import Emitter
from ..layers.activations import Activation
from ..tape.steps import Step, View, step
from .conv import ConvKernel
from .spec import ConvSpec, Frames

Sides = tuple[int, int, int]
"""Frames, rows, columns; an image has one frame."""


@dataclass(frozen=True)
class Transposed:
    """A transposed convolution of `input` (n, c, d, h, w) to `output` (n, k, d, h, w).

    The convolutions that it consists of apply the activation.
    """

    input: tuple[int, int, int, int, int]
    output: tuple[int, int, int, int, int]
    size: Sides
    stride: Sides
    padding: Sides
    activation: Activation = Activation.NONE
    slope: float = 0.0

    @property
    def places(self) -> Sides:
        """How many pixels of each class there are."""
        d, h, w = (-(-n // s) for n, s in zip(self.output[2:], self.stride, strict=True))
        return d, h, w

    @property
    def stacked(self) -> tuple[int, int, int, int, int]:
        """The shape of all classes, side by side in channels."""
        count = self.stride[0] * self.stride[1] * self.stride[2]
        return (self.input[0], count * self.output[1], *self.places)


class Side(NamedTuple):
    """The taps that one class sees along a side, in their order, and the padding in front.

    A tap past the end of the filter is zero. Padding below zero skips pixels.
    """

    taps: tuple[int, ...]
    padding: int


def class_of(place: int, size: int, stride: int, padding: int, *, count: int) -> Side:
    """The taps for the `count` output pixels `place`, `place + stride`, ... along a side.

    >>> class_of(0, 3, 2, 1, count=4), class_of(1, 3, 2, 1, count=4)
    (Side(taps=(1,), padding=0), Side(taps=(2, 0), padding=0))
    """
    first = (place + padding) % stride
    taps = tuple(reversed(range(first, size, stride)))
    if not taps:
        # So far in front of the image that it sees none: a zero times infinity would be no zero.
        return Side((size,), count)
    return Side(taps, len(taps) - 1 - (place + padding) // stride)


def pack_transposed(
    spec: Transposed, weight: Tensor, bias: Tensor | None
) -> tuple[tuple[ConvKernel, Tensor], ...]:
    """The convolutions, each with its packed filters; `weight` is C, K, frames, rows, columns."""
    filled = F.pad(weight.detach().transpose(0, 1), (0, 1) * 3)
    places = itertools.product(*map(range, spec.stride))
    sides = list(zip(spec.size, spec.stride, spec.padding, spec.places, strict=True))
    classes = [
        tuple(
            class_of(at, *side, count=count)
            for at, (*side, count) in zip(place, sides, strict=True)
        )
        for place in places
    ]
    parts = [_taken(filled, sides) for sides in classes]
    windows = {tuple((len(side.taps), side.padding) for side in sides) for sides in classes}
    if len(windows) == 1:
        every = None if bias is None else bias.repeat(len(parts))
        return (_packed(spec, classes[0], torch.cat(parts), every),)
    pairs = zip(classes, parts, strict=True)
    return tuple(_packed(spec, sides, part, bias) for sides, part in pairs)


def _taken(filters: Tensor, sides: Sequence[Side]) -> Tensor:
    for dim, side in enumerate(sides, 2):
        filters = filters.index_select(dim, torch.tensor(side.taps))
    return filters


def _packed(
    spec: Transposed, sides: Sequence[Side], weight: Tensor, bias: Tensor | None
) -> tuple[ConvKernel, Tensor]:
    n, c, d, h, w = spec.input
    frames, *places = spec.places
    t, r, s = (len(side.taps) for side in sides)
    front, *padding = (side.padding for side in sides)
    one = ConvSpec(
        *(n, c, h, w, len(weight), r, s),
        padding=(padding[0], padding[1]),
        has_bias=bias is not None,
        activation=spec.activation,
        slope=spec.slope,
        frames=Frames(d, t, padding=front, wanted=frames),
        wanted=(places[0], places[1]),
    )
    kernel = ConvKernel("pointwise" if one.is_flat else "direct", True, one)
    return kernel, kernel.pack(weight.reshape(kernel.filters), bias)


def transposed_steps(
    spec: Transposed, packed: Sequence[tuple[ConvKernel, Tensor]], x: View, stacked: View, y: View
) -> list[Step]:
    """Each convolution into its channels of `stacked`; then all to their places in `y`."""
    steps: list[Step] = []
    first = 0
    for kernel, filters in packed:
        into = stacked.channels(first, first + kernel.spec.k)
        steps += kernel.steps(x, into, filters)
        first += kernel.spec.k
    return [*steps, _place_step(spec, stacked, y)]


def _place_step(spec: Transposed, x: View, y: View) -> Step:
    n, k, out_d, out_h, out_w = spec.output
    d, h, w = spec.places
    return step(
        PLACE,
        x=x,
        y=y,
        x_pixel=x.pixel,
        y_pixel=y.pixel,
        n=n,
        d=d,
        h=h,
        w=w,
        k=k,
        out_d=out_d,
        out_h=out_h,
        out_w=out_w,
        stride_d=spec.stride[0],
        stride_h=spec.stride[1],
        stride_w=spec.stride[2],
    )


def _emit_place(e: Emitter, a: Args, thread: Value, threads: Value) -> None:
    begin, end = e.share(a.n * a.out_d * a.out_h, thread, threads)
    with e.range(begin, end) as line:
        row, frame = line % a.out_h, line // a.out_h % a.out_d
        image = line // (a.out_h * a.out_d)
        above = (image * a.d + frame // a.stride_d) * a.h + row // a.stride_h
        part = (frame % a.stride_d * a.stride_h + row % a.stride_h) * a.stride_w
        source = a.x.floats() + (above * a.w * a.x_pixel + part * a.k)
        target = a.y.floats() + line * a.out_w * a.y_pixel
        with e.range(0, a.out_w, a.stride_w) as column:
            pixel = source + column // a.stride_w * a.x_pixel
            with e.range(0, e.min(a.stride_w, a.out_w - column)) as j:
                here, there = pixel + j * a.k, target + (column + j) * a.y_pixel

                def copy(
                    c: Value, mask: Value | None, here: Value = here, there: Value = there
                ) -> None:
                    e.store(e.load(here + c, mask), there + c, mask)

                each_vector(e, e.i64(0), a.k, copy)


PLACE = Kernel(
    "place",
    (
        *("x", "y", "x_pixel", "y_pixel", "n", "d", "h", "w", "k"),
        *("out_d", "out_h", "out_w", "stride_d", "stride_h", "stride_w"),
    ),
    _emit_place,
)
