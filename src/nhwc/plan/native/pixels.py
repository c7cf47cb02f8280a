"""Calls that move pixels and change none, as tables of lines and columns for one kernel of ours.

Padding in any mode, slices, repetition and concatenation along frames, lines or columns, and
nearest resizing of volumes: each says for every side of the result where its frames, lines and
columns come from, in a tensor of indices for each side. An image has a single frame.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ...kernels.layers.moving import LEFT, OUTSIDE, in_frames, move_step
from ...kernels.layers.resize import nearest_places
from ...kernels.programs.builder import Buffer, Builder
from ...kernels.tape.steps import Step, View
from .windows import Given

Shape = tuple[int, ...]


class PixelMove(NamedTuple):
    """Where the frames, lines and columns of a result come from; `fill` where from nowhere."""

    sides: tuple[Tensor, Tensor, Tensor]
    fill: float = 0.0

    def step(self, shape: Shape, x: View, y: View) -> Step:
        """The step on an input of this shape."""
        frames, rows, columns = self.sides
        return move_step(x, y, in_frames(frames, rows, shape[-2]), columns, fill=self.fill)


def padded(given: Given, shape: Shape) -> PixelMove | None:
    """`F.pad` of images or volumes that pads frames, lines and columns."""
    pad: Any = given.get("pad")
    mode, fill = given.get("mode", "constant"), given.get("value")
    plain = isinstance(pad, (tuple, list)) and all(type(one) is int for one in pad)
    if not plain or len(pad) > 2 * (len(shape) - 2) or isinstance(fill, fx.Node):
        return None
    ends = [*pad, *[0] * (6 - len(pad))]
    # torch names the last side first.
    before, after = ends[4::-2], ends[5::-2]
    sides = zip(_sides(shape), before, after, strict=True)
    tables = [_padded(size, front, behind, mode) for size, front, behind in sides]
    return PixelMove((tables[0], tables[1], tables[2]), float(fill or 0.0))


def _padded(size: int, front: int, behind: int, mode: str) -> Tensor:
    places = torch.arange(-front, size + behind)
    if mode == "replicate":
        return places.clamp(0, size - 1)
    if mode == "circular":
        # What is cut off does not come back on the other side.
        first, end = max(-front, 0), size - max(-behind, 0)
        return first + (places - first) % max(end - first, 1)
    if mode == "reflect":
        return size - 1 - (size - 1 - places.abs()).abs()
    return torch.where((places >= 0) & (places < size), places, OUTSIDE)


def sliced(index: Any, shape: Shape) -> PixelMove | None:
    """`x[index]` where it takes some frames, lines or columns and all images and channels."""
    given = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in given:
        place = given.index(Ellipsis)
        given[place : place + 1] = [slice(None)] * (len(shape) - len(given) + 1)
    known = all(isinstance(one, slice) and _is_plain(one) for one in given)
    if not known or len(given) > len(shape) or any(one != slice(None) for one in given[:2]):
        return None
    given += [slice(None)] * (len(shape) - len(given))
    return _by_side(shape, lambda size, place: torch.arange(size)[given[place]])


def _is_plain(one: slice) -> bool:
    return not any(isinstance(end, fx.Node) for end in (one.start, one.stop, one.step))


def repeated(sizes: Any, shape: Shape) -> PixelMove | None:
    """`x.repeat(sizes)` of frames, lines and columns."""
    plain = isinstance(sizes, (tuple, list)) and all(type(one) is int for one in sizes)
    if not plain or len(sizes) != len(shape) or list(sizes[:2]) != [1, 1]:
        return None
    return _by_side(shape, lambda size, place: torch.arange(size).repeat(sizes[place]))


def each_repeated(count: Any, dim: Any, shape: Shape) -> PixelMove | None:
    """`x.repeat_interleave(count, dim)`: each frame, line or column so often in a row."""
    if type(count) is not int or type(dim) is not int or dim % len(shape) < 2:
        return None

    def table(size: int, place: int) -> Tensor:
        return torch.arange(size).repeat_interleave(count if place == dim % len(shape) else 1)

    return _by_side(shape, table)


def flipped(dims: Any, shape: Shape) -> PixelMove | None:
    """`x.flip(dims)` along frames, lines and columns."""
    if not isinstance(dims, (tuple, list)) or not all(type(dim) is int for dim in dims):
        return None
    places = {dim % len(shape) for dim in dims}
    if places & {0, 1}:
        return None
    return _by_side(
        shape,
        lambda size, place: torch.arange(size).flip(0) if place in places else torch.arange(size),
    )


def nearest(given: Given, shape: Shape, wanted: Shape) -> PixelMove | None:
    """`F.interpolate` of volumes that takes the nearest pixel."""
    factor = None if given.get("recompute_scale_factor") else given.get("scale_factor")
    factors = factor if isinstance(factor, (tuple, list)) else (factor,) * 3
    mode = given.get("mode", "nearest")
    if len(shape) != 5 or mode not in ("nearest", "nearest-exact"):
        return None

    def table(size: int, place: int) -> Tensor:
        scale = factors[place - 2]
        wide = None if scale is None else float(scale)
        return nearest_places(size, wanted[place], wide, exact=mode == "nearest-exact").long()

    return _by_side(shape, table)


def joined(shapes: Sequence[Shape], dim: int) -> list[PixelMove]:
    """`torch.cat` along frames, lines or columns: for each part, where it goes."""
    whole, found, first = sum(shape[dim] for shape in shapes), [], 0
    for shape in shapes:
        table = torch.full((whole,), LEFT)
        table[first : first + shape[dim]] = torch.arange(shape[dim])
        first += shape[dim]
        found.append(_by_side(shape, partial(_one_of, table, dim)))
    return found


def _one_of(table: Tensor, dim: int, size: int, place: int) -> Tensor:
    return table if place == dim else torch.arange(size)


def emit_moved(moved: PixelMove, shape: Shape, wanted: Shape) -> Callable[..., Buffer]:
    """Add the step on an input of this shape, whose result has the shape `wanted`."""

    def emit(builder: Builder, constants: None, x: Buffer) -> Buffer:
        y = builder.buffer(wanted)
        builder.add(partial(moved.step, shape), x, y)
        return y

    return emit


def emit_joined(shapes: Sequence[Shape], dim: int, wanted: Shape) -> Callable[..., Buffer]:
    """Add a step for each part of a concatenation along frames, lines or columns."""
    parts = joined(shapes, dim)

    def emit(builder: Builder, constants: None, *buffers: Buffer) -> Buffer:
        y = builder.buffer(wanted)
        for moved, shape, x in zip(parts, shapes, buffers, strict=True):
            builder.add(partial(moved.step, shape), x, y)
        return y

    return emit


def _by_side(shape: Shape, table: Callable[[int, int], Tensor]) -> PixelMove:
    """A table for each side, from its size and the number of its dimension."""
    first = len(shape) - 3
    sizes = zip(_sides(shape), range(first, first + 3), strict=True)
    frames, rows, columns = (
        table(size, place) if place > 1 else torch.arange(1) for size, place in sizes
    )
    return PixelMove((frames, rows, columns))


def _sides(shape: Shape) -> tuple[int, int, int]:
    """Frames, lines and columns; an image is one frame."""
    return (1, *shape[2:]) if len(shape) == 4 else shape[2:]  # type: ignore[return-value]
