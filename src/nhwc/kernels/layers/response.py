"""Global response norm of channels-last pixels, as ConvNeXt V2 has it.

Each channel of an image has a size, the root of the sum of its squares, and is multiplied by how
large that is beside the mean of all sizes. Sums are taken in pieces of the image, since those of
few channels would keep few threads busy:

    image n, channels c   SQUARES              RESPONSES              product (elementwise.py)
    piece 0  ..........  --------->  [q q q q]  ------>  [s s s s]  ------>  x * s + bias
    piece 1  ..........              [q q q q]

with s = 1 + weight * size / (mean size + eps).
"""

from __future__ import annotations

from torch import Tensor

from ..language.compiler import Args, Kernel
from ..language.loops import each_vector
from ..language.values import Value
from ..language.vectors import Emitter
from ..product.weights import pad_channels
from ..tape.steps import Argument, Step, View, step
from .elementwise import multiply_step
from .group_norm import piece_of, pieces_of
from .normalize import across
from .summing import each_pixel, new_sums, together


def response_steps(
    x: View,
    pieces: View,
    factors: View,
    y: View,
    *,
    weight: Tensor,
    bias: Tensor,
    eps: float,
) -> list[Step]:
    """x * (1 + weight * size / (mean of sizes + eps)) + bias.

    `pieces` is room for c numbers of each piece of each image, `factors` for as many of each image.
    """
    n, c = x.shape[:2]
    squares = squares_step(x, pieces)
    return [
        squares,
        step(
            RESPONSES,
            x=pieces,
            x_pixel=pieces.pixel,
            pieces=squares.given["pieces"],
            n=n,
            c=c,
            weights=pad_channels(weight, c),
            eps=float(eps),
            y=factors,
            y_pixel=factors.pixel,
        ),
        multiply_step(x, factors, y, shift=bias),
    ]


def squares_step(x: View, pieces: View) -> Step:
    """The sum of the squares of each channel over each piece of each image."""
    n, c, h, w = x.shape
    cut: dict[str, Argument] = {"piece": piece_of(c), "pieces": pieces_of(c, h * w)}
    sizes: dict[str, Argument] = {"n": n, "c": c, "area": h * w}
    return step(SQUARES, x=x, x_pixel=x.pixel, **cut, **sizes, y=pieces, y_pixel=pieces.pixel)


def _emit_squares(e: Emitter, a: Args, thread: Value, threads: Value) -> None:
    begin, end = e.share(a.n * a.pieces, thread, threads)
    with e.range(begin, end) as unit:
        first = unit % a.pieces * a.piece
        count = e.min(a.piece, a.area - first)
        start = a.x.floats() + (unit // a.pieces * a.area + first) * a.x_pixel
        target = a.y.floats() + unit * a.y_pixel

        def channels(c: Value, mask: Value | None) -> None:
            sums = new_sums(e)

            def add(number: int, value: Value) -> None:
                sums[number].value = e.fma(value, value, sums[number].value)

            each_pixel(e, a, start + c, count, mask, add)
            e.store(together(sums), target + c, mask)

        each_vector(e, e.i64(0), a.c, channels)


def _emit_responses(e: Emitter, a: Args, thread: Value, threads: Value) -> None:
    begin, end = e.share(a.n, thread, threads)
    with e.range(begin, end) as image:
        start, target = (
            a.x.floats() + image * a.pieces * a.x_pixel,
            a.y.floats() + image * a.y_pixel,
        )
        total = e.variable(0.0)

        def size(c: Value, mask: Value | None) -> None:
            squares = e.variable(0.0)
            with e.range(0, a.pieces) as piece:
                squares.value = squares.value + e.load(start + (piece * a.x_pixel + c), mask)
            root = e.sqrt(squares.value)
            e.store(root, target + c, mask)
            # Lanes beside the channels are zero.
            total.value = total.value + root

        each_vector(e, e.i64(0), a.c, size)
        mean = across(e, total.value, lambda p, q: p + q) / e.broadcast(e.to_float(a.c))
        share = 1.0 / (mean + e.broadcast(e.float_of_bits(a.eps)))

        def respond(c: Value, mask: Value | None) -> None:
            response = e.load(target + c, mask) * share
            weight = e.load(a.weights.floats() + c)
            e.store(e.fma(response, weight, e.vector(1.0)), target + c, mask)

        each_vector(e, e.i64(0), a.c, respond)


SQUARES = Kernel(
    "response_squares",
    ("x", "x_pixel", "n", "c", "area", "piece", "pieces", "y", "y_pixel"),
    _emit_squares,
)
RESPONSES = Kernel(
    "responses",
    ("x", "x_pixel", "n", "c", "pieces", "weights", "eps", "y", "y_pixel"),
    _emit_responses,
)
