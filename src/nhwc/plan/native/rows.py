"""Steps on the rows of tokens, in the order in which these lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from ...formats import Format
from ...kernels.layers.elementwise import multiply_step
from ...kernels.layers.pooling import global_mean_step
from ...kernels.programs.builder import Builder
from ...kernels.programs.moved import (
    Moved,
    RowsInOrder,
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


def nodes_in(layer: Layer) -> list[fx.Node]:
    """The nodes among the arguments, in their order, those that are given twice as well."""
    found: list[fx.Node] = []
    fx.node.map_arg((layer.node.args, layer.node.kwargs), found.append)  # type: ignore[arg-type]
    return found


def as_it_lies(record: Record, layer: Layer, emit: Emit, *, free: bool = False) -> Implementation:
    """It reads whatever lies there, and writes what torch wrote."""
    seen = record.values[layer.node]
    layout = seen.layout if isinstance(seen, Seen) else None
    writes = layout or Format.CONTIGUOUS
    return Implementation("nhwc", None, writes, emit=emit, free=free, moved=True)


def pointwise(record: Record, layer: Layer, make: Callable[..., Step]) -> Implementation:
    """A step that treats each number alone, in the order in which those of an input lie.

    Inputs of fewer numbers than the result are those of several of its numbers.
    """
    shape = record.values[layer.node].shape

    places = [layer.inputs.index(node) for node in nodes_in(layer) if node in layer.inputs]

    def emit(builder: Builder, constants: None, *inputs: Moved) -> Moved:
        given = [inputs[place] for place in places]
        whole = [one for one in given if one.shape == shape]
        leader = next((one for one in whole if is_everything(one)), None)
        if leader is None:
            leader = as_rows(settled_rows(builder, whole[0]), shape)
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


def rowwise(record: Record, layer: Layer, make: Callable[[View, View], Step]) -> Implementation:
    """A step that computes each row of the last dimension alone."""
    shape = record.values[layer.node].shape

    def emit(builder: Builder, constants: None, x: Moved) -> Moved:
        rows = rows_anyhow(builder, x)
        y = builder.buffer(rows.buffer.shape)
        builder.add(make, rows.buffer, y)
        return from_rows(RowsInOrder(y, rows.order), shape)

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


def concatenated(record: Record, layer: Layer, parts: Sequence[Any], dim: int) -> Implementation:
    """The parts, of which some may be the same, one after the other."""
    places = [layer.inputs.index(part) for part in parts]
    rank = len(record.values[layer.node].shape)

    def emit(builder: Builder, constants: None, *given: Moved) -> Moved:
        return joined(builder, [given[place] for place in places], dim % rank)

    return as_it_lies(record, layer, emit)


def mean_of_tokens(record: Record, layer: Layer) -> Implementation:
    """The mean over all dimensions but the first and the last."""
    shape, source = record.values[layer.node].shape, record.values[layer.inputs[0]].shape

    def emit(builder: Builder, constants: None, x: Moved) -> Moved:
        tokens = x.where.reshape(source[0], -1, source[-1])
        y = builder.buffer((source[0], source[-1]))
        builder.add(global_mean_step, settled(builder, Moved(x.buffer, tokens)), y)
        return as_rows(y, shape)

    return as_it_lies(record, layer, emit)
