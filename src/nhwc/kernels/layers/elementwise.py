"""Operators that treat each pixel alone: sums, products, batch norm, activations, copies."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from functools import partial

from torch import Tensor

from ..language.compiler import Args, Kernel
from ..language.loops import Place, each_vector, emit_runs
from ..language.values import Value
from ..language.vectors import Emitter
from ..product.weights import pad_channels
from ..tape.steps import Argument, Step, View, covers, pixelwise, sharing, step
from .activations import Activation
from .curves import larger, smaller
from .ending import ENDING, add_and_put, ending, finish, put


def activation_step(
    x: View, y: View, activation: Activation = Activation.NONE, *, slope: float = 0.01
) -> Step:
    """activation(x); with NONE, a copy."""
    return step(SUM, **pixelwise(x, y), **ending(y, activation, slope))


def copy_step(x: View, y: View) -> Step:
    """x, where y lies: how a channel slice becomes a part of something else."""
    return activation_step(x, y)


def add_step(
    x: View,
    other: View,
    y: View,
    *,
    activation: Activation = Activation.NONE,
    slope: float = 0.01,
) -> Step:
    """activation(x + other)."""
    return step(SUM, **pixelwise(x, y), **ending(y, activation, slope, other))


def affine_step(
    x: View,
    y: View,
    scale: Tensor,
    shift: Tensor | None = None,
    *,
    activation: Activation = Activation.NONE,
    slope: float = 0.01,
    residual: View | None = None,
) -> Step:
    """activation(x * scale + shift + residual), a scale and a shift per channel: batch norm."""
    c = x.shape[1]
    factors: dict[str, Argument] = {
        "factor": pad_channels(scale, c),
        "factor_pixel": 0,
        "shared_by": 1,
    }
    shifted: dict[str, Argument] = {"shift": pad_channels(shift, c)}
    return step(
        PRODUCT, **pixelwise(x, y), **factors, **shifted, **ending(y, activation, slope, residual)
    )


def prelu_step(x: View, y: View, weight: Tensor) -> Step:
    """x, and below zero x * weight, a weight per channel or one for all."""
    c = x.shape[1]
    return step(
        PRELU,
        **pixelwise(x, y),
        factor=pad_channels(weight.expand(c), c),
        **ending(y, Activation.NONE),
    )


def multiply_step(
    x: View,
    factor: View,
    y: View,
    *,
    shift: Tensor | None = None,
    activation: Activation = Activation.NONE,
    slope: float = 0.01,
    residual: View | None = None,
) -> Step:
    """activation(x * factor + shift + residual), with a shift per channel.

    A factor of one pixel per image is squeeze-excite's; one of a single pixel is for all images.
    """
    factors: dict[str, Argument] = {
        "factor": factor,
        "factor_pixel": factor.pixel,
        "shared_by": sharing(factor, x),
    }
    shifted: dict[str, Argument] = {"shift": pad_channels(shift, x.shape[1])}
    return step(
        PRODUCT, **pixelwise(x, y), **factors, **shifted, **ending(y, activation, slope, residual)
    )


def pixel_step(x: View, number: View, y: View, *, kind: str) -> Step:
    """x, and one number for each pixel: their `product`, `quotient`, `sum` or `difference`.

    A `number` of a single pixel is for all.
    """
    for_all = number.pixels == 1
    if not for_all:
        covers(number, x.channels(0, 1))
    numbers: dict[str, Argument] = {
        "factor": number,
        "factor_pixel": 0 if for_all else number.pixel,
    }
    return step(WITH_PIXELS[kind], **pixelwise(x, y), **numbers, **ending(y, Activation.NONE))


def spread_step(x: View, other: View, y: View, *, kind: str) -> Step:
    """The `sum` of x and other, or `difference`, where other has fewer pixels.

    Those are one for each image, one for all of them, or one image for all.
    """
    many, share = math.prod(other.shape[2:]) > 1, sharing(other, x)
    others: dict[str, Argument] = {
        "other": other,
        "other_pixel": other.pixel,
        "others": other.pixels,
        "shared_by": 1 if many else share,
    }
    return step(SPREAD[kind], **pixelwise(x, y), **others, **ending(y, Activation.NONE))


def each_step(x: View, other: View, y: View, *, kind: str) -> Step:
    """The `quotient` of x and other, number by number, or the `larger` or `smaller` number."""
    covers(other, x)
    numbers: dict[str, Argument] = {"factor": other, "factor_pixel": other.pixel}
    return step(OF_EACH[kind], **pixelwise(x, y), **numbers, **ending(y, Activation.NONE))


Change = Callable[[Value, Place], Value]
"""Computes a new vector from one that was read, and the place where it was read."""
ChangeOf = Callable[[Emitter, Args, Value], Change]
"""Returns the change for the vectors of one pixel."""


def _emit(e: Emitter, a: Args, thread: Value, threads: Value, *, of: ChangeOf) -> None:
    begin, end = e.share(a.pixels, thread, threads)
    pixels, c = end - begin, a.c
    if of is _none:
        # What is done to each number alike is done to pixels without gaps as to one.
        residual = e.select(a.residual != 0, a.residual_pixel, c)
        pixels, c = emit_runs(e, pixels, c, a.x_pixel, a.y_pixel, residual)

    def each(end_with: Callable[..., None]) -> None:
        with e.range(0, pixels) as i:
            pixel = begin + i
            source, change = a.x.floats() + pixel * a.x_pixel, of(e, a, pixel)

            def channels(channel: Value, mask: Value | None) -> None:
                place = Place(channel, mask)
                end_with(e, a, [change(e.load(source + channel, mask), place)], pixel, place)

            each_vector(e, 0, c, channels)

    # Nothing is asked for each vector where there is nothing to ask.
    plain = a.code == int(Activation.NONE)
    e.branch(
        plain & (a.residual == 0),
        partial(each, put),
        lambda: e.branch(plain, partial(each, add_and_put), partial(each, finish)),
    )


def _none(e: Emitter, a: Args, pixel: Value) -> Change:
    return lambda value, place: value


def _product(e: Emitter, a: Args, pixel: Value) -> Change:
    factors, shifts = a.factor.floats() + pixel // a.shared_by * a.factor_pixel, a.shift.floats()

    def change(value: Value, place: Place) -> Value:
        channel, mask = place
        return e.fma(value, e.load(factors + channel, mask), e.load(shifts + channel))

    return change


def _spread(
    e: Emitter, a: Args, pixel: Value, *, combine: Callable[[Value, Value], Value]
) -> Change:
    others = a.other.floats() + pixel // a.shared_by % a.others * a.other_pixel

    def change(value: Value, place: Place) -> Value:
        return combine(value, e.load(others + place.channel, place.mask))

    return change


def _of_each(
    e: Emitter, a: Args, pixel: Value, *, combine: Callable[[Emitter, Value, Value], Value]
) -> Change:
    others = a.factor.floats() + pixel * a.factor_pixel

    def change(value: Value, place: Place) -> Value:
        return combine(e, value, e.load(others + place.channel, place.mask))

    return change


def _with_pixels_number(
    e: Emitter, a: Args, pixel: Value, *, combine: Callable[[Value, Value], Value]
) -> Change:
    number = e.broadcast(e.read(a.factor.floats() + pixel * a.factor_pixel))
    return lambda value, place: combine(value, number)


def _prelu(e: Emitter, a: Args, pixel: Value) -> Change:
    factors = a.factor.floats()
    return lambda value, place: e.select(value < 0.0, value * e.load(factors + place[0]), value)


def _kernel(name: str, fields: tuple[str, ...], of: ChangeOf) -> Kernel:
    return Kernel(name, ("x", "x_pixel", "pixels", "c", *fields, *ENDING), partial(_emit, of=of))


SUM = _kernel("sum", (), _none)
PRODUCT = _kernel("product", ("factor", "factor_pixel", "shared_by", "shift"), _product)
PRELU = _kernel("prelu", ("factor",), _prelu)
OF_EACH = {
    kind: _kernel(kind, ("factor", "factor_pixel"), partial(_of_each, combine=combine))
    for kind, combine in {
        "quotient": lambda e, one, other: one / other,
        "larger": larger,
        "smaller": smaller,
    }.items()
}
_COMBINED = {
    "product": operator.mul,
    "quotient": operator.truediv,
    "sum": operator.add,
    "difference": operator.sub,
}
WITH_PIXELS = {
    kind: _kernel(
        f"pixel_{kind}", ("factor", "factor_pixel"), partial(_with_pixels_number, combine=combine)
    )
    for kind, combine in _COMBINED.items()
}
SPREAD = {
    kind: _kernel(
        f"spread_{kind}",
        ("other", "other_pixel", "others", "shared_by"),
        partial(_spread, combine=_COMBINED[kind]),
    )
    for kind in ("sum", "difference")
}
