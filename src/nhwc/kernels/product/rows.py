"""Packing: the input pixels under output pixels, laid out as the micro-kernel reads them."""

from __future__ import annotations

from ..language.compiler import Args
from ..language.loops import each_vector, emit_whole
from ..language.values import Value
from ..language.vectors import Emitter

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
    "segment",
    "flat",
    "whole",
)
"""How output pixels see input pixels.

`run` is how many taps of a row lie side by side in memory and are copied as one: s, or 1.
`segment` is the length of the pieces that begin with a chunk of their own: run * c, or where c is a
multiple of the vector (`whole`) any multiple of it. `flat` says that output pixel i sees input
pixel i alone.
"""


def emit_pack(e: Emitter, a: Args, x: Value, which: tuple[Value, Value], into: Value) -> None:
    """Pack what some pixels see as [segment][chunk][pixel][width]; `which`: first, and how many."""
    source = x + which[0] * a.x_pixel
    e.branch(
        a.flat != 0,
        lambda: copy_rows(e, (source, a.x_pixel), a.c, which[1], into),
        lambda: _windowed_rows(e, a, x, which, into),
    )


def copy_rows(
    e: Emitter, source: tuple[Value, Value], count: Value, rows: Value, into: Value
) -> None:
    """Copy `count` floats of each of some rows; `source`: the first, and how far apart they are."""
    start, row = source

    def copy(channel: Value, mask: Value | None) -> None:
        # All rows of a vector at a time: few channels make short rows.
        with e.range(0, rows) as i:
            value = e.load(start + i * row + channel, mask)
            e.store(value, into + channel * rows + i * e.width)

    each_vector(e, e.i64(0), count, copy)


def _windowed_rows(e: Emitter, a: Args, x: Value, which: tuple[Value, Value], into: Value) -> None:
    first, rows = which
    # One division per tile, not several per pixel: those would cost more than a small window.
    line = first // a.out_w
    image, row, column = e.variable(0), e.variable(0), e.variable(0)
    image.value, row.value, column.value = line // a.out_h, line % a.out_h, first % a.out_w
    with e.range(0, rows) as i:
        place = (image.value, row.value, column.value)
        _windows(e, a, x, (rows, place), into + i * e.width)
        following = place[2] + 1
        next_row = place[1] + e.select(following == a.out_w, e.i64(1), e.i64(0))
        next_image = place[0] + e.select(next_row == a.out_h, e.i64(1), e.i64(0))
        column.value = e.select(following == a.out_w, e.i64(0), following)
        row.value = e.select(next_row == a.out_h, e.i64(0), next_row)
        image.value = next_image


def emit_segment_floats(e: Emitter, a: Args) -> Value:
    """The room that a segment of one row takes."""
    return emit_whole(e, a.segment)


def _copy_row(e: Emitter, source: Value, to: Value, count: Value, rows: Value) -> None:
    """Copy `count` floats to chunks that begin at `to`; the last vector is filled with zeros."""
    whole = count // e.width * e.width
    with e.range(0, whole, e.width) as i:
        e.store(e.load(source + i), to + i * rows)
    with e.when(whole < count):
        e.store(e.load(source + whole, e.lanes(count - whole)), to + whole * rows)


def _clear(e: Emitter, to: Value, count: Value, rows: Value) -> None:
    with e.range(0, count, e.width) as i:
        e.store(e.vector(0.0), to + i * rows)


def _windows(
    e: Emitter,
    a: Args,
    x: Value,
    which: tuple[Value, tuple[Value, Value, Value]],
    here: Value,
) -> None:
    rows, (number, out_row, out_column) = which
    top = out_row * a.stride_h - a.pad_h
    left = out_column * a.stride_w - a.pad_w
    image = x + number * a.h * a.w * a.x_pixel
    source = image + (top * a.w + left) * a.x_pixel
    bottom, right = top + (a.r - 1) * a.dilation_h, left + (a.s - 1) * a.dilation_w
    inside = (top >= 0) & (left >= 0) & (bottom < a.h) & (right < a.w)
    e.branch(
        inside,
        lambda: _whole_window(e, a, source, rows, here),
        lambda: _edge_window(e, a, source, (rows, top, left), here),
    )


def _run_floats(e: Emitter, a: Args) -> Value:
    return emit_whole(e, a.run * a.c)


def _whole_window(e: Emitter, a: Args, source: Value, rows: Value, here: Value) -> None:
    """Copy a window that lies within the image: most do, and few channels make short runs."""
    count = a.run * a.c
    whole = count // e.width * e.width
    mask, step = e.lanes(count - whole), _run_floats(e, a) * rows
    place = e.variable(here)
    with e.range(0, a.r) as i, e.range(0, a.s, a.run) as j:
        run = source + (i * a.dilation_h * a.w + j * a.dilation_w) * a.x_pixel
        to = place.value
        with e.range(0, whole, e.width) as n:
            e.store(e.load(run + n), to + n * rows)
        with e.when(whole < count):
            e.store(e.load(run + whole, mask), to + whole * rows)
        place.value = to + step


def _edge_window(
    e: Emitter, a: Args, source: Value, which: tuple[Value, Value, Value], here: Value
) -> None:
    rows, top, left = which
    step = _run_floats(e, a) * rows
    place = e.variable(here)
    with e.range(0, a.r) as i, e.range(0, a.s, a.run) as j:
        row, column = top + i * a.dilation_h, left + j * a.dilation_w
        run = source + (i * a.dilation_h * a.w + j * a.dilation_w) * a.x_pixel
        to = place.value
        begin = e.min(a.run, e.max(-column, e.i64(0)))
        end = e.max(begin, e.min(a.run, a.w - column))
        _copy_part(e, a, (run, to, begin, e.select((row >= 0) & (row < a.h), end, begin)), rows)
        place.value = to + step


def _copy_part(e: Emitter, a: Args, part: tuple[Value, Value, Value, Value], rows: Value) -> None:
    """Copy the pixels of a run from `begin` up to `end`, and clear the others."""
    source, to, begin, end = part
    first, last = begin * a.c, end * a.c

    def by_vectors() -> None:
        _clear(e, to, first, rows)
        _copy_row(e, source + first, to + first * rows, last - first, rows)
        _clear(e, to + last * rows, a.run * a.c - last, rows)

    def by_floats() -> None:
        _clear(e, to, a.run * a.c, rows)
        with e.range(first, last) as i:
            chunk = i // e.width * e.width
            e.write(e.read(source + i), to + (chunk * rows + i % e.width))

    e.branch(a.whole != 0, by_vectors, by_floats)
