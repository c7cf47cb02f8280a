"""Loops over the channels of a pixel, and how many vectors these fill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .values import Value
from .vectors import Emitter

PADDED_TO = 16
"""Packed channels come in multiples of this: no vector is wider, so reading them needs no mask."""


class Place(NamedTuple):
    """A channel, and the mask of what is left of the pixel where that is less than a vector."""

    channel: Value
    mask: Value | None


Body = Callable[[Value, Any], object]


def padded(channels: int) -> int:
    return -(-channels // PADDED_TO) * PADDED_TO


def emit_padded(channels: Value) -> Value:
    """`padded`, computed by the kernel."""
    return (channels + (PADDED_TO - 1)) // PADDED_TO * PADDED_TO


def emit_vectors(e: Emitter, count: Any) -> Value:
    """How many vectors hold `count` floats."""
    vectors: Value = (count + (e.width - 1)) // e.width
    return vectors


def emit_whole(e: Emitter, count: Any) -> Value:
    """`count` floats filled up to whole vectors."""
    return emit_vectors(e, count) * e.width


def emit_moved(e: Emitter, address: Value, floats: Value) -> Value:
    """`address` moved on by `floats`; but 0, which stands for none, stays 0."""
    return e.select(address != 0, address + floats * 4, e.i64(0))


def emit_runs(e: Emitter, pixels: Value, c: Value, *strides: Value) -> tuple[Value, Value]:
    """How many runs of floats some pixels are, and how long: one, if no stride leaves a gap."""
    dense = strides[0] == c
    for stride in strides[1:]:
        dense = dense & (stride == c)
    return e.select(dense, e.i64(1), pixels), e.select(dense, pixels * c, c)


def each_vector(e: Emitter, first: Any, last: Value, body: Body) -> None:
    """`body(channel, None)` for each whole vector, then `body(channel, mask)` for what is left."""
    whole = first + (last - first) // e.width * e.width
    with e.range(first, whole, e.width) as channel:
        body(channel, None)
    with e.when(whole < last):
        body(whole, e.lanes(last - whole))


def each_block(e: Emitter, last: Value, count: int, body: Callable[[list[Place]], object]) -> None:
    """`body` with `count` whole vectors at once while there are as many, then with one place.

    Independent vectors hide the latency of a long chain of operations on each.
    """
    size = count * e.width
    whole = last // size * size
    with e.range(0, whole, size) as channel:
        body([Place(channel + number * e.width, None) for number in range(count)])
    each_vector(e, whole, last, lambda channel, mask: body([Place(channel, mask)]))
