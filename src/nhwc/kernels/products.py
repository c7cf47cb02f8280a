"""The inner loops of the micro-kernel: rows of activations by a panel of weights, in registers."""

from __future__ import annotations

from dataclasses import dataclass

from .loops import emit_vectors
from .values import Value, Variable
from .vectors import Emitter

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
    k: Value
    segments: Value
    columns: Value
    y: Value
    y_row: Value
    start: Value
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
    chunks, rest = t.k // width, t.k % width
    chunk_floats, unroll = rows * width, unrolled(e)
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
                    if not first:
                        _fetch_result(e, t, sums, (chunk * width + i) // unroll)
                    _emit_steps(
                        e, here + i, weights + (i * columns + first), (part, columns), unroll
                    )
        here, weights = a + chunks * chunk_floats, b + chunks * (width * columns)
        for first, part in _of_one_width(sums):
            with e.range(0, rest) as i:
                _emit_steps(e, here + i, weights + (i * columns + first), (part, columns), 1)


def _fetch_result(e: Emitter, t: Tile, sums: Accumulators, row: Value) -> None:
    """Ask for a row of the result and of the residual: all at once would hold up other loads."""
    row = e.min(row, len(sums) - 1)
    added = t.residual != 0
    other = e.select(added, t.residual, t.y.address()).floats()
    other_row = e.select(added, t.residual_row, t.y_row)
    for j in lines(e, len(sums[0])):
        e.prefetch(t.y + (row * t.y_row + j * e.width), write=True)
        e.prefetch(other + (row * other_row + j * e.width))


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
        for j in lines(sums[0][0].emitter, len(places)):
            e.prefetch(places[j] + _AHEAD, level=2)
        weights = [one.emitter.load(p) for one, p in zip(sums[0], places, strict=True)]
        for i, line in enumerate(sums):
            factor = e.read(a + (i * e.width + step))
            for variable, weight in zip(line, weights, strict=True):
                variable.value = variable.emitter.fma(factor, weight, variable.value)
            if e.isa.tight:
                a = e.after(a, [variable.value for variable in line])
