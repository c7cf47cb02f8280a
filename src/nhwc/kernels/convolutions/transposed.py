"""Transposed convolution: as many ordinary ones as its stride has places, put side by side.

With a stride of 2 every second output pixel sees every second tap of the filter, so the even and
the odd pixels of a row are two ordinary convolutions of the input, each with half of the taps:

    taps          a b c            even pixels  . b .      one tap
    stride 2, padding 1            odd pixels   a . c      two taps, the last one first

`class_of` finds the taps of one side. The convolutions, direct or Winograd's, write next to one
another, each in channels of its own, and `PLACE` moves these to the pixels they belong to. Where
all see the same window (2x2 with stride 2, as in a U-Net) they are one product with more columns.

Where filters are few (few.py), nothing is moved: the classes of a row are computed as one, whose
pixels then lie side by side in the result. Along the row each class has zeros for the taps that
others see, so what is not finite reaches pixels that do not see it: a zero times infinity is none.

Where taps are dilated, those of a class are, too, by what dilation and stride do not share. Groups
stay groups, and filters of a single channel go to the depthwise kernels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
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
from . import few
from .conv import ConvKernel
from .depthwise import depthwise_step
from .spec import IMAGE, ConvSpec, Frames
from .tiles import Form
from .winograd import forms_of

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
    dilation: Sides = (1, 1, 1)
    groups: int = 1
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

    A tap past the end of the filter is zero. Padding below zero skips pixels. Neighbouring taps see
    pixels that are `apart`.
    """

    taps: tuple[int, ...]
    padding: int
    apart: int = 1

    @property
    def window(self) -> tuple[int, int, int]:
        """What of the input it sees, whatever its taps are."""
        return len(self.taps), self.padding, self.apart


class Part(NamedTuple):
    """One of the convolutions: how many channels it writes, and the steps that compute it."""

    channels: int
    steps: Callable[[View, View], Sequence[Step]]


class FewRows(NamedTuple):
    """All classes of a row as one convolution of few filters: its weights, and where it begins."""

    spec: ConvSpec
    packed: Tensor
    first: int


def class_of(
    place: int, size: int, stride: int, padding: int, dilation: int = 1, *, count: int
) -> Side:
    """The taps for the `count` output pixels `place`, `place + stride`, ... along a side.

    >>> class_of(0, 3, 2, 1, count=4), class_of(1, 3, 2, 1, count=4)
    (Side(taps=(1,), padding=0, apart=1), Side(taps=(2, 0), padding=0, apart=1))
    """
    before = place + padding
    taps = [tap for tap in reversed(range(size)) if (before - tap * dilation) % stride == 0]
    if not taps:
        # So far in front of the image that it sees none: a zero times infinity would be no zero.
        return Side((size,), count)
    return Side(
        tuple(taps),
        (taps[0] * dilation - before) // stride,
        dilation // math.gcd(dilation, stride),
    )


def pack_transposed(
    spec: Transposed, weight: Tensor, bias: Tensor | None, *, exact: bool = True
) -> tuple[Part, ...]:
    """The convolutions with their packed filters; `weight` is as torch has it, with frames.

    Without `exact` Winograd's kernels compute those that they serve.
    """
    filled = _filled(spec, weight)
    classes = [*itertools.product(*_classes(spec))]
    windows = {tuple(side.window for side in sides) for sides in classes}
    make = partial(_part, spec, exact=exact)
    if len(windows) == 1 and spec.groups == 1:
        every = torch.cat([_taken(filled, sides) for sides in classes])
        return (make(classes[0], every, bias if bias is None else bias.repeat(len(classes))),)
    return tuple(make(sides, _taken(filled, sides), bias) for sides in classes)


def has_transforms(spec: Transposed) -> bool:
    """Whether Winograd's kernels serve any of the convolutions."""
    every = itertools.product(*_classes(spec))
    return any(
        _lean_form(_convolution(spec, sides, spec.output[1], spec.places)) for sides in every
    )


def _lean_form(one: ConvSpec) -> Form | None:
    """Winograd's form that holds filters as they are: the others would hold them four times."""
    return next((form for form in forms_of(one) if form.lean), None)


def _filled(spec: Transposed, weight: Tensor) -> Tensor:
    """The filters as those of ordinary convolutions, with a tap of zeros behind the last."""
    grouped = weight.detach().unflatten(0, (spec.groups, -1))
    return F.pad(grouped.transpose(1, 2).flatten(0, 1), (0, 1) * 3)


def _classes(spec: Transposed) -> list[list[Side]]:
    """Of each side, its classes."""
    moves = zip(spec.size, spec.stride, spec.padding, spec.dilation, spec.places, strict=True)
    return [
        [class_of(place, size, stride, padding, dilation, count=n) for place in range(stride)]
        for size, stride, padding, dilation, n in moves
    ]


def has_few_filters(spec: Transposed) -> bool:
    """Whether `pack_few_rows` can compute it, row by row.

    >>> moves = {"size": (3, 3, 3), "stride": (2, 2, 2), "padding": (1, 1, 1)}
    >>> has_few_filters(Transposed((1, 32, 8, 8, 8), (1, 2, 16, 16, 16), **moves))
    True
    >>> has_few_filters(Transposed((1, 128, 8, 8, 8), (1, 64, 16, 16, 16), **moves))
    False
    """
    return spec.groups == 1 and all(few.serves(one) for one, _, _ in _rows(spec))


def pack_few_rows(spec: Transposed, weight: Tensor, bias: Tensor | None) -> tuple[FewRows, ...]:
    """The rows of the result, each kind of them a convolution, with packed filters."""
    filled = _filled(spec, weight)
    found = []
    for one, classes, first in _rows(spec):
        filters = torch.cat([_taken(filled, sides) for sides in classes])
        every = None if bias is None else bias.repeat(len(classes))
        found.append(FewRows(one, few.pack_few(one, filters, every), first))
    return tuple(found)


def _rows(spec: Transposed) -> Iterator[tuple[ConvSpec, list[tuple[Side, Side, Side]], int]]:
    """Of each kind of rows the convolution, the classes of its pixels, and where it begins."""
    frames, rows, columns = _classes(spec)
    _, k, out_d, out_h, out_w = spec.output
    line = _in_one_window(columns, spec.size[2])
    for (i, deep), (j, high) in itertools.product(enumerate(frames), enumerate(rows)):
        # The last frame or row may be that of another class.
        counts = (-(-(out_d - i) // spec.stride[0]), -(-(out_h - j) // spec.stride[1]))
        if min(counts) > 0:
            classes = [(deep, high, one) for one in line]
            one = _convolution(spec, classes[0], k * len(line), (*counts, spec.places[2]))
            yield one, classes, (i * out_h + j) * out_w * k


def _in_one_window(sides: Sequence[Side], size: int) -> list[Side]:
    """The classes of one side, each with the taps under the window of all; its others are zero."""
    if len({side.window for side in sides}) == 1:
        return [*sides]
    seen = [
        {at * side.apart - side.padding: tap for at, tap in enumerate(side.taps) if tap < size}
        for side in sides
    ]
    places = sorted({place for taps in seen for place in taps})
    if not places:
        return [*sides]
    window = range(places[0], places[-1] + 1)
    return [Side(tuple(taps.get(at, size) for at in window), -places[0]) for taps in seen]


def _taken(filters: Tensor, sides: Sequence[Side]) -> Tensor:
    for dim, side in enumerate(sides, 2):
        filters = filters.index_select(dim, torch.tensor(side.taps))
    return filters


def _part(
    spec: Transposed, sides: Sequence[Side], weight: Tensor, bias: Tensor | None, *, exact: bool
) -> Part:
    one = _convolution(spec, sides, len(weight), spec.places)
    if one.groups == one.c == one.k:
        return Part(one.k, partial(_depthwise, one, weight, bias))
    if form := None if exact else _lean_form(one):
        kernel = ConvKernel(form.name, False, one)
    else:
        flat = one.is_flat and one.groups == 1
        kernel = ConvKernel("pointwise" if flat else "direct", True, one)
    packed = kernel.pack(weight.reshape(kernel.filters), bias)
    return Part(one.k, lambda x, y: kernel.steps(x, y, packed))


def _convolution(spec: Transposed, sides: Sequence[Side], filters: int, places: Sides) -> ConvSpec:
    """The ordinary convolution that computes the classes which see these `sides`."""
    n, c, d, h, w = spec.input
    t, r, s = (len(side.taps) for side in sides)
    front, *padding = (side.padding for side in sides)
    apart = [side.apart if len(side.taps) > 1 else 1 for side in sides]
    deep = Frames(d, t, padding=front, dilation=apart[0], wanted=places[0])
    return ConvSpec(
        *(n, c, h, w, filters, r, s),
        padding=(padding[0], padding[1]),
        dilation=(apart[1], apart[2]),
        groups=spec.groups,
        activation=spec.activation,
        slope=spec.slope,
        frames=IMAGE if (d, t, front, places[0]) == (1, 1, 0, 1) else deep,
        wanted=(places[1], places[2]),
    )


def _depthwise(
    one: ConvSpec, weight: Tensor, bias: Tensor | None, x: View, y: View
) -> tuple[Step, ...]:
    filters = weight if one.frames != IMAGE else weight.flatten(1, 2)
    moves = {"padding": one.padding, "dilation": one.dilation, "frames": one.frames}
    ending = {"activation": one.activation, "slope": one.slope}
    return (depthwise_step(x, y, filters, bias, **moves, **ending),)  # type: ignore[arg-type]


def transposed_steps(
    spec: Transposed, parts: Sequence[Part], x: View, stacked: View, y: View
) -> list[Step]:
    """Each convolution into its channels of `stacked`; then all to their places in `y`."""
    steps: list[Step] = []
    first = 0
    for part in parts:
        steps += part.steps(x, stacked.channels(first, first + part.channels))
        first += part.channels
    return [*steps, _place_step(spec, stacked, y)]


def few_rows_steps(spec: Transposed, rows: Sequence[FewRows], x: View, y: View) -> list[Step]:
    """Each kind of rows, where they lie in `y`, which has no gaps."""
    _, k, out_d, out_h, out_w = spec.output
    line = out_w * k
    lie = few.Rows(out_d * out_h * line, spec.stride[0] * out_h * line, spec.stride[1] * line, line)
    return [
        one
        for row in rows
        for one in few.few_steps(row.spec, x, few.numbers_of(y, row.first), row.packed, rows=lie)
    ]


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
            count = e.min(a.stride_w, a.out_w - column)
            # Pixels without gaps between them are moved as one.
            joined = a.y_pixel == a.k
            floats = e.select(joined, count * a.k, a.k)
            with e.range(0, e.select(joined, e.i64(1), count)) as j:
                here, there = pixel + j * a.k, target + (column + j) * a.y_pixel

                def copy(
                    c: Value, mask: Value | None, here: Value = here, there: Value = there
                ) -> None:
                    e.store(e.load(here + c, mask), there + c, mask)

                each_vector(e, e.i64(0), floats, copy)


PLACE = Kernel(
    "place",
    (
        *("x", "y", "x_pixel", "y_pixel", "n", "d", "h", "w", "k"),
        *("out_d", "out_h", "out_w", "stride_d", "stride_h", "stride_w"),
    ),
    _emit_place,
)
