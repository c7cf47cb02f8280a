"""The kernels of Winograd's convolution: tiles into packed rows, products, and back.

A tile for 4x4 pixels of the result and a filter of 3x3 is 6x6 pixels of the input; neighbouring
tiles overlap by two. Each of its 36 elements, transformed, is a number per channel, and meets only
the same element of the filters. So 36 matrix products take the place of the convolution:

    input            element (0, 0)    (0, 1)        (5, 5)
    +--+--+--+       [tile 0: c]       [tile 0: c]   [tile 0: c]
    |0 |1 |2 |  -->  [tile 1: c]       [tile 1: c]   [tile 1: c]     `packed`, by `_emit_input`
    +--+--+--+       [tile 2: c]       [tile 2: c]   [tile 2: c]
    |3 |4 |5 |          x filters         x             x            `form.multiply`
    +--+--+--+       [tile 0: k]       [tile 0: k]   [tile 0: k]
                     [tile 1: k]  ...                                `sums`
                         |
                         +--> `emit_output`: 4 x 4 pixels of each tile, finished and stored

`_emit_input` transforms a vector of channels at a time, and writes the 36 elements in the
micro-kernel's chunks. A tile at the border is first copied, with zeros beside the image, to a patch
of its own. Of a volume, the tiles of all `t` frames under a tile of the result lie one after the
other in its row, as if they were channels (`deep`): one product sums over all of them. So do, for a
filter that moves by two, the tiles of the even and of the odd pixels.
`emit_output` (tile_outputs.py) reads the 36 sums of a vector of filters and finishes 4 x 4 pixels:
what comes after the convolution costs no memory traffic of its own.

The loop over panels is around the products and the way back, so that sums are of one panel alone
and stay in the second-level cache, as do the packed tiles of the block, which every panel reads.
See winograd.py for how the work is cut.

Where each thread has blocks of its own it needs nobody, and does everything (`ALL`) in memory of
its own. Where blocks are fewer, all threads transform tiles into shared memory (`INPUT`), meet, and
share out the panels (`PRODUCTS`). Several `groups`, of `c` and `k` channels each, are as many
convolutions, and done in the first way.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import starmap
from math import prod
from typing import NamedTuple

from ..language.compiler import Args, Kernel
from ..language.loops import emit_moved, emit_whole
from ..language.values import INT, POINTER, Value
from ..language.vectors import Emitter
from ..layers.ending import ENDING
from ..product.microkernel import TileCall, even, tiles_of
from ..product.rows import emit_frame
from . import lean
from .parts import ALL, INPUT
from .pooled import POOL
from .tile_outputs import Sums, corner_of, emit_output
from .transforms import Product, Tiling, Transform

_FIELDS = (
    *("x", "x_pixel", "weights", "bias", "shared", "own", "tile"),
    *("n", "h", "w", "c", "k", "out_h", "out_w", "pad_h", "pad_w"),
    *("d", "out_d", "t", "stride_d", "pad_d", "dilation_d", "held", "deep"),
    *("tiles_h", "tiles_w", "block", "blocks", "panels", "groups", "phase"),
    *("block_floats", "own_floats", "low", "high"),
    *ENDING,
)

APART = ("dilation_h", "dilation_w", "stride_h", "stride_w")
_FIXED = {POOL: 0, **dict.fromkeys(APART, 1)}
"""Fields that only some kernels have, and what they are in the others."""


class _Work(NamedTuple):
    """A block of tiles, packed, and a panel of filters; the sums have room behind them."""

    block: Value
    panel: Value
    packed: Value
    sums: Value


def _tiles(a: Args) -> Value:
    total: Value = a.n * a.out_d * a.tiles_h * a.tiles_w
    return total


@dataclass(frozen=True)
class Form:
    """Transforms, and how filters are held: `numbers` of each, and what multiplies by them.

    `room(t, columns)` is how many floats `multiply` needs to work in, for a panel of columns.
    """

    name: str
    t: Tiling
    numbers: int
    multiply: Callable[[Emitter, Tiling, TileCall, Product], None]
    room: Callable[[Tiling, int], int] = lambda t, columns: 0

    @property
    def pools(self) -> bool:
        """Whether its tiles are whole windows of a 2x2 pooling."""
        return not any(side % 2 for side in self.t.outputs)

    @property
    def lean(self) -> bool:
        """Whether it holds filters as they are."""
        return self.numbers == prod(self.t.taps)

    @cached_property
    def kernel(self) -> Kernel:
        """The kernel for filters that see neighbours, and move from one to the next."""
        return self._kernel(self.name, *([POOL] if self.pools else []))

    @cached_property
    def apart(self) -> Kernel:
        """The kernel for all others."""
        return self._kernel(f"{self.name}apart", *APART)

    def _kernel(self, name: str, *more: str) -> Kernel:
        fixed = {field: value for field, value in _FIXED.items() if field not in more}
        return Kernel(name, (*_FIELDS, *more), partial(_emit, form=self, fixed=fixed))


def _emit(
    e: Emitter, a: Args, thread: Value, threads: Value, *, form: Form, fixed: dict[str, int]
) -> None:
    t, a = form.t, a.but(**{name: e.i64(value) for name, value in fixed.items()})
    # In memory of its own a thread has packed tiles, if it makes them, and behind them the sums.
    own = a.own.floats() + a.worker * a.own_floats
    sums = own + e.select(a.phase == ALL, a.block_floats, e.i64(0))
    call = TileCall(e, a.tile)

    def inputs() -> None:
        begin, end = e.share(_tiles(a), thread, threads)
        with e.range(begin, end) as tile:
            _emit_input(e, a, t, tile, a.shared.floats() + tile // a.block * a.block_floats)

    def products() -> None:
        """The panels of a block, whose tiles are transformed first if nobody did."""
        every = a.phase == ALL
        begin, end = e.share(a.blocks * e.select(every, a.groups, a.panels), thread, threads)
        with e.range(begin, end) as unit:
            # A thread keeps to its panels: it reads their filters once for all blocks.
            block = e.select(every, unit // a.groups, unit % a.blocks)
            panel = e.select(every, e.i64(0), unit // a.blocks)
            one = _of_group(e, a, form, e.select(every, unit % a.groups, e.i64(0)))
            shared = a.shared.floats() + block * a.block_floats
            packed = e.select(every, own.address(), shared.address()).floats()
            with e.when(every):
                first = block * a.block
                with e.range(first, e.min(first + a.block, _tiles(a))) as tile:
                    _emit_input(e, one, t, tile, packed)
            with e.range(panel, e.select(every, a.panels, panel + 1)) as number:
                _emit_panel(e, one, form, call, _Work(block, number, packed, sums))

    e.branch(a.phase == INPUT, inputs, products)


def _of_group(e: Emitter, a: Args, form: Form, group: Value) -> Args:
    """The arguments for the channels of one group."""
    padded, channel = emit_whole(e, a.k), group * a.k
    return a.but(
        x=(a.x.floats() + group * a.c).address(),
        y=(a.y.floats() + channel).address(),
        weights=(a.weights.floats() + group * form.numbers * a.deep * padded).address(),
        bias=(a.bias.floats() + group * padded).address(),
        residual=emit_moved(e, a.residual, channel),
    )


def _emit_input(e: Emitter, a: Args, t: Tiling, tile: Value, packed: Value) -> None:
    """Transform one tile of all channels, of all frames, into the packed rows of its block."""
    depth, corner = emit_whole(e, a.deep), corner_of(a, tile, t)
    begin = tile // a.block * a.block
    count = e.min(a.block, _tiles(a) - begin)
    first, rows = even(e, count).around(e, tile - begin)
    into = packed + (first * depth + (tile - begin - first) * e.width)
    image, front = corner.image // a.out_d, corner.image % a.out_d * a.stride_d - a.pad_d
    # Tiles lie at even steps in the result; the input they see begins with the padding.
    above, before = corner.top * a.stride_h - a.pad_h, corner.left * a.stride_w - a.pad_w
    down, across = a.stride_h * a.dilation_h, a.stride_w * a.dilation_w
    height, width = t.down.size, t.across.size
    patch = e.stack(t.elements * e.width)
    function = e.function(
        "transform_input", (POINTER, INT, INT, POINTER, INT), partial(_emit_forward, t=t)
    )
    with (
        e.range(0, a.t) as tap,
        e.range(0, a.stride_h) as row,
        e.range(0, a.stride_w) as column,
        e.range(0, a.c, e.width) as c,
    ):
        frame = emit_frame(e, a, front + tap * a.dilation_d)
        top, left = above + row * a.dilation_h, before + column * a.dilation_w
        there = (frame >= 0) & (frame < a.d)
        bottom, right = top + down * (height - 1), left + across * (width - 1)
        inside = (top >= 0) & (left >= 0) & (bottom < a.h) & (right < a.w)
        source = a.x.floats() + (((image * a.d + frame) * a.h + top) * a.w + left) * a.x_pixel
        part = (tap * a.stride_h + row) * a.stride_w + column
        to = into + (part * emit_whole(e, a.c) + c) * rows
        next_row, next_pixel = a.w * a.x_pixel * down, a.x_pixel * across

        def gathered() -> None:
            mask = e.lanes(a.c - c)
            with e.range(0, height) as i, e.range(0, width) as j:
                y, x = top + i * down, left + j * across
                here = there & (y >= 0) & (y < a.h) & (x >= 0) & (x < a.w)
                at = patch + (i * width + j) * e.width
                e.store(e.vector(0.0), at)
                with e.when(here):
                    e.store(e.load(source + (i * next_row + j * next_pixel + c), mask), at)
            function(patch, width * e.width, e.width, to, count * depth)

        def in_place() -> None:
            function(source + c, next_row, next_pixel, to, count * depth)

        e.branch(there & inside & (c + e.width <= a.c), in_place, gathered)


def _emit_forward(
    e: Emitter, source: Value, row: Value, pixel: Value, to: Value, step: Value, *, t: Tiling
) -> None:
    rows, columns = range(t.down.size), range(t.across.size)
    grid = [[e.load(source + (row * i + pixel * j)) for j in columns] for i in rows]
    elements = [value for line in t.input(e, grid) for value in line]
    for number, value in enumerate(elements):
        e.store(value, to + step * number)


def _emit_panel(
    e: Emitter,
    a: Args,
    form: Form,
    call: TileCall,
    work: _Work,
) -> None:
    """Multiply a block of tiles by a panel of filters, and transform the sums back."""
    t, (block, panel, packed, sums) = form.t, work
    # The last panel has as many columns as whole vectors hold; what is beyond `k` is not stored.
    first, begin = block * a.block, panel * e.isa.panel_columns
    count = e.min(a.block, _tiles(a) - first)
    columns = e.min(e.i64(e.isa.panel_columns), emit_whole(e, a.k) - begin)
    filters = a.weights.floats() + begin * form.numbers * a.deep
    zeros = e.stack(e.isa.panel_columns)
    for j in range(e.isa.vectors):
        e.store(e.vector(0.0), zeros + j * e.width)
    depth = emit_whole(e, a.deep)
    call.set(**even(e, count)._asdict(), a_row=depth, segment=a.deep, segments=1)
    call.set(columns=columns, y_row=columns, bias=zeros, residual=0, mode=0)
    form.multiply(e, t, call, Product(filters, a.deep, columns, packed, count, _tiles(a), sums))
    with e.range(0, count) as i, e.range(0, columns, e.width) as column:
        source = sums + (i * columns + column)
        emit_output(e, a, t, Sums(source, count * columns), first + i, begin + column)


def _multiply(e: Emitter, t: Tiling, call: TileCall, p: Product) -> None:
    """Multiply by filters that were transformed when they were packed."""
    floats, parts = p.channels * p.columns, tiles_of(e, p.count)
    # If no other thread reads the next filters, each part of a product prefetches some of them.
    next_ones = e.select((p.count == p.tiles) & (parts > 1), floats, e.i64(0))
    call.ask(next_ones, p.channels, parts)
    with e.range(0, t.elements) as element:
        at, filters = element * p.count, p.filters + element * floats
        y = p.sums + at * p.columns
        call(a=p.packed + at * emit_whole(e, p.channels), b=filters, y=y, ahead=filters + floats)


def _held(down: Transform, across: Transform) -> Form:
    """The form that holds its filters transformed."""
    t = Tiling(down, across)
    return Form(_name(t), t, t.elements, _multiply)


def _lean(down: Transform, across: Transform) -> Form:
    """The form that holds them as they are."""
    t = Tiling(down, across)
    return Form(f"{_name(t)}lean", t, prod(t.taps), lean.emit_lean, lean.room)


def _name(t: Tiling) -> str:
    outputs, taps = ("x".join(map(str, pair)) for pair in (t.outputs, t.taps))
    return f"winograd{outputs}" if t.taps == (3, 3) else f"winograd{outputs}of{taps}"


_ONE, _TWO, _THREE = Transform(1, 1), Transform(3, 2), Transform(4, 3)
_SQUARE = [_THREE, *starmap(Transform, [(2, 3), (3, 2), (3, 4), (4, 5), (2, 5), (2, 7)])]
_LINE = [_TWO, _THREE, Transform(4, 5), Transform(4, 7)]

FORMS = {
    form.name: form
    for form in (
        *(_held(one, one) for one in _SQUARE),
        *(_lean(one, one) for one in (_THREE, _TWO)),
        *(_held(_ONE, one) for one in _LINE),
        *(_held(one, _ONE) for one in _LINE),
        _lean(_ONE, _TWO),
        _lean(_TWO, _ONE),
    )
}
"""All forms by name: of square filters, and of those of one row or one column."""
