"""The end of a kernel: the residual is added, the activation applied, and pixels are stored."""

from __future__ import annotations

from collections.abc import Sequence

from ..language.compiler import Args
from ..language.loops import Place, each_vector
from ..language.values import Value
from ..language.vectors import Emitter
from ..tape.steps import Argument, View, covers
from .activations import Activation, Stored, emit_activation, emit_activations, emit_in_pairs

ENDING = ("y", "y_pixel", "residual", "residual_pixel", "code", "slope")
"""The fields of a kernel that `finish` reads; `ending` gives their arguments."""


def ending(
    y: View, activation: Activation, slope: float = 0.01, residual: View | None = None
) -> dict[str, Argument]:
    """The arguments for ENDING: where a result goes, and what is done to it on the way."""
    if residual is not None:
        covers(residual, y)
    return {
        "y": y,
        "y_pixel": y.pixel,
        "code": int(activation),
        "slope": float(slope),
        "residual": residual,
        "residual_pixel": residual.pixel if residual else 0,
    }


def finish(e: Emitter, a: Args, sums: Sequence[Value], pixel: Value, place: Place) -> None:
    """Add the residual to the sums of neighbouring pixels, apply the activation, and store them."""
    put(e, a, activated(e, a, sums, pixel, place), pixel, place)


def activated(
    e: Emitter, a: Args, sums: Sequence[Value], pixel: Value, place: Place
) -> list[Value]:
    """The sums of neighbouring pixels, with the residual added and the activation applied."""
    kept = [e.variable(0.0) for _ in sums]
    for variable, value in zip(kept, sums, strict=True):
        variable.value = value
    with e.when(a.residual != 0):
        for variable, value in zip(kept, _added(e, a, sums, pixel, place), strict=True):
            variable.value = value
    return emit_activations(e, [k.value for k in kept], a.code, e.float_of_bits(a.slope))


def add_and_put(e: Emitter, a: Args, sums: Sequence[Value], pixel: Value, place: Place) -> None:
    """Add the residual, which there is, to values of neighbouring pixels, and store them."""
    put(e, a, _added(e, a, sums, pixel, place), pixel, place)


def _added(e: Emitter, a: Args, sums: Sequence[Value], pixel: Value, place: Place) -> list[Value]:
    channel, mask = place
    other = a.residual.floats() + (pixel * a.residual_pixel + channel)
    return [
        value + e.load(other + a.residual_pixel * number, mask) for number, value in enumerate(sums)
    ]


def put(e: Emitter, a: Args, values: Sequence[Value], pixel: Value, place: Place) -> None:
    """Store the values of neighbouring pixels."""
    channel, mask = place
    target = a.y.floats() + (pixel * a.y_pixel + channel)
    for number, value in enumerate(values):
        e.store(value, target + a.y_pixel * number, mask)


def activate_tile(e: Emitter, tile: Stored, code: Value, slope: Value) -> None:
    """Apply an activation that is more than a clamp, while the tile is in the nearest cache."""
    done = emit_in_pairs(e, tile, code)
    with e.when(done < tile.channels), e.range(0, tile.pixels) as i:

        def apply(channel: Value, mask: Value | None) -> None:
            place = tile.start + (i * tile.pixel + channel)
            value = emit_activation(e, e.load(place, mask), code, e.float_of_bits(slope))
            e.store(value, place, mask)

        each_vector(e, done, tile.channels, apply)
