"""Products of batches of matrices, and sums and products with one number for each row."""

from __future__ import annotations

import math
import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ...kernels.layers.batched import Lying, batched_step
from ...kernels.layers.elementwise import pixel_step
from ...kernels.programs.builder import Buffer, Builder
from ...kernels.programs.moved import (
    Moved,
    RowsInOrder,
    as_rows,
    from_rows,
    in_order,
    rows_anyhow,
    runs_on,
    settled_rows,
)
from ...kernels.tape.steps import Step, View
from ..implementation import Implementation
from ..recording import Record
from ..specs import Layer
from .rows import as_it_lies, pointwise


@dataclass(frozen=True, eq=False)
class _Matrices:
    """Matrices in a buffer: the pixel and channel where each begins, and how many of both it is
    from one row, and from one column, to the next."""

    buffer: Buffer
    pixels: Tensor
    channels: Tensor
    row: tuple[int, int]
    column: tuple[int, int]

    def lie(self, view: View) -> Lying:
        row, column = (pixels * view.pixel + more for pixels, more in (self.row, self.column))
        return Lying(self.pixels * view.pixel + self.channels, row, column)


def matrix_product(
    record: Record, layer: Layer, *, transposed: bool = False
) -> Implementation | None:
    """`matmul` of matrices in any number of batches, or of a vector; `linear` if `transposed`."""
    nodes = layer.given
    if len(nodes) != 2 or not {*nodes} <= {*layer.inputs}:
        return None
    out = record.values[layer.node].shape
    places = [layer.inputs.index(node) for node in nodes]

    def emit(builder: Builder, constants: None, *given: Moved) -> Moved:
        left, right = (given[place].where for place in places)
        right = right.t() if transposed else right
        left = left[None] if left.ndim == 1 else left
        right = right[:, None] if right.ndim == 1 else right
        if right.ndim == 2:
            # One matrix for all rows, whichever batch they are of.
            left, right = left.reshape(1, -1, left.shape[-1]), right[None]
        batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])
        x, factors = (
            Moved(given[place].buffer, where.expand(*batch, -1, -1).flatten(0, -3))
            for place, where in zip(places, (left, right), strict=True)
        )
        turned = [Moved(one.buffer, one.where.transpose(1, 2)) for one in (x, factors)]
        if _gathered(turned[0]) < _gathered(factors):
            # The transposed product gathers less: its result is turned on paper.
            made = _product(builder, turned[1], turned[0])
            return Moved(made.buffer, made.where.transpose(1, 2).reshape(out))
        made = _product(builder, x, factors)
        return Moved(made.buffer, made.where.reshape(out))

    return as_it_lies(record, layer, emit)


def pair_product(record: Record, layer: Layer) -> Implementation | None:
    """`einsum` of two tensors: batches of matrices, whose dimensions are put in order on paper."""
    text, nodes = layer.node.args[0], layer.given
    out = record.values[layer.node].shape
    if len(nodes) != 2 or not {*nodes} <= {*layer.inputs} or layer.node.kwargs:
        return None
    ranks = [len(record.values[node].shape) for node in nodes]
    found = _pair_of(_spelled(text, ranks)) if isinstance(text, str) else None
    if found is None:
        return None
    places = [layer.inputs.index(node) for node in nodes]
    shapes = [record.values[node].shape for node in nodes]
    if [*map(len, shapes)] != [len(found.left), len(found.right)]:
        return None
    sizes = dict(zip(found.left + found.right, shapes[0] + shapes[1], strict=True))
    if shapes != [tuple(sizes[one] for one in part) for part in (found.left, found.right)]:
        return None
    count = lambda letters: math.prod(sizes[one] for one in letters)
    batch, rows, inner, columns = found.kinds
    order = batch + rows + columns

    def emit(builder: Builder, constants: None, *given: Moved) -> Moved:
        x, factors = (given[place] for place in places)
        x = _turned(x, found.left, batch + rows + inner, (count(batch), count(rows), count(inner)))
        wanted = (count(batch), count(inner), count(columns))
        made = _product(builder, x, _turned(factors, found.right, batch + inner + columns, wanted))
        where = made.where.reshape([sizes[one] for one in order])
        return Moved(made.buffer, where.permute([order.index(one) for one in found.result]))

    return as_it_lies(record, layer, emit) if len(out) == len(found.result) else None


class _Pair(NamedTuple):
    """The letters of an `einsum` of two tensors: of each, of the result, and by what becomes of
    them: those of batches, of rows, those that are summed, and those of columns."""

    left: str
    right: str
    result: str
    kinds: tuple[str, str, str, str]


def _spelled(text: str, ranks: Sequence[int]) -> str:
    """An equation of two tensors of so many dimensions, with a letter for each and a result.

    >>> _spelled("...si, ...id -> ...sd", (3, 4)), _spelled("bji,kj", (3, 2))
    ('Bsi,ABid->ABsd', 'bji,kj->bik')
    """
    given, arrow, result = text.replace(" ", "").partition("->")
    parts = given.split(",")
    spare = [one for one in string.ascii_uppercase if one not in text]
    hidden = [rank - len(part.replace("...", "")) for part, rank in zip(parts, ranks, strict=True)]
    most = max(hidden)
    full = [
        part.replace("...", "".join(spare[most - count : most]))
        for part, count in zip(parts, hidden, strict=True)
    ]
    batch = "".join(spare[:most])
    once = sorted(one for one in set(given) - {*".,"} if given.count(one) == 1)
    result = result.replace("...", batch) if arrow else batch + "".join(once)
    return f"{','.join(full)}->{result}"


def _pair_of(text: str) -> _Pair | None:
    """The letters of an equation; None where one is repeated, or summed in one tensor alone."""
    match = re.fullmatch(r"(\w+),(\w+)->(\w+)", text)
    if match is None:
        return None
    left, right, result = match.groups()
    if any(len({*letters}) < len(letters) for letters in (left, right, result)):
        return None
    batch = "".join(one for one in left if one in right and one in result)
    inner = "".join(one for one in left if one in right and one not in result)
    rows = "".join(one for one in left if one not in right)
    columns = "".join(one for one in right if one not in left)
    kept = {*batch, *rows, *columns} == {*result}
    return _Pair(left, right, result, (batch, rows, inner, columns)) if kept else None


def _turned(x: Moved, letters: str, order: str, shape: tuple[int, int, int]) -> Moved:
    """The dimensions that `letters` name in another order, as matrices."""
    where = x.where.permute([letters.index(one) for one in order])
    return Moved(x.buffer, where.reshape(shape))


def _product(builder: Builder, x: Moved, factors: Moved) -> Moved:
    """The product of each matrix of `x` by one of `factors`, gathered where it cannot be read."""
    left = _matrices(builder, x, dense=False)
    right = _matrices(builder, factors, dense=True)
    (count, height, inputs), outputs = x.shape, factors.shape[2]
    y = builder.buffer((count * height, outputs))

    def make(x: View, factors: View, y: View) -> Step:
        lies = {"x_lies": left.lie(x), "factors_lie": right.lie(factors)}
        return batched_step(x, factors, y, inputs=inputs, **lies)

    builder.add(make, left.buffer, right.buffer, y)
    return as_rows(y, (count, height, outputs))


def _gathered(factors: Moved) -> int:
    """How many numbers are gathered before a product by these matrices."""
    return 0 if runs_on(factors.where) else factors.where.numel()


def _matrices(builder: Builder, x: Moved, *, dense: bool) -> _Matrices:
    found = _lying(x)
    if found is None or (dense and x.shape[2] > 1 and found.column != (0, 1)):
        found = _lying(as_rows(settled_rows(builder, x), x.shape))
        assert found is not None
    return found


def _lying(x: Moved) -> _Matrices | None:
    """How the matrices lie, if their rows and columns are evenly far apart."""
    where, width = x.where.long(), x.buffer.shape[1]
    if bool((where < 0).any()):
        return None
    parts = (where // width, where % width)
    steps = []
    for dim, size in ((1, x.shape[1]), (2, x.shape[2])):
        apart = [(part.narrow(dim, 1, size - 1) - part.narrow(dim, 0, size - 1)) for part in parts]
        steps.append(tuple(int(one.flatten()[0]) if size > 1 else 0 for one in apart))
        if any(bool((one != step).any()) for one, step in zip(apart, steps[-1], strict=True)):
            return None
    (row, column), (pixels, channels) = steps, parts
    return _Matrices(
        x.buffer, pixels[:, 0, 0], channels[:, 0, 0], (row[0], row[1]), (column[0], column[1])
    )


class _Way(NamedTuple):
    """The dimension of the rows, and which of two tensors has them; the other has their numbers."""

    dim: int
    rows: int


ORDERED = ("quotient", "difference")
"""What two tensors make in one order alone."""


def with_number_of_row(
    record: Record, layer: Layer, kind: str, step: Callable[..., Step] | None = None
) -> Implementation | None:
    """A tensor and another with one number for each of its rows, in whatever dimension these are.

    Their `product`, `quotient`, `sum` or `difference`; None if no dimension of either is of one
    place. Both may be of fewer numbers than the result, as a column by a row: then the rows are
    repeated first. Rows that are columns in memory are left as they lie: there `step`, which takes
    two numbers each time, is given the other's repeated.
    """
    out = record.values[layer.node].shape
    nodes = layer.given
    if len(nodes) != 2 or not {*nodes} <= {*layer.inputs} or len(out) < 2:
        return None
    shapes = [tuple(record.values[node].shape) for node in nodes]
    sizes = [(1,) * (len(out) - len(shape)) + shape for shape in shapes]
    last = len(out) - 1
    ways = [
        _Way(dim, rows)
        for dim in (last, 1)
        for rows in (0, 1)
        if sizes[1 - rows][dim] == 1 < sizes[rows][dim] and not (rows and kind in ORDERED)
    ]
    whole = [way for way in ways if sizes[way.rows] == out]
    if not ways or (not whole and kind in ORDERED):
        return None
    if record.lies_by_pixels(layer.node):
        # Pixels of channels are what the next step reads.
        ways = ways[::-1]
    places = [layer.inputs.index(node) for node in nodes]

    def emit(builder: Builder, constants: None, *given: Moved) -> Moved:
        pair = [
            Moved(given[place].buffer, given[place].where.view(size))
            for place, size in zip(places, sizes, strict=True)
        ]
        lies = (way for way in whole if _is_last_in_memory(pair[way.rows], way.dim))
        way = next(lies, None)
        if step and way is None and last not in {one.dim for one in whole or ways}:
            repeated = pointwise(record, layer, step).emit
            assert repeated is not None
            return cast("Moved", repeated(builder, constants, *given))
        dim, first = way or (whole or ways)[0]
        x, numbers = pair[first], pair[1 - first].where
        moved = Moved(x.buffer, x.where.expand(out).movedim(dim, -1))
        rows = rows_anyhow(builder, moved)
        if numbers.numel() == 1:
            factor = settled_rows(builder, Moved(pair[1 - first].buffer, numbers.reshape(1, 1)))
        else:
            each = numbers.movedim(dim, -1).expand(*moved.shape[:-1], 1)
            factor = in_order(builder, Moved(pair[1 - first].buffer, each), rows.order)
        y = builder.buffer(rows.buffer.shape)
        builder.add(lambda x, f, y: pixel_step(x, f, y, kind=kind), rows.buffer, factor, y)
        made = from_rows(RowsInOrder(y, rows.order), moved.shape)
        return Moved(y, made.where.movedim(-1, dim))

    return as_it_lies(record, layer, emit)


def _is_last_in_memory(x: Moved, dim: int) -> bool:
    return x.shape[dim] == x.buffer.shape[1] and runs_on(x.where.movedim(dim, -1))
