"""Convolution as one matrix product: rows of packed pixels by panels of weights.

    image                     packed rows              weights, in panels of filters
    +-----------------+       +-------------+          +-----+-----+-----+
    | window of pixel | ----> | r * s * c   |     x    |     |     |     |  r * s * c deep
    +-----------------+       | r * s * c   |          |     |     |     |
      `block of rows`         | ...         |          +-----+-----+-----+
                              +-------------+             k, the filters

One kernel serves 1x1, any other size, stride, dilation and groups; only the packing of rows
differs (see rows.py). A unit of work is a block of output pixels and some panels of a group. A
thread packs what the pixels of its unit see, once, and multiplies it panel by panel.

Rows of a filter that see nothing but padding from any pixel of a block are left out for it: with
taps far apart (dilation) those are many.

How the work is cut is told in parts.py. Of few pixels there are few blocks, and a thread that is
done first finds none to take from another: then all blocks are packed into shared memory (`INPUT`),
and what is shared out behind a barrier is panels of them (`PRODUCTS`, see `packed_apart`).

While a block is multiplied, its tiles ask for what comes next (`_emit_products`):

- the pixels of the next unit, if they are read as they lie (1x1);
- behind the last unit, what a later linear layer reads (`LATER`, see programs/later.py);
- else the next panel, where pixels are one part: then it is read by this unit alone, from memory.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...machine.environment import second_level_bytes
from ..language import isa as isas
from ..language.compiler import Args, Kernel
from ..language.isa import Isa
from ..language.loops import emit_moved, emit_whole
from ..language.values import Value
from ..language.vectors import Emitter
from ..layers.activations import LAST_CLAMP, Stored, clamp
from ..layers.ending import ENDING, activate_tile, ending
from ..product import rows
from ..product.microkernel import ADD, FINAL, TileCall, even, tiles_for, tiles_of
from ..product.weights import after, pack_convolution
from ..tape.steps import Scratch, Step, View, pieces_of, step
from .parts import ALL, INPUT, PIECES, PRODUCTS, run_of, segments_of, split
from .spec import ConvSpec

_SIZES = ("pixels", "k", "groups", "segments", "segment")
"""The fields that make the number of multiply-adds."""
_WORTH = 1 << 23
"""The multiply-adds of a thread from which on a barrier more is little: some fifty microseconds."""

LATER = ("later", "later_floats")
"""The fields of a kernel that asks for what a later step reads: the address, and how much."""

_FIELDS = (
    *("x", "weights", "bias", "scratch", "tile", "phase"),
    *("pixels", "k", "groups", "row_parts", "column_parts", "units_each"),
    *("segments", "segments_at_once", "row_segments", "panels"),
    *("scratch_floats", "low", "high"),
    *ENDING,
    *rows.FIELDS,
    *LATER,
)
"""`c` and `k` are the channels of one group."""


class _Span(NamedTuple):
    """Pixels or panels from `first` up to `last`."""

    first: Value
    last: Value


class _Unit(NamedTuple):
    """A piece of work: some pixels by some panels of one group, packed at `packed`.

    `following` is how many pixels further the next unit packs as they lie; 0 if it does not. Of the
    segments of the inner dimension those in `segments` are not all zeros.
    """

    group: Value
    pixels: _Span
    following: Value
    panels: _Span
    packed: Value
    segments: _Span


class _Later(NamedTuple):
    """This thread's part of what a later step reads: where it begins, and how many floats."""

    start: Value
    floats: Value


def _emit(e: Emitter, a: Args, thread: Value, threads: Value) -> None:
    row_floats = a.segments * rows.emit_segment_floats(e, a)
    begin, end = e.share(a.groups * a.row_parts * a.column_parts, thread, threads)
    with e.range(begin, end) as unit:
        # Pixels are cut first, as in the layers before and after: what a thread reads it wrote.
        group = unit // a.column_parts % a.groups
        first, last = _part(unit // (a.column_parts * a.groups), a.row_parts, a.pixels)
        panels = _part(unit % a.column_parts, a.column_parts, a.panels)
        place = e.select(a.phase == ALL, a.worker * a.scratch_floats, first * row_floats)
        packed = a.scratch.floats() + place
        cut = even(e, last - first)
        taps = _rows_seen(e, a, _Span(first, last))
        with e.when(a.phase != PRODUCTS), e.range(0, tiles_of(e, last - first)) as tile:
            at = cut.first(e, tile)
            into = packed + at * row_floats
            pixels = rows.Pixels(first + at, cut.first(e, tile + 1) - at)
            rows.emit_pack(e, a, a.x.floats() + group * a.c, pixels, into, taps)
        # Behind the share of a thread, the next unit is most likely that of another.
        more = (last < a.pixels) & ((unit + 1) % a.units_each != 0)
        more = more & (a.flat != 0) & (a.phase == ALL)
        following = e.select(more, last - first, e.i64(0))
        inner = _Span(
            taps.first * a.row_segments,
            e.select(a.row_segments != 0, taps.last * a.row_segments, a.segments),
        )
        work = _Unit(group, _Span(first, last), following, panels, packed, inner)
        asked, asked_to = e.share(a.later_floats, thread, threads)
        floats = e.select(unit + 1 < end, e.i64(0), asked_to - asked)
        later = _Later(a.later.floats() + asked, floats)
        with e.when(a.phase != INPUT):
            _emit_products(e, a, TileCall(e, a.tile), work, later)


def _part(index: Value, parts: Value, count: Value) -> _Span:
    return _Span(index * count // parts, (index + 1) * count // parts)


def _rows_seen(e: Emitter, a: Args, pixels: _Span) -> rows.TapRows:
    """The rows of the filter that see the image from some of the output pixels; all if none do."""
    first, last = pixels.first // a.out_w, (pixels.last - 1) // a.out_w
    top, bottom = (line % a.out_h * a.stride_h - a.pad_h for line in (first, last))
    more = a.dilation_h - 1
    begin = (e.max(0 - bottom, 0) + more) // a.dilation_h
    end = e.min((e.max(a.h - top, 0) + more) // a.dilation_h, a.r)
    cut = (a.row_segments != 0) & (first // a.out_h == last // a.out_h) & (begin < end)
    return rows.TapRows(e.select(cut, begin, e.i64(0)), e.select(cut, end, a.r))


def _emit_products(e: Emitter, a: Args, tile: TileCall, unit: _Unit, later: _Later) -> None:
    """Multiply the packed rows by their panels, which meanwhile ask for what is read next."""
    group, (first, last), following, (first_panel, last_panel), packed, segments = unit
    count, tiles = last - first, tiles_of(e, last - first)
    width, depth = e.isa.panel_columns, a.segments * a.segment
    segment_floats = rows.emit_segment_floats(e, a)
    weights = a.weights.floats() + group * depth * emit_whole(e, a.k)
    bias = a.bias.floats() + group * emit_whole(e, a.k)
    x, panels = a.x.floats() + group * a.c, last_panel - first_panel
    cut = even(e, count)
    # Prefetch later weights, or weights of the next panel, or pixels of the next unit, of which
    # each panel prefetches a part. The last that applies wins.
    each = (cut.each + (panels - 1)) // panels
    asked = tile.ask(later.floats, a.segment, panels * tiles)
    with e.when((later.floats == 0) & (a.row_parts == 1)):
        tile.ask(a.segments_at_once * a.segment * width, a.segment, tiles)
    with e.when(following != 0):
        tile.set(ahead_row=a.x_pixel, ahead_rows=each, ahead_tile=a.x_pixel * cut.each)
    row_floats = a.segments * segment_floats
    tile.set(**cut._asdict(), a=packed, a_row=row_floats, segment=a.segment)
    tile.set(y_row=a.y_pixel, residual_row=a.residual_pixel, low=a.low, high=a.high)
    with e.range(segments.first, segments.last, a.segments_at_once) as inner:
        count_segments = e.min(a.segments_at_once, segments.last - inner)
        final = inner + count_segments >= segments.last
        later_on = e.select(inner > segments.first, e.i64(ADD), e.i64(0))
        mode = later_on + e.select(final, e.i64(FINAL), e.i64(0))
        tile.set(a_skip=inner * segment_floats, segments=count_segments, mode=mode)
        with e.range(first_panel, last_panel) as panel:
            column = panel * width
            columns = e.min(a.k - column, e.i64(width))
            b = weights + panel * width * depth + inner * a.segment * emit_whole(e, columns)
            here = group * a.k + column
            y = a.y.floats() + (first * a.y_pixel + here)
            ahead = first + following + (panel - first_panel) * each
            pixels = x + (ahead * a.x_pixel + inner * a.segment)
            weights_later = later.start + (panel - first_panel) * tiles * asked
            weights_ahead = e.select(later.floats != 0, weights_later, b + width * depth)
            tile(
                b=b,
                bias=bias + column,
                columns=columns,
                y=y,
                residual=emit_moved(e, a.residual, first * a.residual_pixel + here),
                ahead=e.select(following != 0, pixels, weights_ahead),
            )
            # A clamp was applied in registers; what is more than that has a function to call.
            with e.when(final & (a.code > int(LAST_CLAMP))):
                activate_tile(e, Stored(y, a.y_pixel, count, columns), a.code, a.slope)


DIRECT = Kernel("direct", _FIELDS, _emit)


def pack_direct(spec: ConvSpec, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The weights of `spec` as `direct_steps` takes them."""
    return pack_convolution(weight, bias, spec.groups, isas.host())


def packed_floats(spec: ConvSpec) -> int:
    """How many numbers `pack_direct` returns."""
    return spec.groups * (spec.depth + 1) * isas.host().padded(spec.k // spec.groups)


def direct_steps(
    spec: ConvSpec, x: View, y: View, packed: Tensor | View, residual: View | None = None
) -> tuple[Step, ...]:
    """The convolution as one step."""
    isa = isas.host()
    k = spec.k // spec.groups
    padded_k = isa.padded(k)
    panels = isa.panels(k)
    cut = segments_of(spec, x, isa)
    parts = split(spec, panels, isa, torch.get_num_threads(), cut.at_once * cut.segment)
    block_rows = -(-spec.pixels // parts.rows)
    scratch_floats = block_rows * cut.segments * isa.padded(cut.segment)
    low, high = clamp(spec.activation, spec.slope)
    units = spec.groups * parts.rows * parts.columns
    return (
        step(
            DIRECT,
            pieces_of(units, spec.products),
            x=x,
            weights=packed,
            bias=after(packed, spec.groups * spec.depth * padded_k),
            scratch=Scratch(4 * scratch_floats, per_thread=True),
            tile=tiles_for(k),
            phase=ALL,
            pixels=spec.pixels,
            k=k,
            groups=spec.groups,
            panels=panels,
            row_parts=parts.rows,
            column_parts=parts.columns,
            units_each=-(-units // torch.get_num_threads()),
            segments=cut.segments,
            segments_at_once=cut.at_once,
            row_segments=cut.of_row,
            scratch_floats=scratch_floats,
            low=low,
            high=high,
            later=None,
            later_floats=0,
            **ending(y, spec.activation, spec.slope, residual),
            **_row_fields(spec, x, cut.segment, isa),
        ),
    )


def products_of(step: Step) -> int:
    """The multiply-adds of one of these steps."""
    return math.prod(step.given[name] for name in _SIZES)


def packed_apart(step: Step, threads: int) -> tuple[Step, ...]:
    """The step, or two for it: one packs all blocks of pixels, the other multiplies them by panels.

    Two where blocks are few, and stay in the caches of the threads when all are packed.
    """
    given, products = step.given, products_of(step)
    blocks, pixels = given["row_parts"], given["pixels"]
    few = 2 <= threads <= blocks < PIECES * threads
    if not few or max(given["groups"], given["column_parts"]) > 1 or products < threads * _WORTH:
        return (step,)
    packed_bytes = 4 * pixels * (given["scratch_floats"] // -(-pixels // blocks))
    if packed_bytes > threads * second_level_bytes() // 2:
        return (step,)
    columns = min(given["panels"], -(-PIECES * threads // blocks))
    packed = Scratch(packed_bytes)
    before = replace(step.but(scratch=packed, phase=INPUT), pieces=1)
    behind = step.but(scratch=packed, phase=PRODUCTS, column_parts=columns)
    return before, replace(behind, pieces=pieces_of(blocks * columns, products))


def _row_fields(spec: ConvSpec, x: View, segment: int, isa: Isa) -> dict[str, int]:
    """The values of `rows.FIELDS`."""
    c = spec.c // spec.groups
    return {
        **spec.sides(),
        "x_pixel": x.pixel,
        "c": c,
        "s": spec.s,
        "run": run_of(spec, x),
        "segment": segment,
        "flat": int(spec.is_flat),
        "whole": int(c % isa.width == 0),
        # A norm or a gate in front of the product is joined later, see programs/prologues.py.
        **dict.fromkeys(("gains", "shift", "eps", "centred", "factor", "factor_pixel"), 0),
        "shared_by": 1,
    }
