"""The inner loops of the micro-kernel: rows of activations by a panel of weights, in registers.

The loop runs over chunks, as long as a vector, and unrolls as many steps of a chunk as make about a
hundred multiply-adds. Besides multiplying it asks for what comes next, a little with each turn:

- weights `_AHEAD` floats further on, while those here are used: a panel is read once per tile from
  the second-level cache, and once per block of rows from further away;
- a row of the result and of the residual, which are stored and added when the sums are complete;
- with each chunk, a part of what the caller needs after this panel (`Tile.ahead`).

A panel may end with a narrow vector, half as wide. In a wide register half of the lanes would do
nothing, so there a register holds two sums of each column (`_Half`):

    whole        w0 w1 w2 w3 w4 w5 w6 w7        sums of eight columns

    half         w0 v0 w1 v1 w2 v2 w3 v3        of four: w is the weight of one step, v of the next,
               x a0 a1 a0 a1 a0 a1 a0 a1        and the numbers they are multiplied by take turns
"""

from __future__ import annotations

from dataclasses import dataclass

from ..language.loops import emit_vectors
from ..language.values import Value
from ..language.vectors import Emitter, Variable

_LINE = 16
"""Floats in a line of the cache."""
_AHEAD = 2048
"""How many floats ahead a weight is prefetched: two pages of memory. Memory takes that long to
answer, and the processor itself foresees reads only up to the end of a page.
"""

Accumulators = list[list[Variable]]
"""Row by row, the vectors of a tile."""


@dataclass(frozen=True)
class Tile:
    """The fields of one call, with addresses as pointers."""

    a: Value
    a_row: Value
    a_skip: Value
    b: Value
    segment: Value
    segments: Value
    columns: Value
    y: Value
    y_row: Value
    bias: Value
    residual: Value
    residual_row: Value
    low: Value
    high: Value
    mode: Value
    ahead: Value
    ahead_tile: Value
    ahead_row: Value
    ahead_rows: Value


def unrolled(e: Emitter) -> int:
    """Steps of the inner dimension in one turn of the loop."""
    return min(e.width, 112 // (e.isa.rows * e.isa.vectors))


def lines(e: Emitter, vectors: int) -> range:
    """The numbers of the vectors, of some side by side, with which a line of the cache begins."""
    return range(0, vectors, max(1, _LINE // e.width))


def emit_product(e: Emitter, t: Tile, sums: Accumulators) -> None:
    """Add the products of `t.segments` segments of packed rows with the panel to `sums`."""
    rows, columns, width = len(sums), len(sums[0]) * e.width, e.width
    chunks, rest = t.segment // width, t.segment % width
    chunk_floats, unroll = rows * width, unrolled(e)
    segment_floats = emit_vectors(e, t.segment) * chunk_floats
    parts = _parts(e, sums, columns)
    with e.range(0, t.segments) as segment:
        a, b = t.a + segment * segment_floats, t.b + segment * t.segment * columns
        with e.range(0, chunks) as chunk:
            here, weights = a + chunk * chunk_floats, b + chunk * (width * columns)
            with e.range(0, t.ahead_rows) as row:
                place = row * t.ahead_row + segment * t.segment + chunk * width
                e.prefetch(t.ahead + place, level=2)
            for part in parts:
                with e.range(0, width, unroll) as i:
                    turn = (chunk * width + i) // unroll
                    if part is parts[0]:
                        with e.when(turn < rows):
                            _fetch_result(e, t, turn, len(sums[0]))
                    part.add(here + i, weights + i * columns, unroll)
        here, weights = a + chunks * chunk_floats, b + chunks * (width * columns)
        whole = rest // unroll * unroll
        for part in parts:
            if unroll < width:
                with e.range(0, whole, unroll) as i:
                    part.add(here + i, weights + i * columns, unroll)
            with e.range(whole, rest) as i:
                part.add(here + i, weights + i * columns, 1)
    for part in parts:
        part.finish()


def _fetch_result(e: Emitter, t: Tile, row: Value, vectors: int) -> None:
    """Ask for a row of the result and of the residual: all at once would hold up other loads.

    Where nothing is added the result is asked for twice, which costs less than a branch.
    """
    added = t.residual != 0
    other = e.select(added, t.residual, t.y.address()).floats()
    other_row = e.select(added, t.residual_row, t.y_row)
    for j in lines(e, vectors):
        e.prefetch(t.y + (row * t.y_row + j * e.width), write=True)
        e.prefetch(other + (row * other_row + j * e.width))


def _parts(e: Emitter, sums: Accumulators, columns: int) -> list[_Whole | _Half]:
    """The whole vectors, and apart from them a narrower last one.

    Two widths in one loop would share a broadcast, and for that LLVM runs out of registers.
    """
    emitters = [variable.emitter for variable in sums[0]]
    last = len(emitters) - (emitters[-1].width < e.width)
    parts: list[_Whole | _Half] = []
    if last:
        parts.append(_Whole(e, [line[:last] for line in sums], columns))
    if last < len(emitters):
        parts.append(_Half(e, [line[last] for line in sums], columns, last * e.width))
    return parts


@dataclass(frozen=True)
class _Whole:
    """Sums in whole vectors, with which a row of the panel begins."""

    e: Emitter
    sums: Accumulators
    columns: int

    def add(self, a: Value, b: Value, steps: int) -> None:
        """Add `steps` products to each sum."""
        e = self.e
        for step in range(steps):
            places = [b + (step * self.columns + j * e.width) for j in range(len(self.sums[0]))]
            # With one vector a turn has a load for each of its few products: no time to prefetch.
            for j in lines(e, len(places)) if len(places) > 1 else ():
                e.prefetch(places[j] + _AHEAD, level=2)
            weights = [e.load(place) for place in places]
            for i, line in enumerate(self.sums):
                factor = e.read(a + (i * e.width + step))
                for variable, weight in zip(line, weights, strict=True):
                    variable.value = e.fma(factor, weight, variable.value)
                # Else LLVM reads all numbers first, and has no registers left for the sums.
                if e.isa.tight:
                    a = e.after(a, [variable.value for variable in line])

    def finish(self) -> None:
        """Do nothing: this product has no remainder."""


class _Half:
    """Sums of half a vector of columns, two for each: of even steps and of odd ones, side by side.

    Both halves of the register work; in the end the two sums of a column are added.
    """

    def __init__(self, e: Emitter, sums: list[Variable], columns: int, first: int) -> None:
        self._e, self._sums, self._columns, self._first = e, sums, columns, first
        zero = sums[0].emitter.vector(0.0)
        self._pairs = [e.variable(0.0) for _ in sums]
        for pair, one in zip(self._pairs, sums, strict=True):
            pair.value = self._in_turns(one.value, zero)

    def add(self, a: Value, b: Value, steps: int) -> None:
        """Add `steps` products to each sum: an even number, or one."""
        e, narrow = self._e, self._sums[0].emitter
        first = b + self._first
        weights = [narrow.load(first + step * self._columns) for step in range(steps)]
        if steps == 1:
            self._add_one(a, self._in_turns(weights[0], weights[0]))
        for step in range(0, steps - 1, 2):
            both = self._in_turns(*weights[step : step + 2])
            for i, pair in enumerate(self._pairs):
                factors = e.pair(a + (i * e.width + step))
                pair.value = e.fma(factors, both, pair.value)
                # LLVM must finish a row before the next, and not keep its factors for later.
                a = e.after(a, [pair.value, factors])

    def _add_one(self, a: Value, weights: Value) -> None:
        """Add the product of one step to the even sums; the odd ones stay as they are."""
        e = self._e
        for i, pair in enumerate(self._pairs):
            added = e.fma(e.read(a + i * e.width), weights, pair.value)
            kept = [lane + lane % 2 * e.width for lane in range(e.width)]
            pair.value = e.shuffle(added, kept, pair.value)

    def finish(self) -> None:
        """Add even and odd sums, and leave the result in the narrow variables."""
        for pair, one in zip(self._pairs, self._sums, strict=True):
            even, odd = (self._e.shuffle(pair.value, range(i, self._e.width, 2)) for i in (0, 1))
            one.value = even + odd

    def _in_turns(self, even: Value, odd: Value) -> Value:
        half = self._e.width // 2
        lanes = [lane for n in range(half) for lane in (n, half + n)]
        return self._e.shuffle(even, lanes, odd)
