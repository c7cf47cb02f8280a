"""Group and instance norm of channels-last pixels: by mean and deviation of each image's groups.

A sum of squares less the square of the sum loses all digits where the mean is large beside the
deviation. So deviations are of a mean that is known: `PIECES` takes both of each channel in a piece
of the image, reading it twice while it is in the cache; `GROUPS` puts the pieces and the channels
of a group together,

    deviations of the group = deviations of the pieces + pixels * (mean of piece - mean of group)^2

Where an image is nearly constant, the last digits of its mean are all that is left of a pixel, and
a sum of many pixels has rounded them off. So what the pixels lie beside the mean is summed, too,
and their own mean added: that of a constant is this constant.

`GROUPS` does so again with the means of pieces, and `NORMALIZE` gives each pixel
(x - mean) * scale + bias.

    image n, channels c    PIECES    mean and deviations    GROUPS    mean and scale
    piece 0  ..........  --------->  [m m m m | v v v v]  --------->  [m m m m | s s s s]
    piece 1  ..........              [m m m m | v v v v]
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..language.compiler import Args, Kernel
from ..language.loops import Place, each_vector
from ..language.values import Value
from ..language.vectors import Emitter
from ..product.weights import pad_channels
from ..tape.steps import Argument, Step, View, step
from .activations import Activation
from .ending import ENDING, ending, finish
from .normalize import across
from .summing import each_pixel, emit_sum, new_sums, together

_PIECE_FLOATS = 16 << 10
"""A piece is read twice: so much stays in the second-level cache."""


def piece_of(c: int) -> int:
    """The pixels of a piece of an image with so many channels."""
    return max(16, _PIECE_FLOATS // c)


def pieces_of(c: int, area: int) -> int:
    """How many pieces an image is cut into.

    >>> pieces_of(64, 56 * 56)
    13
    """
    return -(-area // piece_of(c))


def group_norm_steps(
    x: View,
    pieces: View,
    means: View,
    y: View,
    residual: View | None = None,
    *,
    groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: Activation = Activation.NONE,
    slope: float = 0.01,
) -> list[Step]:
    """activation(group_norm(x) + residual); an instance norm has as many groups as channels.

    `pieces` is room for 2 * c numbers of each piece of each image, `means` for as many of each
    image.
    """
    n, c, h, w = x.shape
    shape: dict[str, Argument] = {"n": n, "c": c, "area": h * w}
    cut: dict[str, Argument] = {"piece": piece_of(c), "pieces": pieces_of(c, h * w)}
    source: dict[str, Argument] = {"x": x, "x_pixel": x.pixel}
    weight = torch.ones(c) if weight is None else weight
    return [
        step(PIECES, **source, **shape, **cut, y=pieces, y_pixel=pieces.pixel),
        step(
            GROUPS,
            x=pieces,
            x_pixel=pieces.pixel,
            **shape,
            **cut,
            groups=groups,
            weights=pad_channels(weight, c),
            eps=float(eps),
            y=means,
            y_pixel=means.pixel,
        ),
        step(
            NORMALIZE,
            **source,
            **shape,
            factor=means,
            factor_pixel=means.pixel,
            bias=pad_channels(bias, c),
            **ending(y, activation, slope, residual),
        ),
    ]


def _emit_pieces(e: Emitter, a: Args, thread: Value, threads: Value) -> None:
    begin, end = e.share(a.n * a.pieces, thread, threads)
    with e.range(begin, end) as unit:
        first = unit % a.pieces * a.piece
        count = e.min(a.piece, a.area - first)
        start = a.x.floats() + (unit // a.pieces * a.area + first) * a.x_pixel
        target = a.y.floats() + unit * a.y_pixel
        pixels = e.broadcast(e.to_float(count))

        def channels(c: Value, mask: Value | None) -> None:
            mean = emit_sum(e, a, start + c, count, mask) / pixels
            beside, squares = _sums_beside(e, a, start + c, count, mask, mean)
            e.store(mean + beside / pixels, target + c, mask)
            e.store(squares, target + (a.c + c), mask)

        each_vector(e, e.i64(0), a.c, channels)


def _sums_beside(
    e: Emitter, a: Args, start: Value, count: Value, mask: Value | None, mean: Value
) -> tuple[Value, Value]:
    """The sum of what is beside `mean` in a vector of channels over pixels, and of its squares."""
    sums, squares = new_sums(e), new_sums(e)

    def add(number: int, value: Value) -> None:
        beside = value - mean
        sums[number].value = sums[number].value + beside
        squares[number].value = e.fma(beside, beside, squares[number].value)

    each_pixel(e, a, start, count, mask, add)
    return together(sums), together(squares)


def _emit_groups(e: Emitter, a: Args, thread: Value, threads: Value) -> None:
    begin, end = e.share(a.n * a.groups, thread, threads)
    size = a.c // a.groups
    with e.range(begin, end) as unit:
        image, first = unit // a.groups, unit % a.groups * size
        start = a.x.floats() + (image * a.pieces * a.x_pixel + first)
        target = a.y.floats() + (image * a.y_pixel + first)
        total, beside, squares = e.variable(0.0), e.variable(0.0), e.variable(0.0)

        def pixels_of(piece: Value) -> Value:
            count = e.min(a.piece, a.area - piece * a.piece)
            return e.broadcast(e.to_float(count))

        with e.range(0, a.pieces) as piece:
            means, weight = start + piece * a.x_pixel, pixels_of(piece)

            def add(
                c: Value, mask: Value | None, means: Value = means, weight: Value = weight
            ) -> None:
                total.value = e.fma(e.load(means + c, mask), weight, total.value)

            each_vector(e, e.i64(0), size, add)
        every = e.broadcast(e.to_float(a.area * size))
        mean = across(e, total.value, lambda p, q: p + q) / every

        with e.range(0, a.pieces) as piece:
            means, weight = start + piece * a.x_pixel, pixels_of(piece)

            def add_squares(
                c: Value, mask: Value | None, means: Value = means, weight: Value = weight
            ) -> None:
                apart = e.load(means + c, mask) - mean
                if mask is not None:
                    apart = e.select(mask, apart, e.vector())
                beside.value = e.fma(apart, weight, beside.value)
                value = e.fma(apart * apart, weight, e.load(means + (a.c + c), mask))
                squares.value = squares.value + value

            each_vector(e, e.i64(0), size, add_squares)
        variance = across(e, squares.value, lambda p, q: p + q) / every
        nearer = mean + across(e, beside.value, lambda p, q: p + q) / every
        scale = 1.0 / e.sqrt(variance + e.broadcast(e.float_of_bits(a.eps)))

        def put(c: Value, mask: Value | None) -> None:
            weight = e.load(a.weights.floats() + (first + c), mask)
            e.store(nearer, target + c, mask)
            e.store(scale * weight, target + (a.c + c), mask)

        each_vector(e, e.i64(0), size, put)


def _emit_normalize(e: Emitter, a: Args, thread: Value, threads: Value) -> None:
    begin, end = e.share(a.n * a.area, thread, threads)
    with e.range(begin, end) as pixel:
        source = a.x.floats() + pixel * a.x_pixel
        factors = a.factor.floats() + pixel // a.area * a.factor_pixel

        def channels(c: Value, mask: Value | None) -> None:
            mean, scale = e.load(factors + c, mask), e.load(factors + (a.c + c), mask)
            value = e.fma(e.load(source + c, mask) - mean, scale, e.load(a.bias.floats() + c))
            finish(e, a, [value], pixel, Place(c, mask))

        each_vector(e, e.i64(0), a.c, channels)


_CUT = ("x", "x_pixel", "n", "c", "area", "piece", "pieces", "y", "y_pixel")

PIECES = Kernel("norm_pieces", _CUT, _emit_pieces)
GROUPS = Kernel("norm_groups", (*_CUT, "groups", "weights", "eps"), _emit_groups)
NORMALIZE = Kernel(
    "normalize",
    ("x", "x_pixel", "n", "c", "area", "factor", "factor_pixel", "bias", *ENDING),
    _emit_normalize,
)
