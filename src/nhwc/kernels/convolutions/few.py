"""A convolution with few filters: the lanes of a vector are summed, and not told apart.

The last layer of a network that makes images, or a map of each class, has few filters, where a
vector has room for 8 or 16 columns of a product. But what one of them sees in a row of pixels fills
vectors, and lies in memory as it is wanted: all channels of a tap, then those of the next.

    row of pixels     a0 a1 a2 a3  b0 b1 b2 b3  c0 c1 c2 c3  d0 d1 d2 d3
    of the first      f0 f1 f2 f3  f4 f5 f6 f7  f8 f9 ..                      three taps, four
    of the second                  f0 f1 f2 f3  f4 f5 f6 f7  f8 f9 ..         channels

So nothing is packed. A strip is a few neighbouring pixels of a line, and has a vector of sums for
each filter of each pixel. At its end the lanes of each are added, those of all vectors at once:
neighbours of two vectors into one, until one has all sums, in the order in which they are stored.

    s0 s1 s2 s3   t0 t1 t2 t3   u0 u1 u2 u3   v0 v1 v2 v3
           s01 s23 t01 t23             u01 u23 v01 v23
                           s t u v

What a strip sees beside the image is zeros: it reads copies of its rows, with zeros beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

from torch import Tensor

from ..language import isa as isas
from ..language.compiler import Args, Kernel
from ..language.loops import PADDED_TO, Place, each_vector, emit_padded, padded
from ..language.values import Value
from ..language.vectors import Emitter, Variable
from ..layers.ending import ENDING, ending, finish
from ..layers.pooling import taps_inside
from ..product.weights import after
from ..tape.pages import room, shared
from ..tape.steps import Scratch, Step, View, step
from .spec import SIDES, ConvSpec

STRIP_FIELDS = (
    *("x", "weights", "bias", *ENDING, *SIDES),
    *("n", "x_pixel", "columns", "y_n", "y_d", "y_h"),
)
"""What `each_strip` and `each_row` read; a strip sees `columns` of the image."""

_FIELDS = (
    *STRIP_FIELDS,
    *("c", "taps", "segments", "apart", "y_floats", "scratch", "scratch_floats"),
)
"""A row of a filter is `segments` pieces of `taps` pixels without gaps, `apart` from each other."""


def filters_served() -> range:
    """With so many filters a product would leave at least half of the lanes idle."""
    return range(1, isas.host().width // 2 + 1)


def serves(spec: ConvSpec) -> bool:
    """Whether this kernel can compute `spec`, and gains by it."""
    few = spec.groups == 1 and spec.k in filters_served()
    return few and spec.out_w >= _pixels(spec.k)


def _pixels(filters: int) -> int:
    """How many pixels make a strip."""
    return _count(isas.host().width, filters)


def _count(width: int, filters: int) -> int:
    """Pixels whose sums a vector has room for, but no more than registers have addresses for."""
    return min(8, width // filters)


class Rows(NamedTuple):
    """Where rows of the result lie: how far images, frames and rows are apart, and a row's floats.

    They may lie between rows of others, as those of a transposed convolution's stride do.
    """

    n: int
    d: int
    h: int
    floats: int


class Strip(NamedTuple):
    """Neighbouring pixels of a row of the result, and what they see.

    `line` is the row of the image under the first tap, `column` where the first pixel sees its
    first tap; `inside` if all that the strip sees is in the image. The row of the result begins at
    its number `to`, and `left` pixels of it stand before the strip.
    """

    frames: tuple[Value, Value]
    rows: tuple[Value, Value]
    image: Value
    frame: Value
    line: Value
    column: Value
    inside: Value
    to: Value
    left: Value


def each_strip(e: Emitter, a: Args, thread: Value, threads: Value, count: int) -> Iterator[Strip]:
    """The strips of `count` pixels that a thread computes."""
    begin, end = e.share(a.n * a.out_d * a.out_h, thread, threads)
    with e.range(begin, end) as row:
        image = row // (a.out_h * a.out_d)
        frame = row // a.out_h % a.out_d * a.stride_d - a.pad_d
        line = row % a.out_h * a.stride_h - a.pad_h
        rows = taps_inside(e, line, a.r, a.dilation_h, a.h)
        first, last = taps_inside(e, frame, a.t, a.dilation_d, a.d)
        held = a.held != 0
        frames = (e.select(held, e.i64(0), first), e.select(held, a.t, last))
        to = image * a.y_n + row // a.out_h % a.out_d * a.y_d + row % a.out_h * a.y_h
        with e.range(0, a.out_w, count) as wanted:
            # The last strip moves left to end with the row, and computes some outputs again.
            left = e.min(wanted, a.out_w - count)
            column = left * a.stride_w - a.pad_w
            inside = (column >= 0) & (column + a.columns <= a.w)
            _fetch_below(e, a, (image * a.d + e.max(frame, 0)) * a.h + line + a.r, column, count)
            yield Strip(frames, rows, image, frame, line, column, inside, to, left)


@contextmanager
def each_row(e: Emitter, a: Args, strip: Strip) -> Iterator[tuple[Value, Value, Value]]:
    """Each row of a filter that sees some of the image: the frame, the row, where its pixels are.

    They are counted from what the first tap sees of the first pixel, which may lie beside the row.
    """
    with e.range(*strip.frames) as i, e.range(*strip.rows) as j:
        yield i, j, _row(e, a, strip, i, j) + strip.column * a.x_pixel


def _emit(e: Emitter, a: Args, thread: Value, threads: Value, *, filters: int) -> None:
    copied = a.scratch.floats() + a.worker * a.scratch_floats
    for strip in each_strip(e, a, thread, threads, _count(e.width, filters)):
        with e.when(~strip.inside):
            _copy(e, a, strip, copied)
        sums = [e.variable(0.0) for _ in range(_count(e.width, filters) * filters)]
        for one in sums:
            one.value = e.vector(0.0)
        _add(e, a, sums, filters, strip, copied)
        total = _across(e, [one.value for one in sums]) + e.load(a.bias.floats())
        place = strip.left * filters
        # Of a row that ends within the last pixel there is less to store.
        mask = e.lanes(e.min(a.y_floats - place, len(sums)))
        finish(e, a, [total], e.i64(0), Place(strip.to + place, mask))


def _copy(e: Emitter, a: Args, strip: Strip, copied: Value) -> None:
    """Copy all rows that the strip sees, each to where it would lie between zeros.

    First all, and then they are read: a processor waits where it reads what it has just written.
    """
    blank = lambda at, mask: e.store(e.vector(0.0), copied + at, mask)
    each_vector(e, 0, a.scratch_floats, blank)
    first, last = (e.max(0, e.min(end, a.w)) for end in (strip.column, strip.column + a.columns))
    # Behind the last pixel's channels may lie the end of memory.
    floats = e.max(0, (last - first - 1) * a.x_pixel + a.c)
    with e.range(*strip.frames) as i, e.range(*strip.rows) as j:
        source = _row(e, a, strip, i, j) + first * a.x_pixel
        target = copied + _copied(a, i, j) + (first - strip.column) * a.x_pixel

        def move(at: Value, mask: Value | None) -> None:
            e.store(e.load(source + at, mask), target + at, mask)

        each_vector(e, 0, floats, move)


def _row(e: Emitter, a: Args, strip: Strip, i: Value, j: Value) -> Value:
    """The first pixel of the row of the image under two taps."""
    frame = e.max(0, e.min(strip.frame + i * a.dilation_d, a.d - 1))
    line = (strip.image * a.d + frame) * a.h + strip.line + j * a.dilation_h
    row: Value = a.x.floats() + line * a.w * a.x_pixel
    return row


def _copied(a: Args, i: Value, j: Value) -> Value:
    """Where among the copies that of such a row begins."""
    row: Value = (i * a.r + j) * a.columns * a.x_pixel
    return row


def _fetch_below(e: Emitter, a: Args, line: Value, column: Value, count: int) -> None:
    """Ask for what the strip below this one sees first: its row of pixels follows no other."""
    first = (line * a.w + column) * a.x_pixel
    with e.range(0, count * a.stride_w * a.x_pixel, PADDED_TO) as i:
        e.prefetch(a.x.floats() + (first + i), level=2)


def _add(
    e: Emitter, a: Args, sums: list[Variable], filters: int, strip: Strip, copied: Value
) -> None:
    """Add the products of all taps that a strip sees."""
    segment = a.taps * a.c
    floats = emit_padded(a.segments * segment)
    with each_row(e, a, strip) as (i, j, there):
        copy = copied + _copied(a, i, j)
        source = e.select(strip.inside, there.address(), copy.address()).floats()
        weights = a.weights.floats() + (i * a.r + j) * filters * floats
        with e.range(0, a.segments) as number:

            def multiply(at: Value, mask: Value | None) -> None:
                # Else LLVM keeps an address for each filter and each pixel through all loops.
                own_weights = e.after(weights + (number * segment + at), [])
                here = e.after(source + (number * a.apart + at), [])
                factors = [e.load(own_weights + f * floats, mask) for f in range(filters)]
                for pixel in range(len(sums) // filters):
                    value = e.load(here + pixel * a.stride_w * a.x_pixel, mask)
                    own = sums[pixel * filters : (pixel + 1) * filters]
                    for one, factor in zip(own, factors, strict=True):
                        one.value = e.fma(value, factor, one.value)

            each_vector(e, 0, segment, multiply)


def _across(e: Emitter, vectors: list[Value]) -> Value:
    """The sum of the lanes of each vector, in the order of the vectors."""
    vectors = vectors + [e.vector(0.0)] * (e.width - len(vectors))
    even = range(0, 2 * e.width, 2)
    while len(vectors) > 1:
        pairs = zip(vectors[::2], vectors[1::2], strict=True)
        vectors = [
            e.shuffle(one, [*even], other) + e.shuffle(one, [lane + 1 for lane in even], other)
            for one, other in pairs
        ]
    return vectors[0]


@cache
def few_kernel(filters: int) -> Kernel:
    """The kernel for so many filters."""
    return Kernel(f"few{filters}", _FIELDS, partial(_emit, filters=filters))


def pack_few(spec: ConvSpec, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[row of a filter][filter][column][input], filled up to whole vectors, then the bias."""
    frames, rows, width = spec.frames.t, spec.r, spec.s * spec.c
    lines = weight.detach().float().view(spec.k, spec.c, frames, rows, spec.s)
    packed = room(packed_floats(spec)).zero_()
    own = packed[: -padded(1)].view(frames, rows, spec.k, padded(width))
    own[..., :width].copy_(lines.permute(2, 3, 0, 4, 1).flatten(3))
    if bias is not None:
        count = _pixels(spec.k)
        packed[-padded(1) :][: count * spec.k] = bias.detach().float().repeat(count)
    return shared(packed)


def packed_floats(spec: ConvSpec) -> int:
    """How many numbers `pack_few` returns."""
    return spec.frames.t * spec.r * spec.k * padded(spec.s * spec.c) + padded(1)


def few_steps(
    spec: ConvSpec,
    x: View,
    y: View,
    packed: Tensor | View,
    residual: View | None = None,
    *,
    rows: Rows | None = None,
) -> tuple[Step, ...]:
    """The convolution as one step; `y` and `residual` lie without gaps, but for those of `rows`."""
    joined = x.pixel == spec.c and spec.dilation[1] == 1
    pixels = _pixels(spec.k)
    copied = spec.frames.t * spec.r * _columns(spec, pixels) * x.pixel
    return (
        step(
            few_kernel(spec.k),
            bias=after(packed, packed_floats(spec) - padded(1)),
            y_floats=(rows or _whole(spec)).floats,
            c=spec.c,
            taps=spec.s if joined else 1,
            segments=1 if joined else spec.s,
            apart=spec.dilation[1] * x.pixel,
            scratch=Scratch(4 * copied, per_thread=True),
            scratch_floats=copied,
            **strip_arguments(spec, x, y, packed, residual, pixels, rows),
        ),
    )


def strip_arguments(
    spec: ConvSpec,
    x: View,
    y: View,
    packed: Tensor | View,
    residual: View | None,
    pixels: int,
    rows: Rows | None = None,
) -> dict[str, Any]:
    """The arguments for STRIP_FIELDS but the bias, of strips of so many pixels."""
    beside = None if residual is None else numbers_of(residual)
    rows = rows or _whole(spec)
    return {
        "x": x,
        "weights": packed,
        **ending(numbers_of(y), spec.activation, spec.slope, beside),
        "y_n": rows.n,
        "y_d": rows.d,
        "y_h": rows.h,
        "columns": _columns(spec, pixels),
        "n": spec.n,
        "x_pixel": x.pixel,
        **spec.sides(),
    }


def _columns(spec: ConvSpec, pixels: int) -> int:
    """How many columns of the image so many pixels of a row see."""
    return (pixels - 1) * spec.stride[1] + (spec.s - 1) * spec.dilation[1] + 1


def _whole(spec: ConvSpec) -> Rows:
    """The rows of a result that is nothing but them."""
    line = spec.out_w * spec.k
    return Rows(spec.frames.out_d * spec.out_h * line, spec.out_h * line, line, line)


def numbers_of(view: View, first: int = 0) -> View:
    """The numbers of `view` as channels of one pixel, from the `first` on: they leave no gaps."""
    return view.as_numbers(1, view.floats, 1, 1).channels(first, view.floats)
