"""The register-tiled matrix product on which every convolution here stands.

`rows` x `vectors` accumulators stay in registers while the inner dimension runs. What is multiplied
was packed for it:

- rows of activations, in chunks as long as a vector: [k / width][row][width]. Within a chunk every
  row is at a constant distance, so one pointer register addresses them all, and rows that are a
  power of two apart in the tensor do not fall onto one set of the cache. The inner dimension may
  come in segments that each begin with a chunk of their own, so that packing copies whole vectors;
- weights, in panels: [k][vectors * width]; the last panel is as many vectors wide as it needs, and
  filled with zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .compiler import Args, Kernel
from .isa import Isa
from .loops import emit_vectors
from .values import INT, POINTER, Value, Variable
from .vectors import Emitter

ADD = 1
"""Mode: the accumulators start from what `y` holds, instead of from the bias."""
FINAL = 2
"""Mode: add the residual, then clamp; otherwise the sums are stored as they are."""

_UNROLL = 4
_AHEAD = 2048
"""How many floats before its use a weight is asked for: what comes from far away takes that long,
and what the processor itself fetches ahead ends with each page.
"""


FIELDS = (
    "a",
    "b",
    "k",
    "segments",
    "y",
    "y_row",
    "start",
    "residual",
    "residual_row",
    "low",
    "high",
    "mode",
    "columns",
    "ahead",
    "ahead_row",
    "ahead_rows",
    "rows",
)
"""y = clamp(start + a @ b + residual) for `rows` rows and a panel of weights.

The inner dimension is `segments` times `k`. `a`, `b`, `y`, `start` (the bias) and `residual` (0 for
none) are addresses. `columns` may be fewer than the panel holds; then only those of `y` and
`residual` are read and written, and the last vector is as wide as they need. Meanwhile what is
packed next is asked for: `ahead_rows` rows of `segments` times `k` floats from `ahead` on,
`ahead_row` apart; none if the caller sets nothing.
"""


def _emit(e: Emitter, a: Args, thread: Value, threads: Value) -> None:
    del thread, threads
    given = [getattr(a, name) for name in FIELDS[:-1]]

    def of_width(parts: int) -> Callable[[], None]:
        cases = {
            rows: (lambda rows=rows: _tile_function(e, rows, parts)(*given))
            for rows in range(1, e.isa.rows + 1)
        }
        return lambda: e.switch(a.rows, cases)

    parts = (a.columns + (e.isa.least - 1)) // e.isa.least
    most = panel_columns(e.isa) // e.isa.least
    e.switch(parts, {number: of_width(number) for number in range(1, most + 1)})


TILE = Kernel("tile", FIELDS, _emit)


class TileCall:
    """Calls `TILE` from within another kernel, through its address and a block on the stack."""

    def __init__(self, e: Emitter, address: Value) -> None:
        self._e, self._address = e, address
        self._block = e.stack(len(FIELDS), INT)
        self.set(ahead_rows=0)

    def __call__(self, **given: Any) -> None:
        """Set the fields that changed since the last call, and call."""
        self.set(**given)
        zero = self._e.i64(0)
        self._e.call(self._address, None, (self._block.address(), zero, zero))

    def set(self, **given: Any) -> None:
        for name, value in given.items():
            plain = value.address() if isinstance(value, Value) and value.element else value
            self._e.write(plain, self._block + FIELDS.index(name))


def panel_columns(isa: Isa) -> int:
    """How many output channels a full panel of weights covers."""
    return isa.vectors * isa.width


@dataclass(frozen=True)
class Tile:
    """The fields of one call, with addresses as pointers."""

    a: Value
    b: Value
    k: Value
    segments: Value
    y: Value
    y_row: Value
    start: Value
    residual: Value
    residual_row: Value
    low: Value
    high: Value
    mode: Value
    columns: Value
    ahead: Value
    ahead_row: Value
    ahead_rows: Value


_KINDS = (POINTER, POINTER, INT, INT, POINTER, INT, POINTER, *[INT] * 6, POINTER, INT, INT)


def _tile_function(e: Emitter, rows: int, parts: int) -> Callable[..., None]:
    """The function for `rows` rows and `parts` times the least columns that a vector may have."""

    def emit(own: Emitter, *values: Value) -> None:
        whole, rest = divmod(parts * e.isa.least, e.width)
        last = [own.of_width(rest)] if rest else []
        _emit_body(own, Tile(*values), rows, [own] * whole + last)

    def call(*given: Value) -> None:
        pairs = zip(given, _KINDS, strict=True)
        inner(*(v.floats() if kind == POINTER else v for v, kind in pairs))

    inner = e.function(f"tile_{rows}x{parts}", _KINDS, emit)
    return call


Accumulators = list[list[Variable]]


def _emit_body(e: Emitter, t: Tile, rows: int, vectors: list[Emitter]) -> None:
    """`vectors` are the emitters of the vectors of a row, the last of which may be narrower."""
    before, last = (len(vectors) - 1) * e.width, vectors[-1]
    full, mask = t.columns >= before + last.width, last.lanes(t.columns - before)
    sums = [[own.variable(0.0) for own in vectors] for _ in range(rows)]
    with e.when((t.mode & FINAL) != 0):
        _each(e, sums, t.y, t.y_row, None, lambda v, p, m: e.prefetch(p, write=True))
        with e.when(t.residual != 0):
            base = t.residual.floats()
            _each(e, sums, base, t.residual_row, None, lambda v, p, m: e.prefetch(p))
    e.branch(
        (t.mode & ADD) != 0,
        lambda: _start_from_y(e, t, sums, full, mask),
        lambda: _start_from_bias(t, sums),
    )
    _emit_product(e, t, sums)
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
    start = t.start
    for column in zip(*sums, strict=True):
        own = column[0].emitter
        bias = own.load(start)
        for variable in column:
            variable.value = bias
        start = start + own.width


def _start_from_y(e: Emitter, t: Tile, sums: Accumulators, full: Value, mask: Value) -> None:
    def begin(variable: Variable, place: Value, part: Value | None) -> None:
        variable.value = variable.emitter.load(place, part)

    for part in (None, mask):
        with e.when(full if part is None else ~full):
            _each(e, sums, t.y, t.y_row, part, begin)


def _emit_product(e: Emitter, t: Tile, sums: Accumulators) -> None:
    rows, columns, width = len(sums), len(sums[0]) * e.width, e.width
    chunks, rest = t.k // width, t.k % width
    chunk_floats, unroll = rows * width, min(_UNROLL, width)
    segment_floats = emit_vectors(e, t.k) * chunk_floats
    with e.range(0, t.segments) as segment:
        a, b = t.a + segment * segment_floats, t.b + segment * t.k * columns
        with e.range(0, chunks) as chunk:
            here, weights = a + chunk * chunk_floats, b + chunk * (width * columns)
            with e.range(0, t.ahead_rows) as row:
                place = row * t.ahead_row + segment * t.k + chunk * width
                e.prefetch(t.ahead + place, level=2)
            for first, part in _of_one_width(sums):
                with e.range(0, width, unroll) as i:
                    _emit_steps(
                        e, here + i, weights + (i * columns + first), (part, columns), unroll
                    )
        here, weights = a + chunks * chunk_floats, b + chunks * (width * columns)
        with e.range(0, rest) as i:
            for first, part in _of_one_width(sums):
                _emit_steps(e, here + i, weights + (i * columns + first), (part, columns), 1)


def _of_one_width(sums: Accumulators) -> list[tuple[int, Accumulators]]:
    """The whole vectors, and apart from them a narrower last one; with the first column of each.

    Two widths in one loop would share a broadcast, and for that LLVM runs out of registers.
    """
    emitters = [variable.emitter for variable in sums[0]]
    last = len(emitters) - (emitters[-1].width < emitters[0].width)
    parts = [(0, [line[:last] for line in sums])]
    if last < len(emitters):
        parts.append((last * emitters[0].width, [line[last:] for line in sums]))
    return parts


def _emit_steps(
    e: Emitter, a: Value, b: Value, panel: tuple[Accumulators, int], steps: int
) -> None:
    sums, columns = panel
    for step in range(steps):
        places = [b + (step * columns + j * e.width) for j in range(len(sums[0]))]
        for place in places:
            e.prefetch(place + _AHEAD, level=2)
        weights = [one.emitter.load(p) for one, p in zip(sums[0], places, strict=True)]
        for i, line in enumerate(sums):
            factor = e.read(a + (i * e.width + step))
            for variable, weight in zip(line, weights, strict=True):
                variable.value = variable.emitter.fma(factor, weight, variable.value)


def _finish(e: Emitter, t: Tile, sums: Accumulators, full: Value, mask: Value) -> None:
    def add(variable: Variable, place: Value, part: Value | None) -> None:
        variable.value = variable.value + variable.emitter.load(place, part)

    with e.when(t.residual != 0):
        base = t.residual.floats()
        for part in (None, mask):
            with e.when(full if part is None else ~full):
                _each(e, sums, base, t.residual_row, part, add)
    low, high = e.float_of_bits(t.low), e.float_of_bits(t.high)
    for line in sums:
        for variable in line:
            own = variable.emitter
            variable.value = own.max(low, own.min(high, variable.value))
