"""Winograd's products with filters that are transformed in every call, on the way to the product.

Transformed, filters are up to four times as many numbers, and a large model's come from memory in
each call. Where tiles are few, to read them takes longer than to make them. And a model whose
filters stay as they are is no larger than it was. They lie tap after tap:

    panel of filters     tap (0,0)         tap (0,1)            tap (2,2)
                         [c][columns]      [c][columns]   ...   [c][columns]

There are two ways, chosen by how many tiles the whole image has:

- more than fit into registers (`_in_memory`): `_DEEP` channels of a panel are transformed into
  scratch memory, a small matrix for each element, which stay in the second-level cache, and the
  micro-kernel multiplies all tiles by them, adding to the sums of the channels before;
- at most a few tiles (`_few`): what is transformed never goes to memory. For each row of a tile's
  elements the sums of that row, of all tiles, stay in registers, and for each channel that row of
  the transformed filter is made where it is used:

      for channels in stretches of `_NEAR`, for a vector of filters, for a row of elements:
          for channel: load 9 taps, transform them to 6 numbers of this row, multiply-add 6 x tiles

  Taps are read again for each of the six rows, from the nearest cache, where those of `_NEAR`
  channels of one vector of filters stay meanwhile.

The scale of the transformed filters is applied where it costs least: to the filters when they go to
memory, to the sums when they stay in registers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any

from ..language.loops import PADDED_TO, emit_whole
from ..language.values import INT, POINTER, Value
from ..language.vectors import Emitter, Variable
from ..product.microkernel import ADD, TileCall, tiles_of
from .transforms import Product, Tiling

_DEEP = 64
"""Channels of a panel that are transformed together: they stay in the second-level cache."""
_NEAR = 32
"""Channels that are transformed row by row: their taps stay in the nearest cache."""


def room(t: Tiling, columns: int) -> int:
    """How many floats `emit_lean` needs to work with, behind the sums."""
    return t.elements * int(_apart(_DEEP, columns))


def emit_lean(e: Emitter, t: Tiling, call: TileCall, p: Product) -> None:
    """Multiply a block of tiles by a panel of filters that lie tap after tap."""
    most = _most(e, t)

    def in_registers() -> None:
        given = (p.filters, p.packed, p.sums, p.columns, p.channels)
        e.switch(p.count, {n: partial(_few(e, t, n), *given) for n in range(1, most + 1)})

    # However the tiles are cut into blocks, all are summed in the same way.
    e.branch(p.tiles <= most, in_registers, lambda: _in_memory(e, t, call, p))


def _in_memory(e: Emitter, t: Tiling, call: TileCall, p: Product) -> None:
    """Transform some channels of the panel at a time, and multiply by those."""
    depth, tap = emit_whole(e, p.channels), p.channels * p.columns
    filters = p.sums + p.count * (t.elements * e.isa.panel_columns)
    # Meanwhile the products ask for the taps that are transformed next, each for some rows of them.
    taps = prod(t.taps)
    rows = (p.columns * taps + (t.elements - 1)) // t.elements
    with e.range(0, p.channels, _DEEP) as channel:
        last = e.min(channel + _DEEP, p.channels)
        deep = last - channel
        step = _apart(deep, p.columns)
        _transform(e, t)(p.filters + channel * p.columns, tap, filters, step, deep * p.columns)
        call.set(segment=deep, a_skip=channel, mode=e.select(channel > 0, e.i64(ADD), e.i64(0)))
        call.ask(rows * deep, deep, tiles_of(e, p.count))
        following = p.filters + e.select(last < p.channels, last * p.columns, tap * taps)
        with e.range(0, t.elements) as element:
            at, row = element * p.count, element * rows
            call(
                a=p.packed + at * depth,
                b=filters + element * step,
                y=p.sums + at * p.columns,
                ahead=following + (row // p.columns * tap + row % p.columns * deep),
            )


def _apart(channels: Any, columns: Any) -> Any:
    """Floats from an element's filters to the next's, which begin on other sets of the cache."""
    return channels * columns + PADDED_TO


def _transform(e: Emitter, t: Tiling) -> Callable[..., None]:
    """The function that transforms `floats` filters, of which each tap lies `tap` floats apart."""

    def emit(
        own: Emitter, filters: Value, tap: Value, to: Value, step: Value, floats: Value
    ) -> None:
        with own.range(0, floats, own.width) as i:
            grid = [[own.load(filters + (tap * n + i)) for n in line] for line in _taps(t)]
            for number, value in enumerate(_scaled(own, t, t.filter(own, grid))):
                own.store(value, to + (step * number + i))

    return e.function("transform_filters", (POINTER, INT, POINTER, INT, INT), emit)


def _scaled(e: Emitter, t: Tiling, grid: list[list[Value]]) -> list[Value]:
    """A transformed filter, element by element."""
    scale = [one * other for one in t.down.scale for other in t.across.scale]
    elements = [value for line in grid for value in line]
    return [value * e.vector(factor) for value, factor in zip(elements, scale, strict=True)]


def _taps(t: Tiling) -> list[range]:
    """The numbers of the taps, row by row."""
    rows, columns = t.taps
    return [range(columns * r, columns * (r + 1)) for r in range(rows)]


def _most(e: Emitter, t: Tiling) -> int:
    """How many tiles there may be for a row of sums and a row of a filter to stay in registers.

    No more than those whose rows are packed side by side.
    """
    return min(e.isa.rows, (e.isa.registers - 2 - t.across.size) // t.across.size)


def _few(e: Emitter, t: Tiling, tiles: int) -> Callable[..., None]:
    """The function that multiplies `tiles` tiles by filters that it transforms in registers."""

    def emit(
        own: Emitter, filters: Value, packed: Value, sums: Value, columns: Value, channels: Value
    ) -> None:
        tap, taps = columns * channels, prod(t.taps)
        with own.range(0, channels, _NEAR) as first, own.range(0, columns, own.width) as column:
            last = own.min(first + _NEAR, channels)
            # Prefetch the next stretch of channels, or after the last stretch the next panel:
            # each row of elements prefetches one or two of the nine taps.
            following = own.select(last < channels, columns * _NEAR, tap * taps - first * columns)
            for i in range(t.down.size):
                row = _Row(own, t, i, tiles)
                to = sums + (columns * (i * t.across.size * tiles) + column)
                with own.when(first > 0):
                    row.load(to, columns)
                with own.range(first, last, own.width) as chunk:
                    a = packed + (emit_whole(own, channels) * (i * t.across.size) + chunk) * tiles
                    with own.range(chunk, own.min(last, chunk + own.width)) as channel:
                        g = filters + (channel * columns + column)
                        for number in range(i, taps, t.down.size):
                            own.prefetch(g + (tap * number + following), level=2)
                        factors = a + (channel - chunk)
                        row.add(g, tap, factors, emit_whole(own, channels) * tiles)
                row.store(to, columns, last == channels)

    return e.function(f"few_{tiles}", (POINTER, POINTER, POINTER, INT, INT), emit)


class _Row:
    """The sums of one row of a tile's elements, for a vector of filters and some tiles."""

    def __init__(self, e: Emitter, t: Tiling, number: int, tiles: int) -> None:
        self._e, self._t, self._number, self._tiles = e, t, number, tiles
        self._sums = [[e.variable(0.0) for _ in range(tiles)] for _ in range(t.across.size)]

    def load(self, sums: Value, columns: Value) -> None:
        for variable, place in self._places(sums, columns):
            variable.value = self._e.load(place)

    def add(self, filters: Value, tap: Value, factors: Value, element: Value) -> None:
        """The products of one channel: its filters are transformed, and its tiles read."""
        e, t = self._e, self._t
        places = zip(*_taps(t), strict=True)
        columns = [[e.load(filters + tap * number) for number in line] for line in places]
        row = [t.down.filter(e, column)[self._number] for column in columns]
        for j, weight in enumerate(t.across.filter(e, row)):
            for tile, variable in enumerate(self._sums[j]):
                factor = e.read(factors + (element * j + tile * e.width))
                variable.value = e.fma(factor, weight, variable.value)

    def store(self, sums: Value, columns: Value, final: Value) -> None:
        """Store the sums; the final ones are scaled, as the filters were not."""
        e, t = self._e, self._t
        for j, (variable, place) in enumerate(self._places(sums, columns)):
            scale = t.down.scale[self._number] * t.across.scale[j // self._tiles]
            e.store(variable.value * e.select(final, e.f32(scale), e.f32(1.0)), place)

    def _places(self, sums: Value, columns: Value) -> list[tuple[Variable, Value]]:
        every = [variable for line in self._sums for variable in line]
        return [(variable, sums + columns * n) for n, variable in enumerate(every)]
