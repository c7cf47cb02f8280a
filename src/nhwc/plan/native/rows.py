"""Steps on the rows of tokens, in the order in which these lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ...formats import Format
from ...kernels.layers.elementwise import multiply_step
from ...kernels.programs.builder import Builder
from ...kernels.programs.moved import (
    Moved,
    RowsInOrder,
    as_image,
    as_rows,
    from_rows,
    in_order,
    is_everything,
    joined,
    like,
    room,
    rows_anyhow,
    settled,
    settled_rows,
)
from ...kernels.tape.steps import Step, View
from ..implementation import Emit, Implementation
from ..recording import Record, Seen
from ..specs import Layer


def as_it_lies(record: Record, layer: Layer, emit: Emit, *, free: bool = False) -> Implementation:
    """It reads whatever lies there, and writes what torch wrote."""
    seen = record.values[layer.node]
    layout = seen.layout if isinstance(seen, Seen) else None
    writes = layout or Format.CONTIGUOUS
    return Implementation("nhwc", None, writes, emit=emit, free=free, moved=True)


def pointwise(record: Record, layer: Layer, make: Callable[..., Step]) -> Implementation:
    """A step that treats each number alone, in the order in which those of an input lie.

    Inputs of fewer numbers than the result are those of several of its numbers: `like` repeats
    them. Where all are, as in a difference of a column and a row, the first is repeated for a
    start.
    """
    shape = record.values[layer.node].shape
    image = record.lies_by_pixels(layer.node)
    places = [layer.inputs.index(node) for node in layer.given if node in layer.inputs]

    def emit(builder: Builder, constants: None, *inputs: Moved) -> Moved:
        given = [inputs[place] for place in places]
        whole = [one for one in given if one.shape == shape]
        leader = next((one for one in whole if is_everything(one)), None)
        if leader is None:
            first = whole[0] if whole else Moved(given[0].buffer, given[0].where.expand(shape))
            if image:
                leader = as_image(settled(builder, first), shape)
            else:
                leader = as_rows(settled_rows(builder, first), shape)
        y = builder.buffer(leader.buffer.shape)
        builder.add(make, *(like(builder, one, leader) for one in given), y)
        return Moved(y, leader.where)

    return as_it_lies(record, layer, emit)


def scaled(record: Record, layer: Layer) -> Implementation:
    """Each row times the same factors, one for each channel."""
    shape = record.values[layer.node].shape

    def emit(builder: Builder, constants: None, *given: Moved) -> Moved:
        whole, factor = given if given[0].shape == shape else given[::-1]
        rows = rows_anyhow(builder, whole)
        factors = settled_rows(builder, Moved(factor.buffer, factor.where.reshape(1, -1)))
        y = builder.buffer(rows.buffer.shape)
        builder.add(multiply_step, rows.buffer, factors, y)
        return from_rows(RowsInOrder(y, rows.order), shape)

    return as_it_lies(record, layer, emit)


def rowwise(
    record: Record, layer: Layer, make: Callable[[View, View], Step], dim: int = -1
) -> Implementation:
    """A step that computes each row of a dimension, the last one by default, alone."""

    def emit(builder: Builder, constants: None, x: Moved) -> Moved:
        moved = Moved(x.buffer, x.where.movedim(dim, -1))
        rows = rows_anyhow(builder, moved)
        y = builder.buffer(rows.buffer.shape)
        builder.add(make, rows.buffer, y)
        made = from_rows(RowsInOrder(y, rows.order), moved.shape)
        return Moved(y, made.where.movedim(-1, dim))

    return as_it_lies(record, layer, emit)


def over_rows(shape: tuple[int, ...], kernel: Callable[..., Any]) -> Emit:
    """The emission of a linear layer: `kernel(x, y, constants, *residual)` on rows."""

    def emit(builder: Builder, constants: Any, x: Moved, *residual: Moved) -> Moved:
        rows = rows_anyhow(builder, x)
        others = [in_order(builder, one, rows.order) for one in residual]
        y = room(builder, shape)
        add = lambda x, y, *more: kernel(x, y, constants, *more)
        builder.add(add, rows.buffer, y, *others)
        return from_rows(RowsInOrder(y, rows.order), shape)

    return emit


def in_one_row(one: Implementation, shape: tuple[int, ...]) -> Implementation:
    """`one`, a kernel for images of one row, for signals whose result has this shape, N, C, L.

    Channels are brought side by side where they do not lie so.
    """
    n, c, length = shape

    def emit(builder: Builder, constants: Any, *given: Moved) -> Moved:
        assert one.emit is not None
        images = [settled(builder, Moved(x.buffer, x.where.unsqueeze(2))) for x in given]
        y = one.emit(builder, constants, *images)
        return Moved(y, as_image(y, (n, c, 1, length)).where.squeeze(2))

    return replace(one, emit=emit, moved=True)


def concatenated(
    record: Record, layer: Layer, parts: Sequence[Any], dim: int, *, stacked: bool = False
) -> Implementation:
    """The parts, of which some may be the same, in a row; `stacked` in a dimension of their own."""
    places = [layer.inputs.index(part) for part in parts]
    dim %= len(record.values[layer.node].shape)

    def emit(builder: Builder, constants: None, *given: Moved) -> Moved:
        found = [given[place] for place in places]
        if stacked:
            found = [Moved(one.buffer, one.where.unsqueeze(dim)) for one in found]
        return joined(builder, found, dim)

    return as_it_lies(record, layer, emit)


def repeated(record: Record, layer: Layer) -> Implementation | None:
    """The first tensor in the shape of the second, as an assignment takes it."""
    shape = record.values[layer.node].shape
    place = layer.inputs.index(layer.node.args[0]) if layer.node.args[0] in layer.inputs else None
    if place is None:
        return None

    def emit(builder: Builder, constants: None, *inputs: Moved) -> Moved:
        x = inputs[place]
        where = x.where.reshape(x.where.shape[max(0, x.where.ndim - len(shape)) :])
        return Moved(x.buffer, where.expand(shape))

    return as_it_lies(record, layer, emit, free=True)
