"""Sums, means and largest numbers over any dimensions, of images and of tokens.

Where a dimension that stays is the one that lies side by side in memory, its numbers are channels,
and all that goes is the pixels of an image, which are pooled. Where that dimension goes, each row
is pooled as an image of a single channel. So only what lies in neither way is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from ...kernels.layers.elementwise import add_step
from ...kernels.layers.normalize import row_step
from ...kernels.layers.pooling import global_mean_step, global_sum_step, maxpool_step
from ...kernels.programs.builder import Buffer, Builder
from ...kernels.programs.moved import Moved, as_rows, runs_on, settled, settled_rows
from ...kernels.tape.steps import Step, View
from ..implementation import Implementation
from ..recording import Record
from ..specs import Layer
from .rows import as_it_lies

KINDS = ("mean", "sum", "amax")

_MOST_CHANNELS = 1 << 13
"""Of a row, each lane of which sums so few that none is rounded off."""

_FEW = 4
"""Pixels, as of branches that were stacked, for which a pooling costs more than additions."""


def reduced(
    record: Record, layer: Layer, kind: str, dims: object, *, keepdim: object = False
) -> Implementation | None:
    """The `kind` of reduction over `dims`; None for arguments that are no plain numbers."""
    source, out = (record.values[one].shape for one in (layer.inputs[0], layer.node))
    gone = _gone(dims, len(source))
    if kind not in KINDS or gone is None or type(keepdim) is not bool or len(layer.inputs) != 1:
        return None
    kept = [dim for dim in range(len(source)) if dim not in gone]
    wanted = tuple(1 if dim in gone else source[dim] for dim in range(len(source)))
    if out != (wanted if keepdim else tuple(source[dim] for dim in kept)):
        return None
    area = math.prod(source[dim] for dim in gone)

    def emit(builder: Builder, constants: None, x: Moved) -> Moved:
        along = [dim for dim in kept if source[dim] > 1 and runs_on(x.where.movedim(dim, -1))]
        channels = max(along, key=lambda dim: source[dim], default=None)
        order = [dim for dim in kept if dim != channels]
        shape = [source[dim] for dim in order]
        if channels is None:
            rows = Moved(x.buffer, x.where.permute(*order, *gone).reshape(-1, area))
            found = _pooled_rows(builder, settled_rows(builder, rows), kind)
            return as_rows(found, out)
        lines = x.where.permute(*order, *gone, channels)
        width = area * source[channels]
        if kind == "sum" and 2 <= area <= _FEW and x.buffer.shape[1] == width:
            wide = Moved(x.buffer, lines.reshape(-1, width))
            found = _added(builder, settled_rows(builder, wide), area)
        else:
            moved = lines.reshape(-1, area, source[channels])
            image = settled(builder, Moved(x.buffer, moved))
            y = builder.buffer((image.shape[0], source[channels]))
            found = _pooled(builder, image, y, kind, lambda view: view)
        back = [[*order, channels].index(dim) for dim in kept]
        where = as_rows(found, (*shape, source[channels])).where.permute(back)
        return Moved(found, where.reshape(out))

    return as_it_lies(record, layer, emit)


def _added(builder: Builder, x: Buffer, count: int) -> Buffer:
    """The sum of as many even parts of each pixel's channels."""
    width = x.shape[1] // count
    total, *others = (builder.slice(x, i * width, (i + 1) * width) for i in range(count))
    for other in others:
        y = builder.buffer((x.shape[0], width, *x.shape[2:]))
        builder.add(add_step, total, other, y)
        total = y
    return total


def _gone(dims: object, rank: int) -> list[int] | None:
    if dims is None:
        return [*range(rank)]
    given: Sequence[object] = dims if isinstance(dims, (tuple, list)) else (dims,)
    found = [dim % rank for dim in given if type(dim) is int and -rank <= dim < rank]
    return sorted(found) if found and len({*found}) == len(given) else None


def _pooled_rows(builder: Builder, x: Buffer, kind: str) -> Buffer:
    """The channels of each pixel as one number; where there are many, a pixel is an image of a
    single channel, which is summed in pieces."""
    width, count = x.shape[1], x.view().pixels
    if width <= _MOST_CHANNELS:
        y = builder.buffer((count, 1))
        builder.add(partial(row_step, kind=kind), x, y)
        return y
    turned = lambda view: view.as_numbers(count, 1, width, 1)
    return _pooled(builder, builder.dense(x), builder.buffer((count, 1)), kind, turned)


def _pooled(
    builder: Builder, x: Buffer, y: Buffer, kind: str, seen: Callable[[View], View]
) -> Buffer:
    """Each channel of each image in one number, where `x` is seen as `seen` says."""

    def make(x: View, y: View) -> list[Step]:
        image = seen(x)
        if kind == "amax":
            area = image.shape[2] * image.shape[3]
            return [maxpool_step(image, y, size=(area, 1), stride=(1, 1))]
        return [global_mean_step(image, y) if kind == "mean" else global_sum_step(image, y)]

    builder.add(make, x, y)
    return y
