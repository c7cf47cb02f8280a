"""Products of many small matrices, as attention over channels and linear attention have them.

    x, height x inputs    (its rows and columns      factors, inputs x outputs    y
    +------------+         lie at any distances)     +------------------+
    | 4 rows     |  ------------------------------>  | vectors of a row |  -->  4 rows x 2 vectors
    +------------+   broadcast, one number of each   +------------------+       of sums in registers

Nothing is packed: such matrices are small, and each is used once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from ..language.compiler import Args, Kernel
from ..language.loops import Place, each_block
from ..language.values import Value
from ..language.vectors import Emitter
from ..tape.steps import Step, View, held, step

_ROWS = 4
"""Rows that are computed together, for each row of the factors that is read."""
_VECTORS = 2


@dataclass(frozen=True, eq=False)
class Lying:
    """Where matrices lie in a view, in floats: the first number of each, and the distances between
    rows and between columns."""

    places: Tensor
    row: int
    column: int


def batched_step(
    x: View, factors: View, y: View, *, x_lies: Lying, factors_lie: Lying, inputs: int
) -> Step:
    """y = x @ factors for each matrix; a row of `y` is a pixel. Rows of `factors` have no gaps."""
    matrices = x_lies.places.numel()
    height, outputs = y.pixels // matrices, y.shape[1]
    ends = [(height - 1) * x_lies.row, (inputs - 1) * x_lies.column]
    rows = (inputs - 1) * factors_lie.row
    return step(
        BATCHED,
        x=x,
        x_places=held(
            x_lies.places,
            x.floats,
            before=sum(min(0, end) for end in ends),
            behind=1 + sum(max(0, end) for end in ends),
        ),
        x_row=x_lies.row,
        x_column=x_lies.column,
        factors=factors,
        factors_places=held(
            factors_lie.places,
            factors.floats,
            before=min(0, rows),
            behind=max(0, rows) + outputs,
        ),
        factors_row=factors_lie.row,
        matrices=matrices,
        height=height,
        inputs=inputs,
        outputs=outputs,
        y=y,
        y_pixel=y.pixel,
    )


def _emit(e: Emitter, a: Args, thread: Value, threads: Value) -> None:
    blocks = (a.height + (_ROWS - 1)) // _ROWS
    begin, end = e.share(a.matrices * blocks, thread, threads)
    with e.range(begin, end) as unit:
        matrix, first = unit // blocks, unit % blocks * _ROWS
        rows = e.min(a.height - first, e.i64(_ROWS))
        e.branch(
            rows == _ROWS,
            lambda: _emit_rows(e, a, matrix, first, _ROWS),
            lambda: _emit_single(e, a, matrix, first),
        )


def _emit_single(e: Emitter, a: Args, matrix: Value, first: Value) -> None:
    with e.range(first, a.height) as row:
        _emit_rows(e, a, matrix, row, 1)


def _emit_rows(e: Emitter, a: Args, matrix: Value, first: Value, rows: int) -> None:
    place = partial(_place, e, matrix)
    x = a.x.floats() + (place(a.x_places) + first * a.x_row)
    factors = a.factors.floats() + place(a.factors_places)
    target = a.y.floats() + (matrix * a.height + first) * a.y_pixel

    def columns(places: list[Place]) -> None:
        sums = [[e.variable(0.0) for _ in places] for _ in range(rows)]
        with e.range(0, a.inputs) as k:
            line = factors + k * a.factors_row
            values = [e.load(line + column, mask) for column, mask in places]
            for number, of_row in enumerate(sums):
                one = e.broadcast(e.read(x + (k * a.x_column + a.x_row * number)))
                for total, value in zip(of_row, values, strict=True):
                    total.value = e.fma(one, value, total.value)
        for number, of_row in enumerate(sums):
            for total, (column, mask) in zip(of_row, places, strict=True):
                e.store(total.value, target + (a.y_pixel * number + column), mask)

    each_block(e, a.outputs, _VECTORS, columns)


def _place(e: Emitter, matrix: Value, table: Value) -> Value:
    return e.read(table.integers() + matrix)


BATCHED = Kernel(
    "batched",
    (
        *("x", "x_places", "x_row", "x_column", "factors", "factors_places", "factors_row"),
        *("matrices", "height", "inputs", "outputs", "y", "y_pixel"),
    ),
    _emit,
)
