"""What many kernels share: loops over the channels of a pixel, and how a result is finished."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .activations import Activation, emit_activation, emit_activations
from .compiler import Args
from .pages import room
from .steps import Argument, View
from .values import Value
from .vectors import Emitter

PADDED_TO = 16
"""Packed channels come in multiples of this: no vector is wider, so reading them needs no mask."""

Place = tuple[Value, "Value | None"]
"""A channel, and the mask of what is left of the pixel where that is less than a vector."""

Body = Callable[[Value, Any], object]


def pad_channels(values: Tensor | None, channels: int) -> Tensor:
    """Rows of a value per channel, filled up with zeros to whole vectors; all zeros for None."""
    if values is None:
        return torch.zeros(padded(channels))
    rows = values.detach().float()
    filled = room(math.prod(rows.shape[:-1]) * padded(channels)).view(*rows.shape[:-1], -1)
    filled[..., :channels] = rows
    filled[..., channels:] = 0.0
    return filled


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
    """`address`, so many floats further on; but 0, which stands for none, stays 0."""
    return e.select(address != 0, address + floats * 4, e.i64(0))


def each_vector(e: Emitter, first: Any, last: Value, body: Body) -> None:
    """`body(channel, None)` for each whole vector, then `body(channel, mask)` for what is left."""
    whole = first + (last - first) // e.width * e.width
    with e.range(first, whole, e.width) as channel:
        body(channel, None)
    with e.when(whole < last):
        body(whole, e.lanes(last - whole))


def each_block(e: Emitter, last: Value, count: int, body: Callable[[list[Place]], object]) -> None:
    """`body` with `count` places (channel, None) at once while there are so many, then with one.

    Independent vectors hide the latency of a long chain of operations on each.
    """
    size = count * e.width
    whole = last // size * size
    with e.range(0, whole, size) as channel:
        body([(channel + number * e.width, None) for number in range(count)])
    each_vector(e, whole, last, lambda channel, mask: body([(channel, mask)]))


ENDING = ("y", "ypixel", "residual", "rpixel", "code", "slope")
"""The fields of a kernel that `finish` reads; `ending` gives their arguments."""


def ending(
    y: View, activation: Activation, slope: float = 0.01, residual: View | None = None
) -> dict[str, Argument]:
    """Where a result goes, and what is done to it on the way."""
    return {
        "y": y,
        "ypixel": y.pixel,
        "code": int(activation),
        "slope": float(slope),
        "residual": residual,
        "rpixel": residual.pixel if residual else 0,
    }


def finish(e: Emitter, a: Args, sums: Sequence[Value], pixel: Value, place: Place) -> None:
    """Add the residual to the sums of neighbouring pixels, apply the activation, and store them."""
    put(e, a, activated(e, a, sums, pixel, place), pixel, place)


def activated(
    e: Emitter, a: Args, sums: Sequence[Value], pixel: Value, place: Place
) -> list[Value]:
    """The sums of neighbouring pixels, with the residual added and the activation applied."""
    channel, mask = place
    kept = [e.variable(0.0) for _ in sums]
    for variable, value in zip(kept, sums, strict=True):
        variable.value = value
    with e.when(a.residual != 0):
        other = a.residual.floats() + (pixel * a.rpixel + channel)
        for number, variable in enumerate(kept):
            variable.value = variable.value + e.load(other + a.rpixel * number, mask)
    return emit_activations(e, [k.value for k in kept], a.code, e.float_of_bits(a.slope))


def put(e: Emitter, a: Args, values: Sequence[Value], pixel: Value, place: Place) -> None:
    """Store the values of neighbouring pixels."""
    channel, mask = place
    target = a.y.floats() + (pixel * a.ypixel + channel)
    for number, value in enumerate(values):
        e.store(value, target + a.ypixel * number, mask)


def activate_tile(
    e: Emitter, y: Value, pixel: Any, size: tuple[Value, Value], how: tuple[Value, Value]
) -> None:
    """Apply what is more than a clamp to a tile just stored, while it is in the nearest cache.

    `size` is its pixels, `pixel` floats apart, and its channels; `how` the code and the slope.
    """
    (pixels, channels), (code, slope) = size, how
    with e.range(0, pixels) as i:

        def apply(channel: Value, mask: Value | None) -> None:
            place = y + (i * pixel + channel)
            value = emit_activation(e, e.load(place, mask), code, e.float_of_bits(slope))
            e.store(value, place, mask)

        each_vector(e, e.i64(0), channels, apply)
