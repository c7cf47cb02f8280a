"""The way back of Winograd's convolution: from the sums of a tile to finished pixels.

A tile is transformed back one vector of channels at a time, and bias, residual, activation and a
pooling follow at once. Most tiles are whole and end with a clamp: their pixels stay in registers
until they are stored. The others, at a border, with channels that do not fill a vector, or with an
activation that has a function, go through the stack, where a loop can run over some of them.
"""

from __future__ import annotations

from functools import partial, reduce
from itertools import product
from typing import NamedTuple

from ..language.compiler import Args
from ..language.values import Value
from ..language.vectors import Emitter
from ..layers.activations import LAST_CLAMP, Stored
from ..layers.ending import activate_tile
from ..layers.pooling import emit_larger
from .pooled import emit_pooled
from .transforms import Transform, emit_twice


class Corner(NamedTuple):
    """A tile: the image it is cut from, and its corner in the output."""

    image: Value
    top: Value
    left: Value


class Sums(NamedTuple):
    """Sums of one tile and a vector of channels: of its first element, and how far on the next."""

    start: Value
    apart: Value


def corner_of(a: Args, tile: Value, t: Transform) -> Corner:
    row = tile // a.tiles_w
    return Corner(row // a.tiles_h, row % a.tiles_h * t.outputs, tile % a.tiles_w * t.outputs)


def emit_output(e: Emitter, a: Args, t: Transform, sums: Sums, tile: Value, channel: Value) -> None:
    """Transform the sums of one tile and one vector of channels back, finish and store them."""
    corner = corner_of(a, tile, t)
    pixel = (corner.image * a.out_h + corner.top) * a.out_w + corner.left
    y, y_width = _target(e, a, corner, channel)
    residual = a.residual.floats() + (pixel * a.residual_pixel + channel)
    grid = [
        [e.load(sums.start + sums.apart * (i * t.size + j)) for j in range(t.size)]
        for i in range(t.size)
    ]
    bias = e.load(a.bias.floats() + channel)
    low, high = e.float_of_bits(a.low), e.float_of_bits(a.high)
    results = [[e.variable(0.0) for _ in range(t.outputs)] for _ in range(t.outputs)]
    for line, values in zip(results, emit_twice(e, t.output, grid), strict=True):
        for variable, value in zip(line, values, strict=True):
            variable.value = value + bias
    rows, columns = a.out_h - corner.top, a.out_w - corner.left
    simple = (rows >= t.outputs) & (columns >= t.outputs) & (channel + e.width <= a.k)
    each = [(i, j, results[i][j]) for i in range(t.outputs) for j in range(t.outputs)]

    def at_once() -> None:
        """A whole tile, whole vectors, and nothing more than a clamp: all stays in registers."""
        with e.when(a.residual != 0):
            for i, j, variable in each:
                other = residual + (a.out_w * i + j) * a.residual_pixel
                variable.value = variable.value + e.load(other)
        for line in results:
            for variable in line:
                variable.value = e.max(low, e.min(high, variable.value))

        def pool() -> None:
            for i, j in product(range(0, t.outputs, 2), repeat=2):
                window = [results[i + m][j + n].value for m in (0, 1) for n in (0, 1)]
                largest = reduce(partial(emit_larger, e), window)
                e.store(largest, y + (y_width * (i // 2) + j // 2) * a.y_pixel)

        def store() -> None:
            for i, j, variable in each:
                e.store(variable.value, y + (y_width * i + j) * a.y_pixel)

        e.branch(a.pool != 0, pool, store)

    def one_by_one() -> None:
        """Store the results on the stack, then copy those inside the image in loops."""
        kept = e.stack(t.outputs**2 * e.width)
        for number, (_, _, variable) in enumerate(each):
            e.store(variable.value, kept + number * e.width)
        mask = e.lanes(a.k - channel)
        last_row, last_column = e.min(rows, t.outputs), e.min(columns, t.outputs)
        with e.when(a.residual != 0), e.range(0, last_row) as i, e.range(0, last_column) as j:
            other = residual + (i * a.out_w + j) * a.residual_pixel
            at = kept + (i * t.outputs + j) * e.width
            e.store(e.load(at) + e.load(other, mask), at)
        # Also of what lies outside of the image: that makes whole rows, which is faster.
        floats = e.i64(t.outputs**2 * e.width)
        activate_tile(e, Stored(kept, 0, e.i64(1), floats), a.code, a.slope)
        side = a.pool + 1
        last_row, last_column = emit_pooled(e, a, last_row), emit_pooled(e, a, last_column)
        with e.range(0, last_row) as i, e.range(0, last_column) as j:
            first = kept + (i * side * t.outputs + j * side) * e.width
            largest = e.variable(0.0)
            largest.value = e.load(first)
            with e.when(a.pool != 0):
                for number in (1, t.outputs, t.outputs + 1):
                    other = e.load(first + number * e.width)
                    largest.value = emit_larger(e, largest.value, other)
            e.store(largest.value, y + (i * y_width + j) * a.y_pixel, mask)

    e.branch(simple & (a.code <= int(LAST_CLAMP)), at_once, one_by_one)


def _target(e: Emitter, a: Args, corner: Corner, channel: Value) -> tuple[Value, Value]:
    """The address of a tile's corner in the result, pooled or not, and the result's width."""
    height, width, top, left = (
        emit_pooled(e, a, count) for count in (a.out_h, a.out_w, corner.top, corner.left)
    )
    pixel = (corner.image * height + top) * width + left
    return a.y.floats() + (pixel * a.y_pixel + channel), width
