"""Vectors divided by their length, as torch.nn.functional.normalize.

The channels of each pixel: the root-mean-square norm of video autoencoders, but for a factor that
they multiply by. Or the pixels of each channel: attention of channels to channels.
"""

from __future__ import annotations

from ..language.compiler import Args, Kernel
from ..language.loops import each_vector
from ..language.values import Value
from ..language.vectors import Emitter
from ..tape.steps import Step, View, pixelwise, step
from .curves import larger
from .elementwise import multiply_step
from .normalize import across
from .response import squares_step


def unit_step(x: View, y: View, *, eps: float = 1e-12) -> Step:
    """x / max(length of the pixel's channels, eps)."""
    return step(UNIT, **pixelwise(x, y), y=y, y_pixel=y.pixel, eps=float(eps))


def _emit(e: Emitter, a: Args, thread: Value, threads: Value) -> None:
    begin, end = e.share(a.pixels, thread, threads)
    least = e.broadcast(e.float_of_bits(a.eps))
    with e.range(begin, end) as pixel:
        source, target = a.x.floats() + pixel * a.x_pixel, a.y.floats() + pixel * a.y_pixel
        squares = e.variable(0.0)

        def add(c: Value, mask: Value | None) -> None:
            value = e.load(source + c, mask)
            squares.value = e.fma(value, value, squares.value)

        each_vector(e, 0, a.c, add)
        length = e.sqrt(across(e, squares.value, lambda p, q: p + q))
        divisor = larger(e, length, least)

        def divide(c: Value, mask: Value | None) -> None:
            e.store(e.load(source + c, mask) / divisor, target + c, mask)

        each_vector(e, 0, a.c, divide)


def unit_channel_steps(x: View, pieces: View, factors: View, y: View, *, eps: float) -> list[Step]:
    """x / max(length of the channel over its image, eps), with room as `response_steps` has it."""
    squares = squares_step(x, pieces)
    shares = step(
        SHARES,
        x=pieces,
        x_pixel=pieces.pixel,
        pieces=squares.given["pieces"],
        n=x.shape[0],
        c=x.shape[1],
        eps=float(eps),
        y=factors,
        y_pixel=factors.pixel,
    )
    return [squares, shares, multiply_step(x, factors, y)]


def _emit_shares(e: Emitter, a: Args, thread: Value, threads: Value) -> None:
    begin, end = e.share(a.n, thread, threads)
    least = e.broadcast(e.float_of_bits(a.eps))
    with e.range(begin, end) as image:
        start = a.x.floats() + image * a.pieces * a.x_pixel
        target = a.y.floats() + image * a.y_pixel

        def share(c: Value, mask: Value | None) -> None:
            squares = e.variable(0.0)
            with e.range(0, a.pieces) as piece:
                squares.value = squares.value + e.load(start + (piece * a.x_pixel + c), mask)
            e.store(1.0 / larger(e, e.sqrt(squares.value), least), target + c, mask)

        each_vector(e, e.i64(0), a.c, share)


UNIT = Kernel("unit", ("x", "x_pixel", "y", "y_pixel", "pixels", "c", "eps"), _emit)
SHARES = Kernel(
    "unit_shares", ("x", "x_pixel", "n", "c", "pieces", "eps", "y", "y_pixel"), _emit_shares
)
