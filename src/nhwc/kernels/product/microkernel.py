"""The register-tiled matrix product on which every convolution here stands.

A tile of the result is a few rows (pixels) by a panel of columns (filters, a vector or more). Its
sums stay in registers while the inner dimension runs; each step of it loads one row of the panel,
and one number of each row of pixels, broadcast:

                         panel b          one row of it is loaded ...
                     +------+------+
          inner  ->  | wwww | wwww |
                     +------+------+
    rows a   |           x      x
            +---+    +------+------+
            | p | -> | sums | sums |      ... and multiplied by a number of each row:
            | p | -> | sums | sums |      rows x vectors multiply-adds
            | p | -> | sums | sums |      for rows + vectors loads
            +---+    +------+------+

The larger the tile, the more products for each load; but sums, a row of weights and one number must
fit into the registers, or sums would travel to memory and back. With 16 registers of AVX2 that is
6 x 2 sums + 2 + 1, with 32 of AVX-512 14 x 2 + 2 + 1, with 32 narrow ones of NEON 8 x 3 + 3 + 1. As
many sums are needed to keep the multipliers busy: two products may begin in each cycle, but a sum
can be added to again only about four cycles later.

What is multiplied was packed for it:

- rows of activations, in chunks as long as a vector: [inner / width][row][width]. Within a chunk
  every row is at a constant distance, so one pointer register addresses them all, and rows that are
  a power of two apart in the tensor do not fall onto one set of the cache. The inner dimension may
  come in segments that each begin with a chunk of their own, so that packing copies whole vectors;
- weights, in panels: [inner][columns]; the last panel is as many vectors wide as it needs, and
  filled with zeros.

No loop can run over registers: there is a function for each number of rows and for each width of a
panel, in steps of the `least` vector. Those of one width are a kernel of their own. `TILE` is the
table of these, compiled once, which convolutions call through its address (`TileCall`); each asks
for the widths that it has (`tiles_for`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from typing import Any, NamedTuple

from ..language import isa as isas
from ..language.compiler import Args, Kernel, Kernels
from ..language.isa import Isa
from ..language.loops import emit_moved
from ..language.values import INT, POINTER, Value
from ..language.vectors import Emitter, Variable
from .products import Accumulators, Tile, emit_product, lines, unrolled

ADD = 1
"""Mode: the accumulators start from what `y` holds, instead of from the bias."""
FINAL = 2
"""Mode: add the residual, then clamp; otherwise the sums are stored as they are."""


class Cut(NamedTuple):
    """Rows in tiles: the first `full` rows in tiles of `each`, the others in tiles of `rest`.

    98 rows are 13 tiles of six and four of five (`even`). 16 of six and one of two would take
    longer: the sums of two rows are too few to keep the multipliers busy.
    """

    rows: Value
    each: Value
    full: Value
    rest: Value

    def first(self, e: Emitter, tile: Value) -> Value:
        """The first row of a tile."""
        return e.min(tile * self.each, self.full + (tile - self.full // self.each) * self.rest)

    def around(self, e: Emitter, row: Value) -> tuple[Value, Value]:
        """The tile that holds `row`: its first row, and how many it has."""
        start = e.select(row < self.full, e.i64(0), self.full)
        each = e.select(row < self.full, self.each, self.rest)
        return start + (row - start) // each * each, each


FIELDS = (
    *Cut._fields,
    *("a", "a_row", "a_skip", "b", "segment", "segments", "columns"),
    *("y", "y_row", "bias", "residual", "residual_row", "low", "high", "mode"),
    *("ahead", "ahead_tile", "ahead_row", "ahead_rows"),
)
"""y = clamp(bias + a @ b + residual) for `rows` rows, in tiles (`Cut`), and a panel of weights.

The inner dimension is `segments` times `segment` long, in rows that are packed `a_row` floats long;
the first `a_skip` of each are left out. `a`, `b`, `y`, `bias` and `residual` (0 for none) are
addresses. `columns` may be fewer than the panel holds; then only those of `y` and `residual` are
read and written, and the last vector is as wide as they need.

Meanwhile each tile asks for a part of what its caller reads next: `ahead_rows` rows of `segments`
times `segment` floats, `ahead_row` apart, from `ahead` on, and `ahead_tile` further with every
tile; none if the caller sets nothing. A part at a time, since a processor can wait for few lines of
memory at once, and what is asked for too early is gone again.
"""


def even(e: Emitter, rows: Value) -> Cut:
    """As few tiles as hold `rows` rows, none of which has more than a row less than another."""
    tiles = tiles_of(e, rows)
    each = (rows + tiles - 1) // tiles
    short = tiles * each - rows
    return Cut(rows, each, rows - short * (each - 1), e.select(short > 0, each - 1, e.i64(0)))


def largest(e: Emitter, rows: Value) -> Cut:
    """Tiles as large as they can be, but for the last: known without a division."""
    most = e.isa.rows
    return Cut(rows, e.i64(most), rows // most * most, rows % most)


def tiles_of(e: Emitter, rows: Value) -> Value:
    """How many tiles `rows` rows are cut into."""
    return (rows + (e.isa.rows - 1)) // e.isa.rows


def _emit(e: Emitter, a: Args, thread: Value, threads: Value, *, parts: int) -> None:
    del thread, threads

    def tiles(begin: Any, end: Value, number: Any) -> dict[int, Callable[[], None]]:
        return {
            rows: partial(_tile_function(e, rows, parts), a.words, begin, end, number)
            for rows in range(1, e.isa.rows + 1)
        }

    e.switch(a.each, tiles(0, a.full, 0))
    e.switch(a.rest, tiles(a.full, a.rows, a.full // a.each))


def _of_each_width(isa: Isa) -> tuple[Kernel, ...]:
    most = isa.panel_columns // isa.least
    return tuple(
        Kernel(f"tile{parts}", FIELDS, partial(_emit, parts=parts)) for parts in range(1, most + 1)
    )


TILE = Kernels("tile", _of_each_width)


def tiles_for(*columns: int) -> Kernels:
    """Those of `TILE` that products with so many columns call; others need not be compiled."""
    isa = isas.host()
    ends = [count % isa.panel_columns for count in columns]
    whole = [isa.panel_columns for count in columns if count >= isa.panel_columns]
    return TILE.only((width - 1) // isa.least for width in (*ends, *whole) if width)


class TileCall:
    """Calls one of `TILE` from within another kernel: its number says which, a block what with."""

    def __init__(self, e: Emitter, table: Value) -> None:
        self._e, self._table = e, table.integers()
        self._block = e.stack(len(FIELDS), INT)
        self.set(a_skip=0, ahead_rows=0, ahead_tile=0)

    def __call__(self, **given: Any) -> None:
        """Set the fields that changed since the last call, and call."""
        self.set(**given)
        e, zero = self._e, self._e.i64(0)
        columns = e.read(self._block + FIELDS.index("columns"))
        address = e.read(self._table + (columns - 1) // e.isa.least)
        e.call(address, None, (self._block.address(), zero, zero, zero))

    def ask(self, floats: Any, depth: Value, tiles: Value) -> Value:
        """Let each of `tiles` tiles, `depth` deep, ask for a part of `floats`; return how many."""
        rows: Value = (floats + depth * tiles - 1) // (depth * tiles)
        self.set(ahead_row=depth, ahead_rows=rows, ahead_tile=rows * depth)
        return rows * depth

    def set(self, **given: Any) -> None:
        for name, value in given.items():
            plain = value.address() if isinstance(value, Value) and value.element else value
            self._e.write(plain, self._block + FIELDS.index(name))


_POINTERS = ("a", "b", "y", "bias", "ahead")


def _tile_function(e: Emitter, rows: int, parts: int) -> Callable[..., None]:
    """The function for tiles of `rows` rows and `parts` of the least vectors.

    It takes the fields, which it reads itself, since that many do not travel in registers, the rows
    from `begin` up to `end`, and the number of the first tile.
    """

    def emit(own: Emitter, block: Value, begin: Value, end: Value, number: Value) -> None:
        words = block.integers()
        names = [field.name for field in fields(Tile)]
        given = {name: own.read(words + FIELDS.index(name)) for name in names}
        given |= {name: given[name].floats() for name in _POINTERS}
        t = Tile(**given)
        whole, rest = divmod(parts * e.isa.least, e.width)
        last = [own.of_width(rest)] if rest else []
        with own.range(begin, end, rows) as here:
            tile = replace(
                t,
                a=t.a + (here * t.a_row + t.a_skip * rows),
                y=t.y + here * t.y_row,
                residual=emit_moved(own, t.residual, here * t.residual_row),
                ahead=t.ahead + (number + (here - begin) // rows) * t.ahead_tile,
            )
            _emit_body(own, tile, rows, [own] * whole + last)

    return e.function(f"tile_{rows}x{parts}", (POINTER, INT, INT, INT), emit)


def _emit_body(e: Emitter, t: Tile, rows: int, vectors: list[Emitter]) -> None:
    """`vectors` are the emitters of the vectors of a row, the last of which may be narrower."""
    before, last = (len(vectors) - 1) * e.width, vectors[-1]
    full, mask = t.columns >= before + last.width, last.lanes(t.columns - before)
    sums = [[own.variable(0.0) for own in vectors] for _ in range(rows)]
    # Prefetch the rows of the result before the sums begin. If the product is long enough, its loop
    # prefetches these rows one by one instead (`emit_product`).
    with e.when(((t.mode & FINAL) != 0) & (t.segment < unrolled(e) * rows)):
        places = [(i, j * e.width) for i in range(rows) for j in lines(e, len(vectors))]
        for i, column in places:
            e.prefetch(t.y + (t.y_row * i + column), write=True)
        with e.when(t.residual != 0):
            for i, column in places:
                e.prefetch(t.residual.floats() + (t.residual_row * i + column))
    e.branch(
        (t.mode & ADD) != 0,
        lambda: _start_from_y(e, t, sums, full, mask),
        lambda: _start_from_bias(t, sums),
    )
    emit_product(e, t, sums)
    with e.when((t.mode & FINAL) != 0):
        _finish(e, t, sums, full, mask)
    for part in (None, mask):
        with e.when(full if part is None else ~full):
            _each(e, sums, t.y, t.y_row, part, lambda v, p, m: v.emitter.store(v.value, p, m))


def _each(
    e: Emitter,
    sums: Accumulators,
    base: Value,
    row: Value,
    mask: Value | None,
    act: Callable[[Variable, Value, Value | None], None],
) -> None:
    """Do `act` to each accumulator and its place in memory; `mask` is for the last column."""
    for i, line in enumerate(sums):
        here = base + row * i
        for j, variable in enumerate(line):
            act(variable, here + j * e.width, mask if j == len(line) - 1 else None)


def _start_from_bias(t: Tile, sums: Accumulators) -> None:
    place = t.bias
    for column in zip(*sums, strict=True):
        own = column[0].emitter
        bias = own.load(place)
        for variable in column:
            variable.value = bias
        place = place + own.width


def _start_from_y(e: Emitter, t: Tile, sums: Accumulators, full: Value, mask: Value) -> None:
    def begin(variable: Variable, place: Value, part: Value | None) -> None:
        variable.value = variable.emitter.load(place, part)

    for part in (None, mask):
        with e.when(full if part is None else ~full):
            _each(e, sums, t.y, t.y_row, part, begin)


def _finish(e: Emitter, t: Tile, sums: Accumulators, full: Value, mask: Value) -> None:
    def add(variable: Variable, place: Value, part: Value | None) -> None:
        variable.value = variable.value + variable.emitter.load(place, part)

    with e.when(t.residual != 0):
        base = t.residual.floats()
        for part in (None, mask):
            with e.when(full if part is None else ~full):
                _each(e, sums, base, t.residual_row, part, add)
    # Most layers have no bound, or a lower one alone: a branch is cheaper than to clamp in vain.
    low, high = e.float_of_bits(t.low), e.float_of_bits(t.high)
    every = [variable for line in sums for variable in line]
    with e.when(high < float("inf")):
        for variable in every:
            variable.value = variable.emitter.min(high, variable.value)
    with e.when(low > float("-inf")):
        for variable in every:
            variable.value = variable.emitter.max(low, variable.value)
