"""The inner loops of the micro-kernel: rows of activations by a panel of weights, in registers."""

from __future__ import annotations

from dataclasses import dataclass

from ..language.loops import emit_vectors
from ..language.values import Value
from ..language.vectors import Emitter, Variable

_LINE = 16
"""Floats in a line of the cache."""
_AHEAD = 2048
"""How many floats before its use a weight is asked for: what comes from far away takes that long,
and what the processor itself fetches ahead ends with each page.
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
    """Products of a row between one and the next time that the loop comes around."""
    return min(e.width, 112 // (e.isa.rows * e.isa.vectors))


def lines(e: Emitter, vectors: int) -> range:
    """Those of so many vectors side by side with which a line of the cache begins."""
    return range(0, vectors, max(1, _LINE // e.width))


def emit_product(e: Emitter, t: Tile, sums: Accumulators) -> None:
    """Add to `sums` what `t.segments` segments of packed rows make with the panel."""
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
                    if part is parts[0]:
                        _fetch_result(e, t, sums, (chunk * width + i) // unroll)
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


def _fetch_result(e: Emitter, t: Tile, sums: Accumulators, row: Value) -> None:
    """Ask for a row of the result and of the residual: all at once would hold up other loads."""
    row = e.min(row, len(sums) - 1)
    added = t.residual != 0
    other = e.select(added, t.residual, t.y.address()).floats()
    other_row = e.select(added, t.residual_row, t.y_row)
    for j in lines(e, len(sums[0])):
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
        """Add so many products to each sum."""
        e = self.e
        for step in range(steps):
            places = [b + (step * self.columns + j * e.width) for j in range(len(self.sums[0]))]
            # Weights of one vector are few, and each product reads a number besides: no time to.
            for j in lines(e, len(places)) if len(places) > 1 else ():
                e.prefetch(places[j] + _AHEAD, level=2)
            weights = [e.load(place) for place in places]
            for i, line in enumerate(self.sums):
                factor = e.read(a + (i * e.width + step))
                for variable, weight in zip(line, weights, strict=True):
                    variable.value = e.fma(factor, weight, variable.value)
                if e.isa.tight:
                    a = e.after(a, [variable.value for variable in line])

    def finish(self) -> None:
        """The sums are what they should be."""


class _Half:
    """Sums in half a vector. In a whole one they lie in every second lane, and beside each is
    another sum, of every second product: so no lane is idle. In the end the two are added.
    """

    def __init__(self, e: Emitter, sums: list[Variable], columns: int, first: int) -> None:
        self._e, self._sums, self._columns, self._first = e, sums, columns, first
        zero = sums[0].emitter.vector(0.0)
        self._pairs = [e.variable(0.0) for _ in sums]
        for pair, one in zip(self._pairs, sums, strict=True):
            pair.value = self._in_turns(one.value, zero)

    def add(self, a: Value, b: Value, steps: int) -> None:
        """Add so many products: an even number, or one."""
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
                # All at once, or into the registers of the factors, LLVM would run out of them.
                a = e.after(a, [pair.value, factors])

    def _add_one(self, a: Value, weights: Value) -> None:
        e = self._e
        for i, pair in enumerate(self._pairs):
            added = e.fma(e.read(a + i * e.width), weights, pair.value)
            kept = [lane + lane % 2 * e.width for lane in range(e.width)]
            pair.value = e.shuffle(added, kept, pair.value)

    def finish(self) -> None:
        """Bring the sums where they belong."""
        for pair, one in zip(self._pairs, self._sums, strict=True):
            even, odd = (self._e.shuffle(pair.value, range(i, self._e.width, 2)) for i in (0, 1))
            one.value = even + odd

    def _in_turns(self, even: Value, odd: Value) -> Value:
        half = self._e.width // 2
        lanes = [lane for n in range(half) for lane in (n, half + n)]
        return self._e.shuffle(even, lanes, odd)
