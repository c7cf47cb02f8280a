"""Packing: the input pixels under output pixels, laid out as the micro-kernel reads them."""

from __future__ import annotations

from .compiler import Args
from .values import Value
from .vectors import Emitter

FIELDS = (
    "x_pixel",
    "h",
    "w",
    "c",
    "out_h",
    "out_w",
    "r",
    "s",
    "stride_h",
    "stride_w",
    "pad_h",
    "pad_w",
    "dilation_h",
    "dilation_w",
    "run",
    "depth",
    "flat",
    "whole",
)
"""How output pixels see input pixels.

`run` is how many taps of a row lie side by side in memory and are copied as one: s, or 1. `depth`
is r * s * c. `flat` says that output pixel i sees input pixel i and nothing else; `whole` that runs
are multiples of the vector, so that they go straight to their chunks.
"""


def emit_pack(
    e: Emitter,
    a: Args,
    memory: tuple[Value, Value],
    which: tuple[Value, Value],
    into: Value,
) -> None:
    """Pack what some output pixels see as [depth / width][pixel][width].

    `memory` is the image and a line of `line_floats` to work in; `which` the first pixel and how
    many follow.
    """
    (x, line), (first, rows) = memory, which
    with e.range(0, rows) as i:
        here = into + i * e.width
        e.branch(
            a.flat != 0,
            lambda: _copy(e, x + (first + i) * a.x_pixel, here, a.depth, rows),
            lambda: _windows(e, a, (x, line), (first + i, rows), here),
        )


def line_floats(depth: int, width: int) -> int:
    """The size of the line that `emit_pack` works in."""
    return (-(-depth // width) + 1) * width


def _copy(e: Emitter, source: Value, to: Value, count: Value, scale: Value) -> None:
    """Copy `count` floats; what is n floats into the source goes n * scale floats into `to`.

    The last vector is read with care and written whole.
    """
    whole = count // e.width * e.width
    with e.range(0, whole, e.width) as i:
        e.store(e.load(source + i), to + i * scale)
    with e.when(whole < count):
        e.store(e.load(source + whole, e.lanes(count - whole)), to + whole * scale)


def _clear(e: Emitter, to: Value, count: Value, scale: Value) -> None:
    with e.range(0, count, e.width) as i:
        e.store(e.vector(0.0), to + i * scale)


def _windows(
    e: Emitter,
    a: Args,
    memory: tuple[Value, Value],
    which: tuple[Value, Value],
    here: Value,
) -> None:
    (x, line), (pixel, rows) = memory, which
    to = e.select(a.whole != 0, here, line)
    scale = e.select(a.whole != 0, rows, e.i64(1))
    top = pixel // a.out_w % a.out_h * a.stride_h - a.pad_h
    left = pixel % a.out_w * a.stride_w - a.pad_w
    image = pixel // (a.out_w * a.out_h) * a.h
    with e.range(0, a.r) as i, e.range(0, a.s, a.run) as j:
        row, column = top + i * a.dilation_h, left + j * a.dilation_w
        place = to + (i * a.s + j) * a.c * scale
        inside = (row >= 0) & (row < a.h)
        begin = e.min(a.run, e.max(-column, e.i64(0)))
        begin = e.select(inside, begin, a.run)
        end = e.max(begin, e.min(a.run, a.w - column))
        source = x + ((image + row) * a.w + column + begin) * a.x_pixel
        _clear(e, place, begin * a.c, scale)
        _copy(e, source, place + begin * a.c * scale, (end - begin) * a.c, scale)
        _clear(e, place + end * a.c * scale, (a.run - end) * a.c, scale)
    with e.when(a.whole == 0):
        _copy(e, line, here, (a.depth + e.width - 1) // e.width * e.width, rows)
