"""Pooling: the largest or the mean of a window, and means over a whole image."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from ..language.compiler import Args, Kernel
from ..language.loops import Place, each_block, each_vector, emit_vectors
from ..language.values import Value
from ..language.vectors import Emitter
from ..tape.steps import Argument, Step, View, step
from .activations import Activation
from .ending import ENDING, ending, finish
from .summing import emit_total

Pair = tuple[int, int]

_SHAPE = ("x", "x_pixel", "n", "h", "w", "c", "out_h", "out_w")
_WINDOW = ("r", "s", "pad_h", "pad_w", "stride_h", "stride_w", "dilation_h", "dilation_w")


def maxpool_step(
    x: View, y: View, *, size: Pair, stride: Pair, padding: Pair = (0, 0), dilation: Pair = (1, 1)
) -> Step:
    """The largest of each window; NaN where the window holds one. `y` says how many windows."""
    return step(MAXPOOL, **_shape(x, y), **_window(size, stride, padding, dilation))


def avgpool_step(
    x: View,
    y: View,
    *,
    size: Pair,
    stride: Pair,
    padding: Pair = (0, 0),
    count_include_pad: bool = True,
    divisor: int | None = None,
) -> Step:
    """The mean of each window, as torch's avg_pool2d; `y` says how many windows (ceil_mode)."""
    count: dict[str, Argument] = {"count_padding": int(count_include_pad), "divisor": divisor or 0}
    return step(AVGPOOL, **_shape(x, y), **_window(size, stride, padding, (1, 1)), **count)


def adaptive_avgpool_step(x: View, y: View) -> Step:
    """The means of as many even parts of the image as `y` has pixels."""
    if y.shape[2:] == (1, 1):
        return global_mean_step(x, y)
    return step(ADAPTIVE, **_shape(x, y))


def global_mean_step(x: View, y: View) -> Step:
    """The mean of each channel over each image."""
    return global_sum_step(x, y).but(divisor=x.shape[2] * x.shape[3])


def global_sum_step(x: View, y: View) -> Step:
    """The sum of each channel over each image."""
    n, c, h, w = x.shape
    sizes: dict[str, Argument] = {"n": n, "c": c, "area": h * w, "divisor": 1}
    return step(GLOBAL, x=x, x_pixel=x.pixel, **sizes, **ending(y, Activation.NONE))


def _shape(x: View, y: View) -> dict[str, Argument]:
    n, c, h, w = x.shape
    out_h, out_w = y.shape[2:]
    sizes = {"n": n, "h": h, "w": w, "c": c, "out_h": out_h, "out_w": out_w}
    return {"x": x, "x_pixel": x.pixel, **sizes, **ending(y, Activation.NONE)}


def _window(size: Pair, stride: Pair, padding: Pair, dilation: Pair) -> dict[str, Argument]:
    return {
        "r": size[0],
        "s": size[1],
        "pad_h": padding[0],
        "pad_w": padding[1],
        "stride_h": stride[0],
        "stride_w": stride[1],
        "dilation_h": dilation[0],
        "dilation_w": dilation[1],
    }


class _Output(NamedTuple):
    """An output pixel: its number, and its image, row and column."""

    pixel: Value
    image: Value
    row: Value
    column: Value


@contextmanager
def _each_output(e: Emitter, a: Args, thread: Value, threads: Value) -> Iterator[_Output]:
    """Loop over this thread's share of the outputs.

    Places are counted on from one to the next: divisions would take longer than a small window.
    """
    begin, end = e.share(a.n * a.out_h * a.out_w, thread, threads)
    # An adaptive pool may be asked for no rows at all.
    wide, high = e.max(a.out_w, 1), e.max(a.out_h, 1)
    line, column = begin // wide, e.variable(begin % wide)
    image, row = e.variable(line // high), e.variable(line % high)
    with e.range(begin, end) as pixel:
        yield _Output(pixel, image.value, row.value, column.value)
        column.value = column.value + 1
        with e.when(column.value == a.out_w):
            column.value = e.i64(0)
            row.value = row.value + 1
            with e.when(row.value == a.out_h):
                row.value = e.i64(0)
                image.value = image.value + 1


class _Window:
    """The taps of the window of one output that lie inside the image: [first, last) each way."""

    def __init__(self, e: Emitter, a: Args, output: _Output) -> None:
        self.image = output.image
        self.top = output.row * a.stride_h - a.pad_h
        self.left = output.column * a.stride_w - a.pad_w
        self.rows = taps_inside(e, self.top, a.r, a.dilation_h, a.h)
        self.columns = taps_inside(e, self.left, a.s, a.dilation_w, a.w)


def taps_inside(
    e: Emitter, start: Value, taps: Value, dilation: Value, size: Value
) -> tuple[Value, Value]:
    """The taps [first, last) along a side that see the image, where the first would at `start`."""
    first, last = e.variable(0), e.variable(taps)
    with e.when((start < 0) | (start + (taps - 1) * dilation >= size)):
        first.value = e.max((0 - start + dilation - 1) // dilation, 0)
        last.value = e.min((size - start + dilation - 1) // dilation, taps)
    return first.value, last.value


def _emit_maxpool(e: Emitter, a: Args, thread: Value, threads: Value) -> None:
    with _each_output(e, a, thread, threads) as output:
        window = _Window(e, a, output)
        corner = (window.image * a.h + window.top) * a.w + window.left
        down, right = a.dilation_h * a.w * a.x_pixel, a.dilation_w * a.x_pixel

        def channels(places: list[Place]) -> None:
            best = [e.variable(float("-inf")) for _ in places]
            with e.range(*window.rows) as i:
                line = a.x.floats() + (corner * a.x_pixel + i * down)
                with e.range(*window.columns) as j:
                    for number, (c, mask) in enumerate(places):
                        value = e.load(line + (j * right + c), mask)
                        best[number].value = emit_larger(e, best[number].value, value)
            for one, place in zip(best, places, strict=True):
                finish(e, a, [one.value], output.pixel, place)

        each_block(e, a.c, 4, channels)


def emit_larger(e: Emitter, one: Value, other: Value) -> Value:
    """Return the larger, lane by lane; NaN where either is NaN."""
    return e.select(one == one, e.max(one, other), one)


def _emit_avgpool(e: Emitter, a: Args, thread: Value, threads: Value) -> None:
    with _each_output(e, a, thread, threads) as output:
        window = _Window(e, a, output)
        # torch counts padding only as far as it was asked for, not what ceil_mode adds to it.
        high = e.min(window.top + a.r, a.h + a.pad_h) - window.top
        wide = e.min(window.left + a.s, a.w + a.pad_w) - window.left
        (top, bottom), (left, right) = window.rows, window.columns
        inner = (bottom - top) * (right - left)
        count = e.select(a.count_padding != 0, high * wide, inner)
        count = e.select(a.divisor != 0, a.divisor, count)
        rows = window.top + top, window.top + bottom
        area = _Area(window.image, *rows, window.left + left, window.left + right)
        _mean(e, a, area, count, output.pixel)


def _emit_adaptive(e: Emitter, a: Args, thread: Value, threads: Value) -> None:
    with _each_output(e, a, thread, threads) as (pixel, image, oh, ow):
        top, bottom = oh * a.h // a.out_h, ((oh + 1) * a.h + a.out_h - 1) // a.out_h
        left, right = ow * a.w // a.out_w, ((ow + 1) * a.w + a.out_w - 1) // a.out_w
        area = _Area(image, top, bottom, left, right)
        _mean(e, a, area, (bottom - top) * (right - left), pixel)


class _Area(NamedTuple):
    """Rows from `top` up to `bottom` and columns from `left` up to `right` of an image."""

    image: Value
    top: Value
    bottom: Value
    left: Value
    right: Value


def _mean(e: Emitter, a: Args, area: _Area, count: Value, pixel: Value) -> None:
    """Store the sum over an area, divided by `count`."""
    image, top, bottom, left, right = area
    divisor = e.broadcast(e.to_float(count))

    def channels(places: list[Place]) -> None:
        totals = [e.variable(0.0) for _ in places]
        with e.range(top, bottom) as i:
            line = a.x.floats() + (image * a.h + i) * a.w * a.x_pixel
            with e.range(left, right) as j:
                for total, (c, mask) in zip(totals, places, strict=True):
                    total.value = total.value + e.load(line + (j * a.x_pixel + c), mask)
        for total, place in zip(totals, places, strict=True):
            finish(e, a, [total.value / divisor], pixel, place)

    each_block(e, a.c, 2, channels)


def _emit_global(e: Emitter, a: Args, thread: Value, threads: Value) -> None:
    vectors = emit_vectors(e, a.c)
    begin, end = e.share(a.n * vectors, thread, threads)
    divisor = e.broadcast(e.to_float(a.divisor))
    with e.range(begin, end) as piece:
        image, first = piece // vectors, piece % vectors * e.width

        def channels(c: Value, mask: Value | None) -> None:
            source = a.x.floats() + (image * a.area * a.x_pixel + c)
            total = emit_total(e, a, source, a.area, mask)
            finish(e, a, [total / divisor], image, Place(c, mask))

        each_vector(e, first, e.min(first + e.width, a.c), channels)


MAXPOOL = Kernel("maxpool", (*_SHAPE, *_WINDOW, *ENDING), _emit_maxpool)
AVGPOOL = Kernel("avgpool", (*_SHAPE, *_WINDOW, "count_padding", "divisor", *ENDING), _emit_avgpool)
ADAPTIVE = Kernel("adaptive_avgpool", (*_SHAPE, *ENDING), _emit_adaptive)
GLOBAL = Kernel("global_mean", ("x", "x_pixel", "n", "c", "area", "divisor", *ENDING), _emit_global)
