"""What many kernels share: loops over the channels of a pixel, and how a result is finished."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .activations import emit_activations
from .compiler import Args
from .values import Value
from .vectors import Emitter

PADDED_TO = 16
"""Packed channels come in multiples of this: no vector is wider, so reading them needs no mask."""

Body = Callable[[Value, "Value | None"], object]


def pad_channels(values: Tensor | None, channels: int) -> Tensor:
    """Rows of a value per channel, filled up with zeros to whole vectors; all zeros for None."""
    if values is None:
        return torch.zeros(padded(channels))
    rows = values.detach().float()
    return torch.nn.functional.pad(rows, (0, padded(channels) - channels)).contiguous()


def padded(channels: int) -> int:
    return -(-channels // PADDED_TO) * PADDED_TO


def emit_padded(channels: Value) -> Value:
    """`padded`, computed by the kernel."""
    return (channels + (PADDED_TO - 1)) // PADDED_TO * PADDED_TO


def each_vector(e: Emitter, first: Any, last: Value, body: Body) -> None:
    """`body(channel, None)` for each whole vector, then `body(channel, mask)` for what is left."""
    whole = first + (last - first) // e.width * e.width
    with e.range(first, whole, e.width) as channel:
        body(channel, None)
    with e.when(whole < last):
        body(whole, e.lanes(last - whole))


def finish(
    e: Emitter, a: Args, sums: Sequence[Value], pixel: Value, place: tuple[Value, Any]
) -> None:
    """Add the residual to the sums of neighbouring pixels, apply the activation, and store them.

    The kernel's fields must name y, ypixel, residual, rpixel, code and slope.
    """
    channel, mask = place
    kept = [e.variable(0.0) for _ in sums]
    for variable, value in zip(kept, sums, strict=True):
        variable.value = value
    with e.when(a.residual != 0):
        other = a.residual.floats() + (pixel * a.rpixel + channel)
        for number, variable in enumerate(kept):
            variable.value = variable.value + e.load(other + a.rpixel * number, mask)
    values = emit_activations(e, [k.value for k in kept], a.code, e.float_of_bits(a.slope))
    target = a.y.floats() + (pixel * a.ypixel + channel)
    for number, value in enumerate(values):
        e.store(value, target + a.ypixel * number, mask)
