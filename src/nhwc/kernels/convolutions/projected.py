"""A depthwise convolution and the 1x1 convolution that alone reads it, as one step.

A thread computes a band of the depthwise convolution, all its channels, and writes it as the
micro-kernel reads rows: its inner activation applied, packed, in the nearest caches. Then it
multiplies the band by every panel of the 1x1 convolution. No image lies between the two, and
nothing is packed that was not computed there:

    image x                 band, packed as [tile][chunk][pixel][width]          result y
    +-----------+           +-----------+            +-----+-----+-----+         +-----------+
    |===========|  depth-   |===========|     x      | panels of the   |    =    |===========|
    |===========|  wise     |===========|            | 1x1 convolution |         |===========|
    |           |  ------>  +-----------+            +-----+-----+-----+         |           |
    +-----------+           c channels                k filters                  +-----------+

A band fills `_TILES` tiles of the micro-kernel, so that a panel that is read serves many rows; it
is no larger, or it would not stay in the nearest caches. There are as many bands as give each
thread the same work. Unlike with the 1x1 before it, no row is computed twice: the rows where two
bands meet are read by both, but written by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import InputError
from ..language import isa as isas
from ..language.compiler import Args, Kernel
from ..language.isa import Isa
from ..language.loops import Place, emit_moved, emit_whole
from ..language.values import Value
from ..language.vectors import Emitter
from ..layers.activations import LAST_CLAMP, Activation, Stored, clamp, emit_activations
from ..layers.ending import ENDING, activate_tile, ending
from ..product.microkernel import FINAL, TileCall, largest, tiles_for
from ..product.weights import pack_convolution, pad_channels
from ..tape.steps import Scratch, Step, View, pieces_of, step
from .depthwise import OutputRow, TiledRow, Window, emit_row

_FIELDS = (
    *("x", "x_pixel", "weights", "bias", "project_weights", "project_bias", "scratch", "tile"),
    *("n", "h", "w", "c", "out_h", "out_w", "k", "pad_h", "pad_w"),
    *("bands", "panels", "scratch_floats"),
    *("inner_code", "inner_slope", "low", "high"),
    *ENDING,
)
"""`c` channels are convolved and become `k`; `inner` fields are of the depthwise convolution."""

_TILES = 4
"""How many tiles of the micro-kernel a band should fill."""


@dataclass(frozen=True)
class Depthwise:
    """The depthwise convolution before: its weight (C, 1, r, s), bias and activation."""

    weight: Tensor
    bias: Tensor | None
    window: Window
    activation: Activation = Activation.NONE
    slope: float = 0.01


def projected_depthwise_step(
    x: View,
    y: View,
    depthwise: Depthwise,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: Activation = Activation.NONE,
    slope: float = 0.01,
    residual: View | None = None,
) -> Step:
    """activation(weight @ depthwise(x) + bias + residual), for a window that has a tile."""
    isa, window = isas.host(), depthwise.window
    n, c, h, w = x.shape
    k, out_h, out_w = y.shape[1:]
    size, stride, tile = window.size[0], window.stride[0], window.tile(out_w)
    if not tile:
        raise InputError(f"no step projects what {window} makes, {out_w} outputs wide.")
    bands = _bands(n, out_h, out_w, isa)
    padded = isa.padded(c)
    scratch_floats = -(-out_h // bands) * out_w * padded
    packed = pack_convolution(weight, bias, 1, isa)
    low, high = clamp(activation, slope)
    return step(
        projected_depthwise(size, stride, tile),
        pieces_of(n * bands, y.pixels * c * k),
        x=x,
        x_pixel=x.pixel,
        weights=pad_channels(depthwise.weight.flatten(1).t(), c),
        bias=pad_channels(depthwise.bias, c),
        project_weights=packed,
        project_bias=packed[c * isa.padded(k) :],
        scratch=Scratch(4 * scratch_floats, per_thread=True),
        tile=tiles_for(k),
        n=n,
        h=h,
        w=w,
        c=c,
        out_h=out_h,
        out_w=out_w,
        k=k,
        pad_h=window.padding[0],
        pad_w=window.padding[1],
        bands=bands,
        panels=isa.panels(k),
        scratch_floats=scratch_floats,
        inner_code=int(depthwise.activation),
        inner_slope=float(depthwise.slope),
        low=low,
        high=high,
        **ending(y, activation, slope, residual),
    )


def _bands(images: int, height: int, width: int, isa: Isa) -> int:
    """How many bands an image is cut into: as many for each thread, if rows allow."""
    threads = torch.get_num_threads()
    bands = -(-height // max(1, _TILES * isa.rows // width))
    while images * bands % threads and bands < height:
        bands += 1
    return bands


@cache
def projected_depthwise(size: int, stride: int, tile: int) -> Kernel:
    """The kernel for a square filter that computes `tile` neighbouring outputs at once."""
    emit = partial(_emit, size=size, stride=stride, tile=tile)
    return Kernel(f"projected{size}x{size}s{stride}t{tile}", _FIELDS, emit)


def _emit(
    e: Emitter, a: Args, thread: Value, threads: Value, *, size: int, stride: int, tile: int
) -> None:
    packed = a.scratch.floats() + a.worker * a.scratch_floats
    call = TileCall(e, a.tile)
    call.set(segment=a.c, segments=1, y_row=a.y_pixel, residual_row=a.residual_pixel, mode=FINAL)
    call.set(low=a.low, high=a.high)
    begin, end = e.share(a.n * a.bands, thread, threads)
    with e.range(begin, end) as piece:
        image, band = piece // a.bands, piece % a.bands
        first, last = band * a.out_h // a.bands, (band + 1) * a.out_h // a.bands
        pixels = (last - first) * a.out_w
        put = partial(_pack, packed, pixels)
        with e.range(first, last) as out:
            top = out * stride - a.pad_h
            source = a.x.floats() + (image * a.h + top) * a.w * a.x_pixel
            row = OutputRow((out - first) * a.out_w, top, source, e.i64(0), a.c)
            emit_row(e, a, row, TiledRow(size, stride, tile), rows=size, end=put)
        start = (image * a.out_h + first) * a.out_w
        _emit_products(e, a, call, _Band(start, pixels, packed))


def _pack(
    packed: Value,
    pixels: Value,
    e: Emitter,
    a: Args,
    sums: Sequence[Value],
    pixel: Value,
    place: Place,
) -> None:
    """Store neighbouring pixels of a band in the rows of the micro-kernel's tiles."""
    slope = e.float_of_bits(a.inner_slope)
    depth = emit_whole(e, a.c)
    for number, value in enumerate(emit_activations(e, sums, a.inner_code, slope)):
        at = pixel + number
        first = at // e.isa.rows * e.isa.rows
        rows = e.min(pixels - first, e.isa.rows)
        e.store(value, packed + (first * depth + (at - first) * e.width + place.channel * rows))


class _Band(NamedTuple):
    """Pixels of the result: the number of the first, and how many; packed at `packed`."""

    begin: Value
    pixels: Value
    packed: Value


def _emit_products(e: Emitter, a: Args, call: TileCall, band: _Band) -> None:
    """Multiply the band by every panel of weights."""
    begin, pixels, packed = band
    width = e.isa.panel_columns
    call.set(**largest(e, pixels)._asdict(), a=packed, a_row=emit_whole(e, a.c))
    with e.range(0, a.panels) as panel:
        column = panel * width
        columns = e.min(a.k - column, width)
        y = a.y.floats() + (begin * a.y_pixel + column)
        call(
            b=a.project_weights.floats() + column * a.c,
            bias=a.project_bias.floats() + column,
            columns=columns,
            y=y,
            residual=emit_moved(e, a.residual, begin * a.residual_pixel + column),
        )
        with e.when(a.code > int(LAST_CLAMP)):
            activate_tile(e, Stored(y, a.y_pixel, pixels, columns), a.code, a.slope)
