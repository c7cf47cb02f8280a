"""Grouped 3x3 convolution: a few neighbouring outputs in registers, a vector of channels each.

A matrix product per group would leave most lanes of a vector idle where groups are narrow. Here the
lanes are output channels of one or several groups side by side, and a tile is `_TILE` neighbouring
outputs of a row. Each lane must be multiplied by an input channel of its own group:

    groups of 4, vectors of 8        lanes of output channels   A A A A B B B B
                                     a pixel of the input       a b c d e f g h
    narrow: shuffled within groups   first input channel        a a a a e e e e
                                     second                     b b b b f f f f   ...

    groups of a vector or more       lanes                      A A A A A A A A
    wide: one number, broadcast      first input channel        a a a a a a a a   ...

    a group that ends in the middle  lanes                      A A A A B B B B
    of a vector: one for each half   first of each group        a a a a m m m m   ...

Whatever it is, a pixel is loaded once and multiplied for up to three outputs that see it:

    pixels    p0 p1 p2 p3 p4 p5 p6 p7 p8          stride 1: p2 is the last tap of output 0,
    outputs   [ 0      ]                          the middle one of output 1 and the first
                 [ 1      ]                       one of output 2
                    [ 2      ]

Seven sums, three taps and the pixel are eleven registers, which AVX2 has, too.

Threads share out rows of the result where there are several for each (`by_rows`), as they do in the
layers before and after; else vectors of channels. Within its share a thread computes all vectors of
channels of a row, and then the next row (`row_by_row`), where all weights stay in the second-level
cache: so pixels are read once. Else it computes all rows for one vector, so that weights are.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ..language import isa as isas
from ..language.compiler import Args, Kernel
from ..language.loops import Place, emit_vectors
from ..language.values import Value
from ..language.vectors import Emitter, Variable
from ..layers.ending import ENDING, ending, finish
from ..product.weights import after, pack_bias
from ..tape.pages import room, shared
from ..tape.steps import Step, View, pieces_of, step
from .spec import ConvSpec

_FIELDS = (
    *("x", "x_pixel", "weights", "bias"),
    *ENDING,
    *("n", "h", "w", "out_h", "out_w", "k", "group_c", "group_k", "by_rows", "row_by_row"),
)
"""`k` is all output channels, `group_c` and `group_k` what a group reads and writes."""

_TILE = 7
"""Outputs computed at once: divides the sizes that 224 leads to, and leaves registers for more."""
_ROWS = 4
"""With this many rows for each thread, threads share out rows, as do the layers before and after:
then a thread reads what it wrote itself. With fewer they share out channels.
"""
_NEAR_BYTES = 384 << 10
"""How much of the second-level cache weights may take, to be used again for each row of pixels."""
NARROW = (4, 8)
"""Channels per group, where fewer than a vector holds, that have a kernel with shuffles."""


def _emit(e: Emitter, a: Args, thread: Value, threads: Value, *, narrow: int, stride: int) -> None:
    by_rows = a.by_rows != 0
    # Either rows or vectors are shared out; of the others every thread does all.
    rows = e.share(a.n * a.out_h, *_among(e, by_rows, thread, threads))
    vectors = e.share(emit_vectors(e, a.k), *_among(e, ~by_rows, thread, threads))
    lengths = rows[1] - rows[0], vectors[1] - vectors[0]
    inner = e.select(a.row_by_row != 0, lengths[1], lengths[0])
    with e.range(0, lengths[0] * lengths[1]) as piece:
        outer, inside = piece // inner, piece % inner
        row = rows[0] + e.select(a.row_by_row != 0, outer, inside)
        vector = vectors[0] + e.select(a.row_by_row != 0, inside, outer)
        channel = vector * e.width
        top = row % a.out_h * stride - 1
        source = a.x.floats() + ((row // a.out_h * a.h + top) * a.w) * a.x_pixel
        first = source + (channel if narrow else channel // a.group_k * a.group_c)
        second, mask = _second(e, a, channel)
        weights = a.weights.floats() + vector * 9 * a.group_c * e.width
        _fetch_following(e, weights, 9 * a.group_c * e.width, row - rows[0], rows[1] - rows[0])
        # The rows of the filter that lie within the image; columns are masked tap by tap.
        valid = (e.max(0 - top, 0), e.min(a.h - top, 3))
        with e.range(0, a.out_w, _TILE) as wanted:
            # The last tile moves left to end with the row, and computes some outputs again.
            left = e.min(wanted, a.out_w - _TILE)
            following = a.y.floats() + (((row + 1) * a.out_w + left) * a.y_pixel + channel)
            _fetch_row(e, a, first + left * stride * a.x_pixel, following, stride)
            sums = [e.variable(0.0) for _ in range(_TILE)]
            for one in sums:
                one.value = e.load(a.bias.floats() + channel)
            with e.range(*valid) as i:
                line = first + i * a.w * a.x_pixel
                filters = weights + i * 3 * a.group_c * e.width
                columns = _Columns(e, a, line, left * stride - 1, stride)
                if narrow:
                    for j in range(narrow):
                        lanes = [lane // narrow * narrow + j for lane in range(e.width)]
                        values = (e.shuffle(columns.vector(n), lanes) for n in columns.numbers)
                        _add(e, sums, values, filters + j * 3 * e.width, stride)
                else:
                    each = partial(_add_inputs, e, a, sums, columns, filters, stride)
                    if second is None:
                        each(None)
                    else:
                        e.branch(second == 0, partial(each, None), partial(each, second))
            finish(e, a, [s.value for s in sums], row * a.out_w + left, Place(channel, mask))


def _second(e: Emitter, a: Args, channel: Value) -> tuple[Value | None, Value | None]:
    """How far the inputs of a vector's second half lie behind the first's, and its mask.

    Vectors and groups begin and end at multiples of half a vector, so a vector meets two groups at
    most. The result is None and None on processors whose vectors are no longer than a half.
    """
    half = e.isa.least
    if half == e.width:
        return None, None
    last = e.min(channel + half, a.k - 1) // a.group_k
    return (last - channel // a.group_k) * a.group_c, e.lanes(a.k - channel)


def _among(e: Emitter, shared: Value, thread: Value, threads: Value) -> tuple[Value, Value]:
    return e.select(shared, thread, e.i64(0)), e.select(shared, threads, e.i64(1))


def _fetch_following(e: Emitter, weights: Value, size: Value, row: Value, rows: Value) -> None:
    """Ask for the weights of the next vector, a part of them with each row of this one."""
    with e.range(size + row * size // rows, size + (row + 1) * size // rows, e.width) as i:
        e.prefetch(weights + i, level=2)


def _fetch_row(e: Emitter, a: Args, x: Value, y: Value, stride: int) -> None:
    """Prefetch the pixels under a tile, and at `y`, that the next row of outputs will use.

    A pixel's vector lies too far from the next pixel's for the processor to foresee the access.
    """
    for i in range(3, 3 + stride):
        for n in range(_TILE * stride):
            e.prefetch(x + (i * a.w + n) * a.x_pixel, level=2)
    for n in range(_TILE):
        e.prefetch(y + n * a.y_pixel, write=True)


class _Columns:
    """The pixels of one input row that a tile sees; the outermost may lie in the padding."""

    def __init__(self, e: Emitter, a: Args, line: Value, left: Value, stride: int) -> None:
        self.numbers = range((_TILE - 1) * stride + 3)
        self._e = e
        self._inside = {n: (left + n >= 0) & (left + n < a.w) for n in (0, self.numbers[-1])}
        bounded = {n: e.max(e.i64(0), e.min(left + n, a.w - 1)) for n in self._inside}
        self._at = [line + bounded.get(n, left + n) * a.x_pixel for n in self.numbers]

    def vector(self, number: int) -> Value:
        return self._padded(number, self._e.load(self._at[number]))

    def broadcast(self, number: int, channel: Value, apart: Value | None) -> Value:
        """A channel in every lane; in the second half the one that lies so far `apart`."""
        at = self._at[number] + channel
        value = self._e.broadcast(self._e.read(at))
        if apart is not None:
            second = self._e.broadcast(self._e.read(at + apart))
            value = self._e.select(self._e.lanes(self._e.isa.least), value, second)
        return self._padded(number, value)

    def _padded(self, number: int, value: Value) -> Value:
        inside = self._inside.get(number)
        return value if inside is None else self._e.select(inside, value, self._e.vector(0.0))


def _add_inputs(
    e: Emitter,
    a: Args,
    sums: list[Variable],
    columns: _Columns,
    filters: Value,
    stride: int,
    apart: Value | None,
) -> None:
    with e.range(0, a.group_c) as channel:
        values = (columns.broadcast(n, channel, apart) for n in columns.numbers)
        _add(e, sums, values, filters + channel * 3 * e.width, stride)


def _add(
    e: Emitter, sums: list[Variable], values: Iterator[Value], filters: Value, stride: int
) -> None:
    """Add what each column contributes to the up to three outputs that see it."""
    taps = [e.load(filters + s * e.width) for s in range(3)]
    for number, value in enumerate(values):
        for t, one in enumerate(sums):
            if 0 <= number - t * stride < 3:
                one.value = e.fma(value, taps[number - t * stride], one.value)


@cache
def grouped_kernel(narrow: int, stride: int) -> Kernel:
    """The kernel for groups of `narrow` channels, or for groups of whole half vectors if 0."""
    emit = partial(_emit, narrow=narrow, stride=stride)
    return Kernel(f"grouped{narrow or ''}s{stride}", _FIELDS, emit)


def serves(spec: ConvSpec) -> bool:
    """Whether this kernel can compute `spec`."""
    filter = (spec.r, spec.s, spec.padding, spec.dilation) == (3, 3, (1, 1), (1, 1))
    stride = spec.stride in ((1, 1), (2, 2))
    wide = spec.out_w >= _TILE
    return filter and stride and wide and spec.groups > 1 and _narrow(spec) is not None


def _narrow(spec: ConvSpec) -> int | None:
    isa, inputs, outputs = isas.host(), spec.c // spec.groups, spec.k // spec.groups
    if inputs == outputs and inputs in NARROW and isa.width % inputs == 0 == spec.k % isa.width:
        return inputs
    return 0 if outputs % isa.least == 0 else None


def kernel_of(spec: ConvSpec) -> Kernel:
    return grouped_kernel(_narrow(spec) or 0, spec.stride[0])


def pack_grouped(spec: ConvSpec, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[vector of outputs][row][input][column][output], then the bias."""
    isa = isas.host()
    whole = F.pad(weight.detach().float(), (0,) * 7 + (-spec.k % isa.width,))
    lanes = whole.unflatten(0, (-1, isa.width)).permute(0, 3, 2, 4, 1)
    packed = room(packed_floats(spec))
    packed[: lanes.numel()].view(lanes.shape).copy_(lanes)
    packed[lanes.numel() :] = pack_bias(bias, spec.k, 1, isa)
    return shared(packed)


def packed_floats(spec: ConvSpec) -> int:
    """How many numbers `pack_grouped` returns."""
    return isas.host().padded(spec.k) * (spec.depth + 1)


def grouped_steps(
    spec: ConvSpec, x: View, y: View, packed: Tensor | View, residual: View | None = None
) -> tuple[Step, ...]:
    """The convolution as one step."""
    rows = spec.n * spec.out_h
    by_rows = rows >= _ROWS * torch.get_num_threads()
    return (
        step(
            kernel_of(spec),
            pieces_of(rows // _ROWS if by_rows else 1, spec.products),
            x=x,
            weights=packed,
            bias=after(packed, isas.host().padded(spec.k) * spec.depth),
            x_pixel=x.pixel,
            n=spec.n,
            h=spec.h,
            w=spec.w,
            out_h=spec.out_h,
            out_w=spec.out_w,
            k=spec.k,
            group_c=spec.c // spec.groups,
            group_k=spec.k // spec.groups,
            by_rows=int(by_rows),
            row_by_row=int(4 * spec.k * spec.depth <= _NEAR_BYTES),
            **ending(y, spec.activation, spec.slope, residual),
        ),
    )
