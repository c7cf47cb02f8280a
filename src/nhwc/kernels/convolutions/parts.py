"""How the work of a convolution is cut: output pixels, panels of filters, the inner dimension.

    output pixels                 panels                      inner dimension
    +----+----+----+----+         +------+------+------+      +---------+---------+
    | row_parts: blocks |    x    | column_parts       |  of  | segments          |
    +----+----+----+----+         +------+------+------+      +---------+---------+

- a block has at most `_MOST_ROWS` rows, which is where reading a panel costs little beside
  multiplying by it, and what is multiplied of it in one go fits, packed, into a part of the
  second-level cache, as each panel reads all of that again;
- where pixels are few and filters many (the last layers of a network), threads share out panels
  instead. Then every thread packs all pixels, which is little, and no weight is fetched twice;
- groups are units of their own, and where there are enough of them panels are not cut.

Of a dilated filter each row has segments of its own, so that a block can leave out rows.

A product deeper than `_DEEPEST` is cut into segments: first all panels multiply the first segments
and leave their sums in the result, then they add the next ones (`ADD`), and the last ones finish
(`FINAL`: residual and clamp). So the part of a panel that is in use stays cached for all tiles.
"""

from __future__ import annotations

from typing import NamedTuple

from ...machine.environment import second_level_bytes
from ..language.isa import Isa
from ..tape.steps import View
from .spec import ConvSpec

ALL, INPUT, PRODUCTS = range(3)
"""The field `phase`: everything block by block, or only the half before or after a barrier."""

_MOST_ROWS = 112
"""How many rows a block may have: from there on, reading a panel of weights costs little."""
PIECES = 6
"""How many pieces of work each thread should have, so that the faster one can help the slower:
where there are rows for so many, blocks of half as many rows will do.
"""
_ROWS_BYTES = 256 << 10
"""What the packed rows of one block may take at least, or a quarter of the second-level cache."""
_DEEPEST = 2048
"""How deep a product may be in one go: then the panel stays there as well, beside the rows."""


_FAR_APART = 4
"""From this dilation on, whole blocks of pixels see only padding under some rows of a filter."""


class Parts(NamedTuple):
    """How many parts the output pixels are cut into, and the panels of each group."""

    rows: int
    columns: int


def split(spec: ConvSpec, panels: int, isa: Isa, threads: int, at_once: int) -> Parts:
    """The cut of a convolution into units of work, whose products are `at_once` deep in one go.

    A part of pixels is small enough to stay in the cache when packed. Pixels so few that the
    weights outweigh them are not cut: each thread takes panels of its own, and no two fetch the
    same weights from memory.
    """
    depth = isa.padded(min(spec.depth, at_once))
    cached = max(_ROWS_BYTES, second_level_bytes() // 4)
    fitting = max(isa.rows, min(_MOST_ROWS // isa.rows * isa.rows, cached // (4 * depth)))
    fair = -(-spec.pixels // (threads * PIECES))
    if fair >= _MOST_ROWS // 2:
        fitting = min(fitting, fair)
    parts = -(-spec.pixels // fitting)
    if spec.groups >= threads:
        return Parts(parts, 1)
    if outweighs(spec.k, spec.pixels):
        return Parts(1, min(panels, threads))
    if spec.pixels < isa.rows * threads:
        return Parts(parts, min(panels, threads))
    return Parts(-(-parts // threads) * threads, 1)


def outweighs(columns: int, rows: int) -> bool:
    """Whether threads should share out `columns` of weights rather than the rows they multiply.

    They should where the rows, which each thread then reads, are little beside the weights.
    """
    return columns >= 16 * rows


class Segments(NamedTuple):
    """The length of a segment, how many there are, and how many are multiplied in one go.

    `of_row` is how many a row of the filter has, where rows that see only padding are left out.
    """

    segment: int
    segments: int
    at_once: int
    of_row: int = 0


def segments_of(spec: ConvSpec, x: View, isa: Isa) -> Segments:
    """The cut of the inner dimension, so short that a panel of weights stays in the cache.

    Where c fills whole vectors any cut between them will do. Else each run of taps is a segment, as
    its last chunk is not full, and several are multiplied in one go.
    """
    c = spec.c // spec.groups
    if c % isa.width:
        segment = run_of(spec, x) * c
        return Segments(segment, spec.depth // segment, max(1, _DEEPEST // segment))
    if spec.r > 1 and spec.dilation[0] >= _FAR_APART and spec.frames.t == 1:
        row = spec.depth // spec.r
        of_row = _cuts(row, isa)
        segment = row // of_row
        return Segments(segment, spec.r * of_row, max(1, _DEEPEST // segment), of_row)
    cuts = _cuts(spec.depth, isa)
    return Segments(spec.depth // cuts, cuts, 1)


def _cuts(depth: int, isa: Isa) -> int:
    """Into how many equal segments of whole vectors to cut a product."""
    vectors = depth // isa.width
    cuts = next(n for n in range(-(-depth // _DEEPEST), vectors + 1) if vectors % n == 0)
    # A prime number of vectors can be cut only into single ones: then rather not at all.
    return cuts if depth // cuts > _DEEPEST // 4 else 1


def run_of(spec: ConvSpec, x: View) -> int:
    """How many taps of a row of the filter lie side by side in memory."""
    c = spec.c // spec.groups
    return spec.s if x.pixel == c and spec.dilation[1] == 1 else 1
