"""Packing: the input pixels under output pixels, laid out as the micro-kernel reads them.

An output pixel sums over its window: r rows of s taps of c channels, which lie in r places of the
image; in a volume as many in each of t frames. The product wants them as one row, in chunks as long
as a vector, the rows of a tile side by side within a chunk. Two output pixels whose window is a row
of three taps, six channels, vectors of four floats:

    image, NHWC      aaaaaa bbbbbb cccccc dddddd ...        output 0 sees abc, output 1 bcd

    packed           chunk 0      chunk 1      chunk 2      chunk 3      chunk 4
                     aaaa bbbb    aabb bbcc    bbbb cccc    cccc dddd    cc00 dd00
                     row0 row1    row0 row1    ...

Taps that lie side by side in memory are copied as one `run`, so that a window of many small pixels
is copied in whole vectors; only the last chunk of a run is masked, and filled with zeros. What a
window sees beside the image is zeros, too, so that the product need not know of padding.

A 1x1 convolution packs as well, though its rows are pixels as they lie: within a chunk all rows are
at constant distances, whatever lies between pixels in the image. Whoever copies pixels can change
them on the way, and an image that was normalized, or multiplied by a gate, need not exist:

    x  -->  (x - mean) * scale * gain + shift    -->  packed      layer norm, of each pixel
    x  -->  x * factor of its image              -->  packed      squeeze-and-excitation
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..language.compiler import Args
from ..language.loops import each_vector, emit_whole
from ..language.values import Value
from ..language.vectors import Emitter
from .moments import emit_moments

FIELDS = (
    *("x_pixel", "h", "w", "c", "out_h", "out_w", "r", "s", "stride_h", "stride_w"),
    *("pad_h", "pad_w", "dilation_h", "dilation_w", "run", "segment", "flat", "whole"),
    *("d", "out_d", "t", "stride_d", "pad_d", "dilation_d", "held"),
    *("gains", "shift", "eps", "centred", "factor", "factor_pixel", "shared_by"),
)
"""How output pixels map to input pixels.

`run` is how many taps of a row lie side by side in memory and are copied as one: s, or 1.
`segment` is the length of the pieces that begin with a chunk of their own: run * c, or if c is a
multiple of the vector (`whole`) any multiple of it. `flat` says that output pixel i reads only
input pixel i; such a pixel is normalized on the way where there are `gains`, and multiplied where
there is a `factor`, which `shared_by` pixels have in common. `held` says that the frames beside a
volume are those at its ends.
"""


class Pixels(NamedTuple):
    """Neighbouring output pixels: the number of the first, and how many."""

    first: Value
    rows: Value


class Lines(NamedTuple):
    """Several rows of floats: the address of the first, and the distance between them."""

    start: Value
    apart: Value


class TapRows(NamedTuple):
    """The rows of a filter from `first` up to `last`."""

    first: Value
    last: Value


def emit_pack(e: Emitter, a: Args, x: Value, pixels: Pixels, into: Value, rows: TapRows) -> None:
    """Pack what some pixels see as [segment][chunk][pixel][width].

    What lies under other rows of the filter is not touched; of volumes all rows must be packed.
    """
    source = x + pixels.first * a.x_pixel
    e.branch(
        a.flat != 0,
        lambda: _pack_pixels(e, a, source, pixels, into),
        lambda: _pack_windows(e, a, x, pixels, into, rows),
    )


def _pack_pixels(e: Emitter, a: Args, source: Value, pixels: Pixels, into: Value) -> None:
    lines = Lines(source, a.x_pixel)
    e.branch(
        (a.gains | a.factor) == 0,
        lambda: copy_rows(e, lines, a.c, pixels.rows, into),
        lambda: e.branch(
            a.gains != 0,
            lambda: _normalize_rows(e, a, lines, pixels.rows, into),
            lambda: _multiply_rows(e, a, lines, pixels, into),
        ),
    )


def _normalize_rows(e: Emitter, a: Args, source: Lines, rows: Value, into: Value) -> None:
    """Copy each row as (x - mean) * scale * gain + shift: all means and scales first."""
    moments = e.stack(2 * e.isa.rows * e.width)
    scales = moments + e.isa.rows * e.width
    eps = e.broadcast(e.float_of_bits(a.eps))
    with e.range(0, rows) as i:
        mean, scale = emit_moments(e, source.start + i * source.apart, a.c, eps, a.centred)
        e.store(mean, moments + i * e.width)
        e.store(scale, scales + i * e.width)

    def copy(channel: Value, mask: Value | None) -> None:
        gain, shift = (e.load(part.floats() + channel) for part in (a.gains, a.shift))
        with e.range(0, rows) as i:
            value = e.load(source.start + i * source.apart + channel, mask)
            mean, scale = e.load(moments + i * e.width), e.load(scales + i * e.width)
            value = e.fma((value - mean) * scale, gain, shift)
            e.store(value, into + channel * rows + i * e.width)

    each_vector(e, e.i64(0), a.c, copy)


def _multiply_rows(e: Emitter, a: Args, source: Lines, pixels: Pixels, into: Value) -> None:
    """Copy each row times the factors of its image."""
    with e.range(0, pixels.rows) as i:
        row = source.start + i * source.apart
        factors = a.factor.floats() + (pixels.first + i) // a.shared_by * a.factor_pixel

        def copy(
            channel: Value,
            mask: Value | None,
            row: Value = row,
            factors: Value = factors,
            i: Value = i,
        ) -> None:
            value = e.load(row + channel, mask) * e.load(factors + channel, mask)
            e.store(value, into + channel * pixels.rows + i * e.width)

        each_vector(e, e.i64(0), a.c, copy)


def emit_frame(e: Emitter, a: Args, number: Value) -> Value:
    """The frame that is read where a tap sees this one: beside a volume, maybe its last."""
    at_end = e.max(e.i64(0), e.min(number, a.d - 1))
    return e.select(a.held != 0, at_end, number)


def copy_rows(e: Emitter, source: Lines, count: Value, rows: Value, into: Value) -> None:
    """Copy `count` floats of each of some rows."""

    def copy(channel: Value, mask: Value | None) -> None:
        # All rows of a vector at a time: few channels make short rows.
        with e.range(0, rows) as i:
            value = e.load(source.start + i * source.apart + channel, mask)
            e.store(value, into + channel * rows + i * e.width)

    each_vector(e, e.i64(0), count, copy)


def emit_segment_floats(e: Emitter, a: Args) -> Value:
    """The room that a segment of one row takes."""
    return emit_whole(e, a.segment)


def _pack_windows(
    e: Emitter, a: Args, x: Value, pixels: Pixels, into: Value, rows: TapRows
) -> None:
    packer = _Packer(e, a, pixels.rows, rows)
    # One division per tile, not several per pixel: those would cost more than a small window.
    line = pixels.first // a.out_w
    frame = line // a.out_h
    start = _Pixel(frame // a.out_d, frame % a.out_d, line % a.out_h, pixels.first % a.out_w)
    window = packer.window(x, start)
    right = start.column + pixels.rows
    beyond = window.left + (pixels.rows - 1) * a.stride_w
    e.branch(
        (right <= a.out_w) & packer.is_inside(window) & packer.is_inside(window.at(beyond)),
        lambda: packer.inner_windows(window.source, into),
        lambda: _pack_each(e, a, packer, x, start, into),
    )


def _pack_each(e: Emitter, a: Args, packer: _Packer, x: Value, start: _Pixel, into: Value) -> None:
    place = [e.variable(0) for _ in start]
    for one, value in zip(place, start, strict=True):
        one.value = value
    with e.range(0, packer.rows) as i:
        here = _Pixel(*(one.value for one in place))
        packer.pack(packer.window(x, here), into + i * e.width)
        # Count on as an odometer does: column, then row, then frame, then image.
        carry = e.i64(1)
        sides = (e.i64(0), a.out_d, a.out_h, a.out_w)
        for one, value, side in reversed(list(zip(place, here, sides, strict=True))):
            following = value + carry
            carry = e.select(following == side, e.i64(1), e.i64(0))
            one.value = e.select(following == side, e.i64(0), following)


class _Pixel(NamedTuple):
    """The place of an output pixel."""

    image: Value
    frame: Value
    row: Value
    column: Value


class _Window(NamedTuple):
    """Where the first tap of a window would lie, which may be outside of the image."""

    source: Value
    front: Value
    top: Value
    left: Value

    def at(self, left: Value) -> _Window:
        return self._replace(left=left)


class _Part(NamedTuple):
    """The taps of a run from `begin` up to `end` lie inside the image; `source` is the first tap's
    place and `to` where the run is copied.
    """

    source: Value
    to: Value
    begin: Value
    end: Value


@dataclass(frozen=True)
class _Packer:
    """Copies windows of one tile; neighbouring chunks of a window lie `rows` vectors apart."""

    e: Emitter
    a: Args
    rows: Value
    taps: TapRows

    def window(self, x: Value, pixel: _Pixel) -> _Window:
        a = self.a
        front = pixel.frame * a.stride_d - a.pad_d
        top = pixel.row * a.stride_h - a.pad_h
        left = pixel.column * a.stride_w - a.pad_w
        frame = x + (pixel.image * a.d + front) * self._frame_floats()
        return _Window(frame + (top * a.w + left) * a.x_pixel, front, top, left)

    def is_inside(self, window: _Window) -> Value:
        a, (_, front, top, left) = self.a, window
        bottom, right = top + (a.r - 1) * a.dilation_h, left + (a.s - 1) * a.dilation_w
        inside: Value = (top >= 0) & (left >= 0) & (bottom < a.h) & (right < a.w)
        there: Value = inside & (front >= 0) & (front + (a.t - 1) * a.dilation_d < a.d)
        return there

    def pack(self, window: _Window, to: Value) -> None:
        self.e.branch(
            self.is_inside(window),
            lambda: self._inner_window(window.source, to),
            lambda: self._edge_window(window, to),
        )

    def inner_windows(self, source: Value, here: Value) -> None:
        """Copy all windows of a tile that lie within the image, side by side, a vector of each."""
        e, a = self.e, self.a
        lines = Lines(source, a.stride_w * a.x_pixel)
        step = self._run_floats() * self.rows
        place = e.variable(self._first_place(here, step))
        with e.range(0, a.t) as m, e.range(*self.taps) as i, e.range(0, a.s, a.run) as j:
            frame = m * a.dilation_d * self._frame_floats()
            run = frame + (i * a.dilation_h * a.w + j * a.dilation_w) * a.x_pixel
            copy_rows(e, Lines(lines.start + run, lines.apart), a.run * a.c, self.rows, place.value)
            place.value = place.value + step

    def _inner_window(self, source: Value, here: Value) -> None:
        """Copy a window that lies within the image: most do, and few channels make short runs."""
        e, a = self.e, self.a
        count = a.run * a.c
        whole = count // e.width * e.width
        # All runs are equally long: what masks the last vector is computed once for all.
        mask, step = e.lanes(count - whole), self._run_floats() * self.rows
        place = e.variable(self._first_place(here, step))
        with e.range(0, a.t) as m, e.range(*self.taps) as i, e.range(0, a.s, a.run) as j:
            frame = source + m * a.dilation_d * self._frame_floats()
            run = frame + (i * a.dilation_h * a.w + j * a.dilation_w) * a.x_pixel
            to = place.value
            with e.range(0, whole, e.width) as n:
                e.store(e.load(run + n), to + n * self.rows)
            with e.when(whole < count):
                e.store(e.load(run + whole, mask), to + whole * self.rows)
            place.value = to + step

    def _edge_window(self, window: _Window, here: Value) -> None:
        """Copy of each run the taps that lie within the image, and zeros for the others."""
        e, a = self.e, self.a
        step = self._run_floats() * self.rows
        place = e.variable(self._first_place(here, step))
        with e.range(0, a.t) as m, e.range(*self.taps) as i, e.range(0, a.s, a.run) as j:
            frame = emit_frame(e, a, window.front + m * a.dilation_d)
            row, column = window.top + i * a.dilation_h, window.left + j * a.dilation_w
            run = window.source + (frame - window.front) * self._frame_floats()
            run = run + (i * a.dilation_h * a.w + j * a.dilation_w) * a.x_pixel
            to = place.value
            begin = e.min(a.run, e.max(-column, e.i64(0)))
            end = e.max(begin, e.min(a.run, a.w - column))
            # Above or below the image, or in a frame beside it, a run has no taps at all.
            there = (row >= 0) & (row < a.h) & (frame >= 0) & (frame < a.d)
            end = e.select(there, end, begin)
            self._run(_Part(run, to, begin, end))
            place.value = to + step

    def _first_place(self, here: Value, step: Value) -> Value:
        """Where the first of the runs goes that are packed."""
        past: Value = self.taps.first * (self.a.s // self.a.run) * step
        return here + past

    def _run(self, part: _Part) -> None:
        e, a = self.e, self.a
        first, last = part.begin * a.c, part.end * a.c

        def by_vectors() -> None:
            self._clear(part.to, first)
            self._copy(part.source + first, part.to + first * self.rows, last - first)
            self._clear(part.to + last * self.rows, a.run * a.c - last)

        def by_lanes() -> None:
            # The padding ends in the middle of a vector.
            with e.range(0, a.run * a.c, e.width) as i:
                inside = e.lanes(last - i) & ~e.lanes(first - i)
                e.store(e.load(part.source + i, inside), part.to + i * self.rows)

        e.branch(a.whole != 0, by_vectors, by_lanes)

    def _copy(self, source: Value, to: Value, count: Value) -> None:
        """Copy `count` floats to chunks from `to` on; the last vector is filled with zeros."""
        e = self.e
        whole = count // e.width * e.width
        with e.range(0, whole, e.width) as i:
            e.store(e.load(source + i), to + i * self.rows)
        with e.when(whole < count):
            e.store(e.load(source + whole, e.lanes(count - whole)), to + whole * self.rows)

    def _clear(self, to: Value, count: Value) -> None:
        e = self.e
        with e.range(0, count, e.width) as i:
            e.store(e.vector(0.0), to + i * self.rows)

    def _frame_floats(self) -> Value:
        floats: Value = self.a.h * self.a.w * self.a.x_pixel
        return floats

    def _run_floats(self) -> Value:
        """The room that a run of one row takes."""
        return emit_whole(self.e, self.a.run * self.a.c)
