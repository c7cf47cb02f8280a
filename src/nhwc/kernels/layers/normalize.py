"""Operators over the channels of each pixel: sums, softmax, layer norm, root mean square norm."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor

from ..language.compiler import Args, Kernel
from ..language.loops import Place, each_vector
from ..language.values import Value
from ..language.vectors import Emitter
from ..product.moments import across as across
from ..product.moments import emit_moments
from ..product.weights import pad_channels
from ..tape.steps import Step, View, covers, pixelwise, step
from .activations import Activation
from .curves import emit_bounded_exp, emit_log, larger
from .ending import ENDING, ending, finish


def softmax_step(x: View, y: View, *, logarithm: bool = False) -> Step:
    """Softmax over the channels of each pixel, or its logarithm."""
    kernel = LOG_SOFTMAX if logarithm else SOFTMAX
    return step(kernel, **pixelwise(x, y), **ending(y, Activation.NONE))


def row_step(x: View, y: View, *, kind: str) -> Step:
    """The `sum`, `mean` or largest (`amax`) of the channels of each pixel."""
    covers(y, x.channels(0, 1))
    return step(
        LARGEST if kind == "amax" else TOTAL,
        x=x,
        x_pixel=x.pixel,
        pixels=x.pixels,
        c=x.shape[1],
        divisor=x.shape[1] if kind == "mean" else 1,
        **ending(y, Activation.NONE),
    )


def layer_norm_step(
    x: View,
    y: View,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float = 1e-5,
    centred: bool = True,
    activation: Activation = Activation.NONE,
    residual: View | None = None,
) -> Step:
    """activation(layer_norm(x) + residual) over the channels of each pixel.

    If it is not `centred`, no mean is subtracted: the norm is by the root of the mean square.
    """
    import torch

    c = x.shape[1]
    weight = torch.ones(c) if weight is None else weight
    return step(
        LAYER_NORM,
        **pixelwise(x, y),
        weights=pad_channels(weight, c),
        bias=pad_channels(bias, c),
        eps=float(eps),
        centred=int(centred),
        **ending(y, activation, residual=residual),
    )


def _emit_rows(
    e: Emitter,
    a: Args,
    thread: Value,
    threads: Value,
    *,
    start: float,
    combine: Callable[[Emitter, Value, Value], Value],
) -> None:
    begin, end = e.share(a.pixels, thread, threads)
    with e.range(begin, end) as pixel:
        source, found = a.x.floats() + pixel * a.x_pixel, e.variable(start)

        def add(c: Value, mask: Value | None) -> None:
            value = e.load(source + c, mask)
            if mask is not None:
                value = e.select(mask, value, e.vector(start))
            found.value = combine(e, found.value, value)

        each_vector(e, 0, a.c, add)
        made = across(e, found.value, partial(combine, e)) / e.broadcast(e.to_float(a.divisor))
        finish(e, a, [made], pixel, Place(e.i64(0), e.lanes(1)))


def _emit_softmax(e: Emitter, a: Args, thread: Value, threads: Value, *, logarithm: bool) -> None:
    begin, end = e.share(a.pixels, thread, threads)
    with e.range(begin, end) as pixel:
        source = a.x.floats() + pixel * a.x_pixel
        target = a.y.floats() + pixel * a.y_pixel
        top, total = e.variable(float("-inf")), e.variable(0.0)

        def find_top(c: Value, mask: Value | None) -> None:
            value = e.load(source + c, mask)
            if mask is not None:
                value = e.select(mask, value, e.vector(float("-inf")))
            top.value = larger(e, top.value, value)

        each_vector(e, 0, a.c, find_top)
        highest = across(e, top.value, lambda p, q: larger(e, p, q))

        def raise_e(c: Value, mask: Value | None) -> None:
            value = emit_bounded_exp(e, e.load(source + c, mask) - highest)
            if not logarithm:
                e.store(value, target + c, mask)
            total.value = total.value + (value if mask is None else e.select(mask, value, 0.0))

        each_vector(e, 0, a.c, raise_e)
        sum_of_all = across(e, total.value, lambda p, q: p + q)

        log_of_all = emit_log(e, sum_of_all) if logarithm else None

        def divide(c: Value, mask: Value | None) -> None:
            if log_of_all is None:
                made = e.load(target + c, mask) / sum_of_all
            else:
                made = e.load(source + c, mask) - highest - log_of_all
            finish(e, a, [made], pixel, Place(c, mask))

        each_vector(e, 0, a.c, divide)


def _emit_layer_norm(e: Emitter, a: Args, thread: Value, threads: Value) -> None:
    begin, end = e.share(a.pixels, thread, threads)
    eps = e.broadcast(e.float_of_bits(a.eps))
    with e.range(begin, end) as pixel:
        source = a.x.floats() + pixel * a.x_pixel
        mean, scale = emit_moments(e, source, a.c, eps, a.centred)

        def normalize(c: Value, mask: Value | None) -> None:
            value = (e.load(source + c, mask) - mean) * scale
            weight, bias = (e.load(part.floats() + c) for part in (a.weights, a.bias))
            finish(e, a, [e.fma(value, weight, bias)], pixel, Place(c, mask))

        each_vector(e, 0, a.c, normalize)


_OF_ROWS = ("x", "x_pixel", "pixels", "c", "divisor", *ENDING)
TOTAL = Kernel(
    "total", _OF_ROWS, partial(_emit_rows, start=0.0, combine=lambda e, one, other: one + other)
)
LARGEST = Kernel("largest", _OF_ROWS, partial(_emit_rows, start=float("-inf"), combine=larger))
SOFTMAX, LOG_SOFTMAX = (
    Kernel(
        name,
        ("x", "x_pixel", "pixels", "c", *ENDING),
        partial(_emit_softmax, logarithm=name == "log_softmax"),
    )
    for name in ("softmax", "log_softmax")
)
LAYER_NORM = Kernel(
    "layer_norm",
    ("x", "x_pixel", "pixels", "c", "weights", "bias", "eps", "centred", *ENDING),
    _emit_layer_norm,
)
