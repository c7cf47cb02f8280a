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
from .transforms import Tiling


class Corner(NamedTuple):
    """A tile: the image it is cut from, and its corner in the output."""

    image: Value
    top: Value
    left: Value


class Sums(NamedTuple):
    """Sums of one tile and a vector of channels: of its first element, and how far on the next."""

    start: Value
    apart: Value


def corner_of(a: Args, tile: Value, t: Tiling) -> Corner:
    """Where a tile begins; the pixels of one are as far apart as the taps of a filter."""
    row, (height, width) = tile // a.tiles_w, t.outputs
    down, across = row % a.tiles_h, tile % a.tiles_w
    top = down // a.dilation_h * (height * a.dilation_h) + down % a.dilation_h
    left = across // a.dilation_w * (width * a.dilation_w) + across % a.dilation_w
    return Corner(row // a.tiles_h, top, left)


def emit_output(e: Emitter, a: Args, t: Tiling, sums: Sums, tile: Value, channel: Value) -> None:
    """Transform the sums of one tile and one vector of channels back, finish and store them."""
    corner, (height, width) = corner_of(a, tile, t), t.outputs
    pixel = (corner.image * a.out_h + corner.top) * a.out_w + corner.left
    y, y_width = _target(e, a, corner, channel)
    residual = a.residual.floats() + (pixel * a.residual_pixel + channel)
    columns = t.across.size
    grid = [
        [e.load(sums.start + sums.apart * (i * columns + j)) for j in range(columns)]
        for i in range(t.down.size)
    ]
    bias = e.load(a.bias.floats() + channel)
    low, high = e.float_of_bits(a.low), e.float_of_bits(a.high)
    results = [[e.variable(0.0) for _ in range(width)] for _ in range(height)]
    for line, values in zip(results, t.output(e, grid), strict=True):
        for variable, value in zip(line, values, strict=True):
            variable.value = value + bias
    # The pixels of the tile that lie inside of the image.
    below = (a.out_h - corner.top + (a.dilation_h - 1)) // a.dilation_h
    beside = (a.out_w - corner.left + (a.dilation_w - 1)) // a.dilation_w
    next_row, next_pixel = a.out_w * a.dilation_h, a.dilation_w
    simple = (below >= height) & (beside >= width) & (channel + e.width <= a.k)
    each = [(i, j, results[i][j]) for i in range(height) for j in range(width)]

    def at_once() -> None:
        """A whole tile, whole vectors, and nothing more than a clamp: all stays in registers."""
        with e.when(a.residual != 0):
            for i, j, variable in each:
                other = residual + (next_row * i + next_pixel * j) * a.residual_pixel
                variable.value = variable.value + e.load(other)
        for line in results:
            for variable in line:
                variable.value = e.max(low, e.min(high, variable.value))

        def pool() -> None:
            for i, j in product(range(0, height - 1, 2), range(0, width - 1, 2)):
                window = [results[i + m][j + n].value for m in (0, 1) for n in (0, 1)]
                largest = reduce(partial(emit_larger, e), window)
                e.store(largest, y + (y_width * (i // 2) + j // 2) * a.y_pixel)

        def store() -> None:
            for i, j, variable in each:
                e.store(variable.value, y + (next_row * i + next_pixel * j) * a.y_pixel)

        e.branch(a.pool != 0, pool, store)

    def one_by_one() -> None:
        """Store the results on the stack, then copy those inside the image in loops."""
        kept = e.stack(height * width * e.width)
        for number, (_, _, variable) in enumerate(each):
            e.store(variable.value, kept + number * e.width)
        mask = e.lanes(a.k - channel)
        last_row, last_column = e.min(below, height), e.min(beside, width)
        with e.when(a.residual != 0), e.range(0, last_row) as i, e.range(0, last_column) as j:
            other = residual + (i * next_row + j * next_pixel) * a.residual_pixel
            at = kept + (i * width + j) * e.width
            e.store(e.load(at) + e.load(other, mask), at)
        # Also of what lies outside of the image: that makes whole rows, which is faster.
        floats = e.i64(height * width * e.width)
        activate_tile(e, Stored(kept, 0, e.i64(1), floats), a.code, a.slope)
        side = a.pool + 1
        last_row, last_column = emit_pooled(e, a, last_row), emit_pooled(e, a, last_column)
        with e.range(0, last_row) as i, e.range(0, last_column) as j:
            first = kept + (i * side * width + j * side) * e.width
            largest = e.variable(0.0)
            largest.value = e.load(first)
            with e.when(a.pool != 0):
                for number in (1, width, width + 1):
                    other = e.load(first + number * e.width)
                    largest.value = emit_larger(e, largest.value, other)
            to = y + (i * (y_width * a.dilation_h) + j * next_pixel) * a.y_pixel
            e.store(largest.value, to, mask)

    e.branch(simple & (a.code <= int(LAST_CLAMP)), at_once, one_by_one)


def _target(e: Emitter, a: Args, corner: Corner, channel: Value) -> tuple[Value, Value]:
    """The address of a tile's corner in the result, pooled or not, and the result's width."""
    height, width, top, left = (
        emit_pooled(e, a, count) for count in (a.out_h, a.out_w, corner.top, corner.left)
    )
    pixel = (corner.image * height + top) * width + left
    return a.y.floats() + (pixel * a.y_pixel + channel), width
