"""Pixels divided by their length, as torch.nn.functional.normalize: the root-mean-square norm of
video autoencoders, but for a factor that they multiply by."""

from __future__ import annotations

from ..language.compiler import Args, Kernel
from ..language.loops import each_vector
from ..language.values import Value
from ..language.vectors import Emitter
from ..tape.steps import Step, View, pixelwise, step
from .normalize import across, largest


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
        divisor = largest(e, length, least)

        def divide(c: Value, mask: Value | None) -> None:
            e.store(e.load(source + c, mask) / divisor, target + c, mask)

        each_vector(e, 0, a.c, divide)


UNIT = Kernel("unit", ("x", "x_pixel", "y", "y_pixel", "pixels", "c", "eps"), _emit)
