"""3x3 convolution with stride 1 in fewer multiplications, by Winograd's minimal filtering.

The image is cut into tiles. Each is transformed, channel by channel side by side in vectors; then
what was a convolution is one matrix product per element of the transformed tile; the products are
transformed back, and bias, residual and activation follow while they are in registers. A block of
tiles goes through all of it within the second-level cache.

Sums are rounded differently than in the direct sum: the relative error is about 1e-6 for F(4x4) and
5e-7 for F(2x2). NaN and infinity spread to the outputs of the whole tile that holds them, always as
NaN or infinity, where the direct sum would reach only the pixels next to them.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from . import isa as isas
from .activations import Activation, emit_activation
from .compiler import Args, Kernel
from .direct import clamp
from .isa import Isa
from .microkernel import TILE, TileCall, panel_columns
from .spec import ConvSpec
from .steps import Scratch, Step, View, step
from .transforms import F2, F4, Transform, emit_twice
from .values import INT, POINTER, Value
from .vectors import Emitter
from .weights import after, pack_bias, pack_panels

_FIELDS = (
    *("x", "y", "weights", "bias", "residual", "shared", "own", "tile"),
    *("n", "h", "w", "c", "k", "out_h", "out_w", "pad_h", "pad_w"),
    *("tiles_h", "tiles_w", "block", "group", "blocks", "chunk", "chunks", "phase"),
    *("x_pixel", "y_pixel", "residual_pixel", "block_floats", "own_floats"),
    *("low", "high", "code", "slope"),
)

_ALL, _INPUT, _PRODUCTS = range(3)
"""The field `phase`: everything block by block, or only the half before or after a barrier."""


class _Place(NamedTuple):
    """A tile: the image it is cut from, and its corner in the output."""

    image: Value
    top: Value
    left: Value


def _place(a: Args, tile: Value, t: Transform) -> _Place:
    row = tile // a.tiles_w
    return _Place(row // a.tiles_h, row % a.tiles_h * t.outputs, tile % a.tiles_w * t.outputs)


def _tiles(a: Args) -> Value:
    total: Value = a.n * a.tiles_h * a.tiles_w
    return total


def _emit(e: Emitter, a: Args, thread: Value, threads: Value, *, t: Transform) -> None:
    own = a.own.floats() + thread * a.own_floats
    sums = own + e.select(a.phase == _ALL, a.block_floats, e.i64(0))
    call = TileCall(e, a.tile)

    def everything() -> None:
        begin, end = e.share(a.blocks, thread, threads)
        with e.range(begin, end) as block:
            first = block * a.block
            last = e.min(first + a.block, _tiles(a))
            with e.range(first, last) as tile:
                _emit_input(e, a, t, tile, own)
            with e.range(0, a.chunks) as chunk:
                _emit_chunk(e, a, t, call, (block, chunk, own, sums))

    def inputs() -> None:
        begin, end = e.share(_tiles(a), thread, threads)
        with e.range(begin, end) as tile:
            _emit_input(e, a, t, tile, a.shared.floats() + tile // a.block * a.block_floats)

    def products() -> None:
        begin, end = e.share(a.blocks * a.chunks, thread, threads)
        with e.range(begin, end) as unit:
            block, chunk = unit % a.blocks, unit // a.blocks
            packed = a.shared.floats() + block * a.block_floats
            _emit_chunk(e, a, t, call, (block, chunk, packed, sums))

    e.switch(a.phase, {_ALL: everything, _INPUT: inputs, _PRODUCTS: products})


def _padded(e: Emitter, count: Value) -> Value:
    return (count + (e.width - 1)) // e.width * e.width


def _in_block(e: Emitter, a: Args, tile: Value) -> tuple[Value, Value, Value, Value]:
    """Tiles in the block of `tile`; then of its group: first tile in the block, tiles, its row."""
    first = tile // a.block * a.block
    count = e.min(a.block, _tiles(a) - first)
    number = tile - first
    group = number // a.group * a.group
    return count, group, e.min(a.group, count - group), number - group


def _emit_input(e: Emitter, a: Args, t: Transform, tile: Value, packed: Value) -> None:
    """Transform one tile of all channels into the packed rows of its block."""
    count, group, rows, row = _in_block(e, a, tile)
    depth = _padded(e, a.c)
    place = _place(a, tile, t)
    top, left = place.top - a.pad_h, place.left - a.pad_w
    source = a.x.floats() + ((place.image * a.h + top) * a.w + left) * a.x_pixel
    inside = (top >= 0) & (left >= 0) & (top + t.size <= a.h) & (left + t.size <= a.w)
    into = packed + (group * depth + row * e.width)
    patch = e.stack(t.size**2 * e.width)
    function = e.function(
        "transform_input", (POINTER, INT, INT, POINTER, INT), partial(_emit_forward, t=t)
    )
    with e.range(0, a.c, e.width) as c:
        to = into + c * rows

        def gathered(c: Value = c, to: Value = to) -> None:
            mask = e.lanes(a.c - c)
            with e.range(0, t.size) as i, e.range(0, t.size) as j:
                y, x = top + i, left + j
                here = (y >= 0) & (y < a.h) & (x >= 0) & (x < a.w)
                at = patch + (i * t.size + j) * e.width
                e.store(e.vector(0.0), at)
                with e.when(here):
                    e.store(e.load(source + ((i * a.w + j) * a.x_pixel + c), mask), at)
            function(patch, t.size * e.width, e.width, to, count * depth)

        def in_place(c: Value = c, to: Value = to) -> None:
            function(source + c, a.w * a.x_pixel, a.x_pixel, to, count * depth)

        e.branch(inside & (c + e.width <= a.c), in_place, gathered)


def _emit_forward(
    e: Emitter, source: Value, row: Value, pixel: Value, to: Value, step: Value, *, t: Transform
) -> None:
    grid = [[e.load(source + (row * i + pixel * j)) for j in range(t.size)] for i in range(t.size)]
    for i, line in enumerate(emit_twice(e, t.input, grid)):
        for j, value in enumerate(line):
            e.store(value, to + step * (i * t.size + j))


def _emit_chunk(
    e: Emitter,
    a: Args,
    t: Transform,
    call: TileCall,
    work: tuple[Value, Value, Value, Value],
) -> None:
    """Multiply a block of tiles by some panels of weights, and transform the sums back."""
    block, chunk, packed, sums = work
    width, depth, padded_k = panel_columns(e.isa), _padded(e, a.c), _padded(e, a.k)
    first = block * a.block
    count = e.min(a.block, _tiles(a) - first)
    begin = chunk * a.chunk
    columns = e.min(a.chunk, padded_k - begin)
    zeros = e.stack(width)
    for j in range(e.isa.vectors):
        e.store(e.vector(0.0), zeros + j * e.width)
    call.set(k=a.c, segments=1, y_row=columns, start=zeros, residual=0, mode=0)
    with e.range(0, t.size**2) as element:
        filters = a.weights.floats() + element * a.c * padded_k
        result = sums + element * count * columns
        with e.range(0, columns, width) as column:
            wide = e.min(columns - column, e.i64(width))
            b = filters + (begin + column) * a.c
            call.set(b=b, columns=wide, vectors=wide // e.width)
            with e.range(0, count, a.group) as group:
                call(
                    a=packed + (element * count + group) * depth,
                    y=result + (group * columns + column),
                    rows=e.min(a.group, count - group),
                )
    with e.range(0, count) as i, e.range(0, columns, e.width) as column:
        source = sums + (i * columns + column)
        _emit_output(e, a, t, (source, count * columns), (first + i, begin + column))


def _emit_output(
    e: Emitter,
    a: Args,
    t: Transform,
    source: tuple[Value, Value],
    where: tuple[Value, Value],
) -> None:
    """Transform the sums of one tile and one vector of channels back, finish and store them."""
    (sums, step), (tile, channel) = source, where
    place = _place(a, tile, t)
    pixel = (place.image * a.out_h + place.top) * a.out_w + place.left
    y = a.y.floats() + (pixel * a.y_pixel + channel)
    residual = a.residual.floats() + (pixel * a.residual_pixel + channel)
    grid = [[e.load(sums + step * (i * t.size + j)) for j in range(t.size)] for i in range(t.size)]
    bias = e.load(a.bias.floats() + channel)
    low, high = e.float_of_bits(a.low), e.float_of_bits(a.high)
    results = [[e.variable(0.0) for _ in range(t.outputs)] for _ in range(t.outputs)]
    for line, values in zip(results, emit_twice(e, t.output, grid), strict=True):
        for variable, value in zip(line, values, strict=True):
            variable.value = value + bias
    rows, columns = a.out_h - place.top, a.out_w - place.left
    simple = (rows >= t.outputs) & (columns >= t.outputs) & (channel + e.width <= a.k)
    each = [(i, j, results[i][j]) for i in range(t.outputs) for j in range(t.outputs)]

    def at_once() -> None:
        with e.when(a.residual != 0):
            for i, j, variable in each:
                other = residual + (a.out_w * i + j) * a.residual_pixel
                variable.value = variable.value + e.load(other)
        for i, j, variable in each:
            bounded = e.max(low, e.min(high, variable.value))
            e.store(bounded, y + (a.out_w * i + j) * a.y_pixel)

    def one_by_one() -> None:
        kept = e.stack(t.outputs**2 * e.width)
        for number, (_, _, variable) in enumerate(each):
            e.store(variable.value, kept + number * e.width)
        mask = e.lanes(a.k - channel)
        slope = e.float_of_bits(a.slope)
        last_row, last_column = e.min(rows, t.outputs), e.min(columns, t.outputs)
        with e.range(0, last_row) as i, e.range(0, last_column) as j:
            value = e.variable(0.0)
            value.value = e.load(kept + (i * t.outputs + j) * e.width)
            pixels = i * a.out_w + j
            with e.when(a.residual != 0):
                value.value = value.value + e.load(residual + pixels * a.residual_pixel, mask)
            finished = emit_activation(e, value.value, a.code, slope)
            e.store(finished, y + pixels * a.y_pixel, mask)

    e.branch(simple & (a.code <= int(Activation.RELU6)), at_once, one_by_one)


WINOGRAD2 = Kernel("winograd2x2", _FIELDS, partial(_emit, t=F2))
WINOGRAD4 = Kernel("winograd4x4", _FIELDS, partial(_emit, t=F4))


def serves(spec: ConvSpec) -> bool:
    """Whether Winograd's transforms apply to this convolution."""
    square = (spec.r, spec.s, spec.groups) == (3, 3, 1)
    return square and spec.stride == spec.dilation == (1, 1)


def pack_winograd(t: Transform, spec: ConvSpec, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The transformed filters in panels, one matrix per element of a tile, then the bias."""
    isa = isas.host()
    panels = [pack_panels(matrix, isa) for matrix in t.filters(weight)]
    return torch.cat((*panels, pack_bias(bias, spec.k, 1, isa)))


def packed_floats(t: Transform, spec: ConvSpec) -> int:
    """How many numbers `pack_winograd` returns."""
    return (t.size**2 * spec.c + 1) * (-(-spec.k // isas.host().width) * isas.host().width)


def winograd_steps(
    t: Transform,
    spec: ConvSpec,
    x: View,
    y: View,
    packed: Tensor | View,
    residual: View | None = None,
) -> tuple[Step, ...]:
    """One step, or two where the tiles are too few to give each thread blocks of its own."""
    isa, threads = isas.host(), torch.get_num_threads()
    tiles_h, tiles_w = -(-spec.out_h // t.outputs), -(-spec.out_w // t.outputs)
    tiles = spec.n * tiles_h * tiles_w
    depth, padded_k = (-(-n // isa.width) * isa.width for n in (spec.c, spec.k))
    cut = _cut(t, tiles, depth, padded_k, isa, threads)
    block_floats, sums_floats = t.size**2 * cut.block * depth, t.size**2 * cut.block * cut.chunk
    alone = cut.blocks >= threads
    own_floats = sums_floats + block_floats * alone
    shared = Scratch(64 if alone else 4 * block_floats * cut.blocks)
    low, high = clamp(spec.activation)
    make = partial(
        step,
        WINOGRAD4 if t is F4 else WINOGRAD2,
        x=x,
        y=y,
        weights=packed,
        bias=after(packed, t.size**2 * spec.c * padded_k),
        residual=residual,
        shared=shared,
        own=Scratch(4 * own_floats, per_thread=True),
        tile=TILE.address,
        n=spec.n,
        h=spec.h,
        w=spec.w,
        c=spec.c,
        k=spec.k,
        out_h=spec.out_h,
        out_w=spec.out_w,
        pad_h=spec.padding[0],
        pad_w=spec.padding[1],
        tiles_h=tiles_h,
        tiles_w=tiles_w,
        block=cut.block,
        group=cut.group,
        blocks=cut.blocks,
        chunk=cut.chunk,
        chunks=-(-padded_k // cut.chunk),
        x_pixel=x.pixel,
        y_pixel=y.pixel,
        residual_pixel=residual.pixel if residual else 0,
        block_floats=block_floats,
        own_floats=own_floats,
        low=low,
        high=high,
        code=int(spec.activation),
        slope=float(spec.alpha),
    )
    if alone:
        return (make(phase=_ALL),)
    return make(phase=_INPUT), make(phase=_PRODUCTS)


class _Cut(NamedTuple):
    """Tiles per block, tiles per product, blocks, and output channels transformed back at once."""

    block: int
    group: int
    blocks: int
    chunk: int


_BLOCK_BYTES = 512 << 10
"""How much of the second-level cache the transformed tiles of a block may take."""


def _cut(t: Transform, tiles: int, depth: int, padded_k: int, isa: Isa, threads: int) -> _Cut:
    fitting = _BLOCK_BYTES // (4 * t.size**2 * depth)
    block = max(isa.rows, fitting // isa.rows * isa.rows)
    blocks = -(-tiles // min(block, 4 * isa.rows))
    if blocks >= threads or tiles >= 2 * isa.rows * threads:
        blocks = -(-blocks // threads) * threads
    block = -(-tiles // blocks)
    blocks = -(-tiles // block)
    group = -(-block // -(-block // isa.rows))
    return _Cut(block, group, blocks, min(panel_columns(isa), padded_k))
