"""Sums over the pixels of an image, for a vector of channels at once.

A sum of many numbers of one sign is soon so large that it rounds off most of what is added. So an
image is summed in pieces, and these in pieces of their own, so that no sum has many summands:

    8192 pixels   [128 + 128 + ... + 128] + [128 + 128 + ... + 128] + ...
"""

from __future__ import annotations

from collections.abc import Callable

from ..language.compiler import Args
from ..language.values import Value
from ..language.vectors import Emitter, Variable

_AT_ONCE = 4
"""Sums that are added to in turns, which hides the latency of an addition."""
_PIECES = (1 << 13, 1 << 7)
"""The pixels of a piece, and of a piece of it."""


def emit_total(
    e: Emitter,
    a: Args,
    start: Value,
    count: Value,
    mask: Value | None,
    pieces: tuple[int, ...] = _PIECES,
) -> Value:
    """The sum of a vector of channels over pixels, however many these are."""
    if not pieces:
        return emit_sum(e, a, start, count, mask)
    total = e.variable(0.0)
    with e.range(0, count, pieces[0]) as first:
        source, left = start + first * a.x_pixel, e.min(count - first, pieces[0])
        total.value = emit_total(e, a, source, left, mask, pieces[1:]) + total.value
    found: Value = total.value
    return found


def emit_sum(e: Emitter, a: Args, start: Value, count: Value, mask: Value | None) -> Value:
    """The sum of a vector of channels over pixels that are few."""
    sums = new_sums(e)

    def add(number: int, value: Value) -> None:
        sums[number].value = sums[number].value + value

    each_pixel(e, a, start, count, mask, add)
    return together(sums)


def new_sums(e: Emitter) -> list[Variable]:
    """The sums among which `each_pixel` shares out the pixels."""
    return [e.variable(0.0) for _ in range(_AT_ONCE)]


def each_pixel(
    e: Emitter,
    a: Args,
    start: Value,
    count: Value,
    mask: Value | None,
    add: Callable[[int, Value], None],
) -> None:
    """Hand the channels of each pixel to `add`, with the number of the sum that it goes to."""
    even = count // _AT_ONCE * _AT_ONCE
    with e.range(0, even, _AT_ONCE) as pixel:
        for number in range(_AT_ONCE):
            add(number, e.load(start + (pixel + number) * a.x_pixel, mask))
    with e.range(even, count) as pixel:
        add(0, e.load(start + pixel * a.x_pixel, mask))


def together(sums: list[Variable]) -> Value:
    """The sum of the sums."""
    total: Value = (sums[0].value + sums[1].value) + (sums[2].value + sums[3].value)
    return total
