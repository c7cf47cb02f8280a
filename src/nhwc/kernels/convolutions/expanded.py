"""A 1x1 convolution and the depthwise one that alone reads it, as one step.

Networks for phones widen the image sixfold for the depthwise convolution and narrow it again. The
wide image outgrows the near caches; here it never exists. A thread takes a band of rows, widens it
by one panel of channels at a time into scratch memory, and convolves that while it is at hand:

    image x          band, packed           widened by a panel        result y
    depth channels   once for all panels    panel_columns channels    c channels
    +-----------+    +-----------+  x panel +--+                      +--------------+
    |           |    |           |  ------> |  |  depthwise, its own  |   ##         |
    |===========| -> |===========|          |  |  filters of these    |   ##         |  band
    |===========|    |===========|          |  |  channels  ------->  |   ##         |
    |           |    |           |          +--+                      |              |
    +-----------+    +-----------+       overwritten by               +--------------+
                                         the next panel

The order is: pack the band once; then for each panel multiply, apply the inner activation, and
convolve. The activation must come before the convolution sees a pixel, and pixels beside the image
are zero after it, not before: so the depthwise kernel treats the borders of the image itself, and
the band holds only rows that exist (`seen` up to `last_seen`).

The rows where two bands meet are widened twice, once for either. `_cut` weighs this against the
cache, which a band should fit into, packed and widened. Small images are not cut into bands: there
each thread takes panels of its own and packs the whole image.

While a panel is widened its tiles ask for what is needed next, the filters of its channels; it
does not ask for the next panel, which is small (`_MOST_DEPTH`) and lies side by side with this one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import InputError
from ..language import isa as isas
from ..language.compiler import Args, Kernel
from ..language.isa import Isa
from ..language.loops import emit_moved, emit_whole
from ..language.values import Value
from ..language.vectors import Emitter
from ..layers.activations import LAST_CLAMP, Activation, Stored, clamp
from ..layers.ending import ENDING, activate_tile, ending
from ..product.microkernel import FINAL, TileCall, largest, tiles_for, tiles_of
from ..product.rows import Lines, copy_rows
from ..product.weights import depthwise_floats, pack_convolution, pack_depthwise, pad_channels
from ..tape.steps import Scratch, Step, View, pieces_of, step
from .depthwise import OutputRow, TiledRow, Window, emit_row

_FIELDS = (
    *("x", "x_pixel", "expand_weights", "expand_bias", "weights", "bias", "scratch", "tile"),
    *("n", "h", "w", "depth", "c", "out_h", "out_w", "pad_h", "pad_w"),
    *("bands", "panel_parts", "panels", "packed_floats", "scratch_floats"),
    *("inner_low", "inner_high", "inner_code", "inner_slope"),
    *ENDING,
)
"""`depth` channels are widened to `c`; the `inner` fields are of the 1x1 convolution."""

_SCRATCH_BYTES = 512 << 10
"""How much of the second-level cache a band may take, packed and widened by one panel."""
_PACKING = 2
"""To read and pack a row takes about as long as to widen it by two panels."""
_MOST_DEPTH = 512
"""From more input channels than this on, a panel of weights does not stay in the nearest cache."""


@dataclass(frozen=True)
class Expansion:
    """The 1x1 convolution before: its weight (C, depth, 1, 1), bias and activation."""

    weight: Tensor
    bias: Tensor | None
    activation: Activation = Activation.NONE
    slope: float = 0.01


def serves(depth: int, window: Window, out_w: int) -> bool:
    """Whether this step can take the place of the two."""
    return (
        window.tile(out_w) > 0 and window.padding[0] <= window.size[0] // 2 and depth <= _MOST_DEPTH
    )


def expanded_depthwise_step(
    x: View,
    y: View,
    expansion: Expansion,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    window: Window,
    activation: Activation = Activation.NONE,
    slope: float = 0.01,
    residual: View | None = None,
) -> Step:
    """activation(depthwise(expansion(x), weight) + bias + residual), where `serves` says so."""
    isa = isas.host()
    n, depth, h, w = x.shape
    c, out_h, out_w = y.shape[1:]
    if not serves(depth, window, out_w):
        raise InputError(f"no step expands {depth} channels into {window}, {out_w} outputs wide.")
    size, stride = window.size[0], window.stride[0]
    tile = window.tile(out_w)
    cut = _cut(x, y, window, isa, torch.get_num_threads())
    packed_floats = cut.rows * w * isa.padded(depth)
    scratch_floats = packed_floats + cut.rows * w * isa.panel_columns
    packed = pack_convolution(expansion.weight, expansion.bias, 1, isa)
    low, high = clamp(expansion.activation, expansion.slope)
    return step(
        expanded_depthwise(size, stride, tile),
        pieces_of(n * cut.bands * cut.panel_parts, x.pixels * depth * c),
        x=x,
        x_pixel=x.pixel,
        expand_weights=packed,
        expand_bias=packed[depth * isa.padded(c) :],
        weights=pack_depthwise(weight, isa),
        bias=pad_channels(bias, c),
        scratch=Scratch(4 * scratch_floats, per_thread=True),
        tile=tiles_for(c),
        n=n,
        h=h,
        w=w,
        depth=depth,
        c=c,
        out_h=out_h,
        out_w=out_w,
        pad_h=window.padding[0],
        pad_w=window.padding[1],
        bands=cut.bands,
        panel_parts=cut.panel_parts,
        panels=isa.panels(c),
        packed_floats=packed_floats,
        scratch_floats=scratch_floats,
        inner_low=low,
        inner_high=high,
        inner_code=int(expansion.activation),
        inner_slope=float(expansion.slope),
        **ending(y, activation, slope, residual),
    )


class _Cut(NamedTuple):
    """How many bands an image is cut into, and how many parts the panels are.

    `rows` is how many rows of the input the largest band sees.
    """

    bands: int
    panel_parts: int
    rows: int


def _cut(x: View, y: View, window: Window, isa: Isa, threads: int) -> _Cut:
    """The cut that leaves the busiest thread the least to do, among those that fit the cache."""
    n, depth, h, w = x.shape
    c, out_h, _ = y.shape[1:]
    panels = isa.panels(c)
    pixel_bytes = 4 * (isa.padded(depth) + isa.panel_columns)

    def cut(bands: int, panel_parts: int) -> _Cut:
        # A band sees the input rows from those under its first output row to those under its last.
        rows = (-(-out_h // bands) - 1) * window.stride[0] + window.size[0]
        return _Cut(bands, panel_parts, min(rows, h))

    def cost(one: _Cut) -> tuple[bool, int, int]:
        turns = -(-n * one.bands * one.panel_parts // threads)
        # A band of a single output row cannot be cut further, and is taken as large as it is.
        large = one.rows > window.size[0] and one.rows * w * pixel_bytes > _SCRATCH_BYTES
        work = one.rows * (-(-panels // one.panel_parts) + _PACKING)
        return large, turns * work, one.bands

    possible = [cut(b, p) for b in range(1, out_h + 1) for p in range(1, min(panels, threads) + 1)]
    return min(possible, key=cost)


@cache
def expanded_depthwise(size: int, stride: int, tile: int) -> Kernel:
    """The kernel for a square filter that computes `tile` neighbouring outputs at once."""
    emit = partial(_emit, size=size, stride=stride, tile=tile)
    return Kernel(f"expanded{size}x{size}s{stride}t{tile}", _FIELDS, emit)


class _Band(NamedTuple):
    """Rows of one image: output rows from `first` up to `last`, which see input rows from `seen` up
    to `last_seen`; these lie in scratch memory at `packed`, and widened at `wide`.
    """

    image: Value
    first: Value
    seen: Value
    last_seen: Value
    last: Value
    packed: Value
    wide: Value


class _Panel(NamedTuple):
    """Channels of the wide image: the number of the first, and how many."""

    channel: Value
    columns: Value


class _Ahead(NamedTuple):
    """Floats that are needed next: where they begin, and how many."""

    start: Value
    floats: int


def _emit(
    e: Emitter, a: Args, thread: Value, threads: Value, *, size: int, stride: int, tile: int
) -> None:
    packed = a.scratch.floats() + a.worker * a.scratch_floats
    call = TileCall(e, a.tile)
    call.set(segment=a.depth, segments=1, y_row=e.isa.panel_columns, residual=0, mode=FINAL)
    call.set(low=a.inner_low, high=a.inner_high)
    begin, end = e.share(a.n * a.bands * a.panel_parts, thread, threads)
    with e.range(begin, end) as piece:
        number, part = piece // a.panel_parts, piece % a.panel_parts
        first = number % a.bands * a.out_h // a.bands
        last = (number % a.bands + 1) * a.out_h // a.bands
        seen = e.max(first * stride - a.pad_h, 0)
        last_seen = e.min((last - 1) * stride - a.pad_h + size, a.h)
        wide = packed + a.packed_floats
        band = _Band(number // a.bands, first, seen, last_seen, last, packed, wide)
        _emit_pack(e, a, band)
        first_panel = part * a.panels // a.panel_parts
        with e.range(first_panel, (part + 1) * a.panels // a.panel_parts) as panel:
            channel = panel * e.isa.panel_columns
            columns = e.min(a.c - channel, e.isa.panel_columns)
            here = _of_panel(e, a, panel, size)
            filters = _Ahead(here.weights.floats(), depthwise_floats(size**2, e.isa))
            _emit_expansion(e, a, band, call, _Panel(channel, columns), filters)
            with e.range(first, last) as out:
                # The widened band begins with row `seen`; `source` is row `top`, which may lie
                # above the image, and is not read there.
                top = out * stride - a.pad_h
                source = wide + (top - seen) * a.w * e.isa.panel_columns
                pixel = (band.image * a.out_h + out) * a.out_w
                row = OutputRow(pixel, top, source, e.i64(0), columns)
                emit_row(e, here, row, TiledRow(size, stride, tile), rows=size)


def _of_panel(e: Emitter, a: Args, panel: Value, size: int) -> Args:
    """The arguments of a depthwise convolution that knows only the channels of one panel."""
    channel = panel * e.isa.panel_columns
    return a.but(
        c=e.i64(e.isa.panel_columns),
        x_pixel=e.i64(e.isa.panel_columns),
        # Addresses count bytes here: they become pointers where they are used.
        weights=a.weights + panel * depthwise_floats(size**2, e.isa) * 4,
        bias=a.bias + channel * 4,
        y=a.y + channel * 4,
        residual=emit_moved(e, a.residual, channel),
    )


def _emit_pack(e: Emitter, a: Args, band: _Band) -> None:
    """Lay out the rows that the band sees as the micro-kernel reads them, tile by tile."""
    pixels = (band.last_seen - band.seen) * a.w
    source = a.x.floats() + (band.image * a.h + band.seen) * a.w * a.x_pixel
    depth = emit_whole(e, a.depth)
    with e.range(0, pixels, e.isa.rows) as first:
        seen = Lines(source + first * a.x_pixel, a.x_pixel)
        rows = e.min(pixels - first, e.isa.rows)
        copy_rows(e, seen, a.depth, rows, band.packed + first * depth)


def _emit_expansion(
    e: Emitter, a: Args, band: _Band, call: TileCall, panel: _Panel, ahead: _Ahead
) -> None:
    """Multiply the band by one panel of weights, and apply the activation."""
    channel, columns = panel
    rows, stride = (band.last_seen - band.seen) * a.w, e.isa.panel_columns
    call.ask(ahead.floats, a.depth, tiles_of(e, rows))
    call(
        **largest(e, rows)._asdict(),
        a=band.packed,
        a_row=emit_whole(e, a.depth),
        b=a.expand_weights.floats() + channel * a.depth,
        bias=a.expand_bias.floats() + channel,
        columns=columns,
        y=band.wide,
        ahead=ahead.start,
    )
    # Clamps were applied to the sums in registers.
    with e.when(a.inner_code > int(LAST_CLAMP)):
        tile = Stored(band.wide, stride, rows, columns)
        activate_tile(e, tile, a.inner_code, a.inner_slope)
