"""Convolution as one matrix product: rows of packed pixels by panels of weights.

One kernel serves 1x1, any other size, stride, dilation and groups; only the packing of rows
differs (see rows.py). Each thread takes blocks of output pixels, or of output channels where pixels
are few, packs what the pixels see, and multiplies it panel by panel, with the inner dimension cut
so that a panel stays in the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..language import isa as isas
from ..language.compiler import Args, Kernel
from ..language.isa import Isa
from ..language.loops import emit_moved, emit_whole
from ..language.values import Value
from ..language.vectors import Emitter
from ..layers.activations import Activation, clamp
from ..layers.ending import activate_tile
from ..product import rows
from ..product.microkernel import ADD, FINAL, TILE, TileCall, even, panel_columns, tiles_of
from ..product.weights import after, pack_convolution
from ..tape.steps import Scratch, Step, View, step
from .spec import ConvSpec

LATER = ("later", "later_floats")
"""The fields of a kernel that asks for what a later step reads: the address, and how much."""

_FIELDS = (
    *("x", "y", "weights", "bias", "residual", "scratch", "tile"),
    *(
        "pixels",
        "k",
        "groups",
        "row_parts",
        "column_parts",
        "segments",
        "segments_at_once",
        "panels",
    ),
    *("y_pixel", "residual_pixel", "scratch_floats"),
    *("low", "high", "code", "slope"),
    *rows.FIELDS,
    *LATER,
)

_MOST_ROWS = 56
"""How many rows a block may have: for so many, reading a panel of weights costs little."""
_ROWS_BYTES = 256 << 10
"""How much of the second-level cache the packed rows of one block may take."""
_DEEPEST = 2048
"""How deep a product may be in one go: so much of a panel stays there as well while it is used."""


def _emit(e: Emitter, a: Args, thread: Value, threads: Value) -> None:
    packed = a.scratch.floats() + thread * a.scratch_floats
    row_floats = a.segments * rows.emit_segment_floats(e, a)
    begin, end = e.share(a.groups * a.row_parts * a.column_parts, thread, threads)
    with e.range(begin, end) as unit:
        # Pixels are cut first, as in the layers before and after: what a thread reads it wrote.
        group = unit // a.column_parts % a.groups
        first, last = _part(e, unit // (a.column_parts * a.groups), a.row_parts, a.pixels)
        panels = _part(e, unit % a.column_parts, a.column_parts, a.panels)
        each = even(e, last - first)
        with e.range(first, last, each) as at:
            into = packed + (at - first) * row_floats
            which = (at, e.min(last - at, each))
            rows.emit_pack(e, a, a.x.floats() + group * a.c, which, into)
        following = e.select((a.flat != 0) & (unit + 1 < end), last - first, e.i64(0))
        part = (group, (first, last, following), panels, packed)
        asked, asked_to = e.share(a.later_floats, thread, threads)
        floats = e.select(unit + 1 < end, e.i64(0), asked_to - asked)
        later = (a.later.floats() + asked, floats)
        _emit_products(e, a, TileCall(e, a.tile), part, later)


def _part(e: Emitter, index: Value, parts: Value, count: Value) -> tuple[Value, Value]:
    return index * count // parts, (index + 1) * count // parts


def _emit_products(
    e: Emitter,
    a: Args,
    tile: TileCall,
    unit: tuple[Value, tuple[Value, Value, Value], tuple[Value, Value], Value],
    later: tuple[Value, Value],
) -> None:
    """Multiply the packed rows by their panels; `following` rows on is what is packed next, or 0.

    Of those, each panel asks for a part; where there are none, each tile for a part of `later`, or
    of the next panel, if no other thread reads it.
    """
    group, (first, last, following), (first_panel, last_panel), packed = unit
    count, tiles = last - first, tiles_of(e, last - first)
    width, depth = panel_columns(e.isa), a.segments * a.segment
    segment_floats = rows.emit_segment_floats(e, a)
    weights = a.weights.floats() + group * depth * emit_whole(e, a.k)
    bias = a.bias.floats() + group * emit_whole(e, a.k)
    x, panels = a.x.floats() + group * a.c, last_panel - first_panel
    of_tile = even(e, count)
    each = (of_tile + (panels - 1)) // panels
    asked = tile.ask(later[1], a.segment, panels * tiles)
    with e.when((later[1] == 0) & (a.row_parts == 1)):
        tile.ask(a.segments_at_once * a.segment * width, a.segment, tiles)
    with e.when(following != 0):
        tile.set(ahead_row=a.x_pixel, ahead_rows=each, ahead_tile=a.x_pixel * of_tile)
    tile.set(
        rows=count, each=of_tile, a=packed, a_row=a.segments * segment_floats, segment=a.segment
    )
    tile.set(y_row=a.y_pixel, residual_row=a.residual_pixel, low=a.low, high=a.high)
    with e.range(0, a.segments, a.segments_at_once) as inner:
        count_segments = e.min(a.segments_at_once, a.segments - inner)
        final = inner + count_segments >= a.segments
        mode = e.select(inner > 0, e.i64(ADD), e.i64(0)) + e.select(final, e.i64(FINAL), e.i64(0))
        tile.set(a_skip=inner * segment_floats, segments=count_segments, mode=mode)
        with e.range(first_panel, last_panel) as panel:
            column = panel * width
            columns = e.min(a.k - column, e.i64(width))
            b = weights + panel * width * depth + inner * a.segment * emit_whole(e, columns)
            here = group * a.k + column
            y = a.y.floats() + (first * a.y_pixel + here)
            ahead = first + following + (panel - first_panel) * each
            pixels = x + (ahead * a.x_pixel + inner * a.segment)
            weights_later = later[0] + (panel - first_panel) * tiles * asked
            weights_ahead = e.select(later[1] != 0, weights_later, b + width * depth)
            tile(
                b=b,
                bias=bias + column,
                columns=columns,
                y=y,
                residual=emit_moved(e, a.residual, first * a.residual_pixel + here),
                ahead=e.select(following != 0, pixels, weights_ahead),
            )
            with e.when(final & (a.code > int(Activation.RELU6))):
                activate_tile(e, y, a.y_pixel, (count, columns), (a.code, a.slope))


DIRECT = Kernel("direct", _FIELDS, _emit)


def pack_direct(spec: ConvSpec, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The weights of `spec` as `direct_steps` takes them."""
    return pack_convolution(weight, bias, spec.groups, isas.host())


def packed_floats(spec: ConvSpec) -> int:
    """How many numbers `pack_direct` returns."""
    columns = -(-spec.k // spec.groups // isas.host().width) * isas.host().width
    return spec.groups * (spec.depth + 1) * columns


def direct_steps(
    spec: ConvSpec, x: View, y: View, packed: Tensor | View, residual: View | None = None
) -> tuple[Step, ...]:
    """The convolution as one step."""
    isa = isas.host()
    k = spec.k // spec.groups
    padded_k = -(-k // isa.width) * isa.width
    panels = -(-k // panel_columns(isa))
    row_parts, column_parts = split(spec, panels, isa, torch.get_num_threads())
    segment, segments, at_once = _segments(spec, x, isa)
    block_rows = -(-spec.pixels // row_parts)
    scratch_floats = block_rows * segments * (-(-segment // isa.width) * isa.width)
    low, high = clamp(spec.activation)
    return (
        step(
            DIRECT,
            x=x,
            y=y,
            weights=packed,
            bias=after(packed, spec.groups * spec.depth * padded_k),
            residual=residual,
            scratch=Scratch(4 * scratch_floats, per_thread=True),
            tile=TILE.address,
            pixels=spec.pixels,
            k=k,
            groups=spec.groups,
            panels=panels,
            row_parts=row_parts,
            column_parts=column_parts,
            segments=segments,
            segments_at_once=at_once,
            y_pixel=y.pixel,
            residual_pixel=residual.pixel if residual else 0,
            scratch_floats=scratch_floats,
            low=low,
            high=high,
            code=int(spec.activation),
            slope=float(spec.slope),
            later=None,
            later_floats=0,
            **_row_fields(spec, x, segment, isa),
        ),
    )


def _row_fields(spec: ConvSpec, x: View, segment: int, isa: Isa) -> dict[str, int]:
    """The values of `rows.FIELDS`."""
    c = spec.c // spec.groups
    return {
        "x_pixel": x.pixel,
        "h": spec.h,
        "w": spec.w,
        "c": c,
        "out_h": spec.out_h,
        "out_w": spec.out_w,
        "r": spec.r,
        "s": spec.s,
        "stride_h": spec.stride[0],
        "stride_w": spec.stride[1],
        "pad_h": spec.padding[0],
        "pad_w": spec.padding[1],
        "dilation_h": spec.dilation[0],
        "dilation_w": spec.dilation[1],
        "run": _run(spec, x),
        "segment": segment,
        "flat": int(spec.is_flat),
        "whole": int(c % isa.width == 0),
    }


def split(spec: ConvSpec, panels: int, isa: Isa, threads: int) -> tuple[int, int]:
    """Into how many parts to cut the output pixels and the panels of each group.

    A part of pixels is small enough to stay in the cache when packed. Pixels so few that the
    weights outweigh them are not cut: each thread takes panels of its own, and no two fetch the
    same weights from memory.
    """
    depth = -(-spec.depth // isa.width) * isa.width
    fitting = max(isa.rows, min(_MOST_ROWS // isa.rows * isa.rows, _ROWS_BYTES // (4 * depth)))
    parts = -(-spec.pixels // fitting)
    if spec.groups >= threads:
        return parts, 1
    if outweighs(spec.k, spec.pixels):
        return 1, min(panels, threads)
    if spec.pixels < isa.rows * threads:
        return parts, min(panels, threads)
    return -(-parts // threads) * threads, 1


def outweighs(columns: int, rows: int) -> bool:
    """Whether weights of so many columns are so much more than the rows they multiply that threads
    should rather share those: then the rows, which each thread reads, cost little.
    """
    return columns >= 16 * rows


def _segments(spec: ConvSpec, x: View, isa: Isa) -> tuple[int, int, int]:
    """The length of a segment, how many there are, and how many to multiply in one go.

    What is multiplied in one go is short enough that a panel of weights stays in the cache.
    """
    c = spec.c // spec.groups
    if c % isa.width:
        segment = _run(spec, x) * c
        return segment, spec.depth // segment, max(1, _DEEPEST // segment)
    vectors = spec.depth // isa.width
    cuts = next(n for n in range(-(-spec.depth // _DEEPEST), vectors + 1) if vectors % n == 0)
    # A prime number of vectors can be cut only into single ones: then rather not at all.
    cuts = cuts if spec.depth // cuts > _DEEPEST // 4 else 1
    return spec.depth // cuts, cuts, 1


def _run(spec: ConvSpec, x: View) -> int:
    """How many taps of a row of the filter lie side by side in memory."""
    c = spec.c // spec.groups
    return spec.s if x.pixel == c and spec.dilation[1] == 1 else 1
