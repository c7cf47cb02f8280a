"""Tokens that were moved on paper: shapes and orders change for free until a kernel reads them.

`reshape`, `permute`, windows, rolls, padding and slices compute nothing. So a program notes where
each number of their result lies, by moving the numbers of the places as torch would move the data:

    rows of a buffer       x.view(2, 2, 3).transpose(0, 1)      where (one number for each element)
    0  1  2                                                     0  1  2 |  6  7  8
    3  4  5        ----------------------------------->         3  4  5 |  9 10 11
    6  7  8
    9 10 11

Movements follow one another without limit, and many end where they began: windows of attention are
partitioned, rolled, reversed and rolled back. A kernel that treats each row alone computes rows in
the order in which they lie, and its result is moved as its input was. Attention reads heads through
tables. Only who needs another order than there is has the rows gathered, by one step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..layers.gather import gather_step, runs_of
from ..tape.steps import Step, View
from .builder import Buffer, Builder, Shape, four


@dataclass(frozen=True, eq=False)
class Moved:
    """A tensor whose numbers lie in `buffer`.

    `where` has the tensor's shape. It counts the channels of the first pixel, then those of the
    next; -1 stands for a zero that lies nowhere.
    """

    buffer: Buffer
    where: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.where.shape)


def as_image(buffer: Buffer, shape: Sequence[int]) -> Moved:
    """The tensor of this shape that `buffer` holds as programs hold it: images channels last."""
    return Moved(buffer, _image_places(shape))


def as_rows(buffer: Buffer, shape: Sequence[int]) -> Moved:
    """The tensor of this shape whose last dimension is that of the channels of `buffer`."""
    return Moved(buffer, _count(math.prod(shape)).view(tuple(shape)))


def rows_of(shape: Sequence[int]) -> tuple[int, int]:
    """The shape of a buffer that holds a tensor as rows of its last dimension; a number is one."""
    return math.prod(shape[:-1]), shape[-1] if shape else 1


def room(builder: Builder, shape: Sequence[int]) -> Buffer:
    """A buffer for a tensor as rows of its last dimension."""
    return builder.buffer(shape if len(shape) in (2, 3) else rows_of(shape))


def room_like(builder: Builder, x: Moved, shape: Sequence[int]) -> Moved:
    """Room for a tensor of this shape whose numbers lie side by side along the dimension in which
    those of `x` do: then pieces of `x` are copied as they are."""
    dims = [*range(len(shape))]
    dense = (dim for dim in dims[::-1] if x.shape[dim] > 1 and runs_on(x.where.movedim(dim, -1)))
    last = dims.pop(next(dense, -1))
    turned = [shape[dim] for dim in (*dims, last)]
    rows = as_rows(room(builder, turned), turned)
    return Moved(rows.buffer, rows.where.movedim(-1, last))


def settled(builder: Builder, x: Moved) -> Buffer:
    """The tensor as programs hold it, at no cost if it lies so."""
    shape = four(x.shape)
    order = _image_order(x.where)
    return _laid(builder, Moved(x.buffer, order.reshape(-1, shape[1])), shape)


def settled_rows(builder: Builder, x: Moved) -> Buffer:
    """The tensor as rows of its last dimension, at no cost if it lies so."""
    rows = x.where.reshape(rows_of(x.shape))
    return _laid(builder, Moved(x.buffer, rows), four(x.shape if x.where.ndim == 3 else rows.shape))


@dataclass(frozen=True, eq=False)
class RowsInOrder:
    """A tensor as rows in some order: `order` says which row of `buffer` each row of it is."""

    buffer: Buffer
    order: Tensor


def rows_anyhow(builder: Builder, x: Moved) -> RowsInOrder:
    """The rows of the last dimension in the order in which they lie, gathered if they do not."""
    count, width = rows_of(x.shape)
    where = x.where.reshape(count, width)
    if x.buffer.shape[1] == width and width * count == _size(x) and runs_on(where):
        order = where[:, 0] // width
        if _counts_each(order):
            return RowsInOrder(x.buffer, order)
    return RowsInOrder(settled_rows(builder, x), _count(count))


def in_order(builder: Builder, x: Moved, order: Tensor) -> Buffer:
    """The rows of the last dimension of `x`, put where `order` has each of them."""
    count, width = rows_of(x.shape)
    where = x.where.reshape(count, width)[order.long().argsort()]
    return _laid(builder, Moved(x.buffer, where), (count, width, 1, 1))


def from_rows(rows: RowsInOrder, shape: Sequence[int]) -> Moved:
    """The tensor of this shape whose rows, in `order`, the buffer has."""
    width = shape[-1]
    if _counts(rows.order):
        return as_rows(rows.buffer, shape)
    return Moved(rows.buffer, (rows.order[:, None] * width + _count(width)).view(*shape))


def channels_of(builder: Builder, x: Moved) -> Buffer | None:
    """Images a pixel wide whose channels are the lines of the last dimension of `x`, in order.

    None if they lie otherwise.

    >>> builder = Builder()
    >>> tokens = as_rows(builder.buffer((2, 5, 12)), (2, 5, 3, 4))
    >>> middle = Moved(tokens.buffer, tokens.where[:, :, 1].transpose(1, 2))
    >>> channels_of(builder, middle).shape
    (2, 4, 5, 1)
    >>> channels_of(builder, Moved(tokens.buffer, tokens.where)) is None
    True
    """
    area, width = x.shape[-1], x.buffer.shape[1]
    images, left = divmod(math.prod(x.buffer.shape) // width, max(area, 1))
    if left or area < 2 or not x.where.numel():
        return None
    lines = x.where.reshape(-1, area)
    if len(lines) % images or int(lines[0, 0]) < 0:
        return None
    first, count = int(lines[0, 0]), len(lines) // images
    pixels = _count(images * area).view(images, 1, area) * width
    if first + count > width or not torch.equal(
        lines.view(images, count, area), first + _count(count)[:, None] + pixels
    ):
        return None
    image = builder.reshaped(x.buffer, (images, width, area, 1))
    return image if count == width else builder.slice(image, first, first + count)


def is_everything(x: Moved) -> bool:
    """Whether each number of the buffer is a number of the tensor just once."""
    return x.where.numel() == _size(x) and _counts_each(x.where)


def like(builder: Builder, x: Moved, leader: Moved) -> Buffer:
    """The numbers of `x` in the order in which those of `leader` fill its buffer.

    Dimensions of `x` that have one place have it for all places of that dimension of `leader`.
    """
    where = x.where.expand(leader.shape)
    # A buffer may hold more: what was split is the beginning of a whole.
    alone = x.buffer.shape[1] == leader.buffer.shape[1] and where.numel() == _size(x)
    if alone and torch.equal(where, leader.where):
        return x.buffer
    order = torch.empty(where.numel(), dtype=where.dtype)
    order[leader.where.reshape(-1).long()] = where.reshape(-1)
    shape = leader.buffer.shape
    return _laid(builder, Moved(x.buffer, order.view(-1, shape[1])), shape)


@dataclass(frozen=True, eq=False)
class Heads:
    """Images, heads, tokens, channels: where the first head of each token begins in `buffer`, and
    by how many channels and pixels the next one lies further."""

    buffer: Buffer
    first: Tensor
    channels: int
    pixels_apart: int

    def lie(self, view: View) -> tuple[Tensor, int]:
        """The same in floats of `view`."""
        return offsets(view, self.first), self.channels + self.pixels_apart * view.pixel

    def pixels(self) -> Tensor | None:
        """The pixel of each token, if these are all pixels of the buffer, each once."""
        rows = self.first.long() // self.buffer.shape[1]
        n, _, h, w = self.buffer.shape
        alone = rows.numel() == n * h * w and _counts_each(rows)
        return rows if alone and not self.pixels_apart else None


def heads_of(builder: Builder, x: Moved) -> Heads:
    """Images, heads, tokens, channels as attention reads them, gathered if they lie otherwise."""
    found = _heads(x)
    if found is None:
        rows = as_rows(settled_rows(builder, x), x.shape)
        found = _heads(rows)
        assert found is not None
    return found


def _heads(x: Moved) -> Heads | None:
    width, depth = x.buffer.shape[1], x.shape[3]
    begins = x.where[..., 0].long()
    within = bool((begins % width + depth <= width).all() and (begins >= 0).all())
    if not within or not runs_on(x.where):
        return None
    first = begins[:, 0]
    apart = int(begins[0, 1, 0] - begins[0, 0, 0]) if x.shape[1] > 1 else 0
    steps = torch.arange(x.shape[1]) * apart
    if not torch.equal(begins, first[:, None] + steps[:, None]):
        return None
    if apart % width == 0:
        return Heads(x.buffer, first.reshape(-1), 0, apart // width)
    together = bool((begins // width == (first // width)[:, None]).all())
    return Heads(x.buffer, first.reshape(-1), apart, 0) if together else None


def in_one_buffer(parts: Sequence[Moved]) -> Buffer | None:
    """The buffer that has the numbers of all parts, whose places can be joined on paper.

    None if there are several. Zeros that lie nowhere go with any.
    """
    found = {one.buffer for one in parts if bool((one.where >= 0).any())} or {parts[0].buffer}
    return found.pop() if len(found) == 1 else None


def joined(builder: Builder, parts: Sequence[Moved], dim: int) -> Moved:
    """The parts one after the other along a dimension: on paper, or gathered into one buffer."""
    buffer = in_one_buffer(parts)
    if buffer is not None:
        return Moved(buffer, torch.cat([part.where for part in parts], dim))
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    widths = {part.buffer.shape[1] for part in parts}
    if len(widths) == 1 and all(is_everything(one) and not runs_on(one.where) for one in parts):
        return _buffers_joined(builder, parts, dim)
    whole = room_like(builder, parts[0], shape)
    begin = 0
    for part in parts:
        length = part.shape[dim]
        place(builder, part, Moved(whole.buffer, whole.where.narrow(dim, begin, length)))
        begin += length
    return whole


def _buffers_joined(builder: Builder, parts: Sequence[Moved], dim: int) -> Moved:
    """Whole buffers one after the other, whose numbers keep their order, say that of pixels."""
    width, sizes = parts[0].buffer.shape[1], [part.where.numel() for part in parts]
    whole = builder.buffer((sum(sizes) // width, width))
    found, begin = [], 0
    for part, size in zip(parts, sizes, strict=True):
        place(builder, Moved(part.buffer, _count(size)), Moved(whole, begin + _count(size)))
        found.append(begin + part.where)
        begin += size
    return Moved(whole, torch.cat(found, dim))


def place(builder: Builder, x: Moved, into: Moved) -> None:
    """Copy the numbers of `x` to where `into` has them."""
    floats = math.gcd(_piece(x), _piece(into))
    pieces = [one.where.reshape(-1, floats)[:, 0] for one in (x, into)]

    def make(source: View, target: View) -> Step:
        sources, targets = offsets(source, pieces[0]), offsets(target, pieces[1])
        return gather_step(source, target, sources, targets, floats)

    builder.add(make, x.buffer, into.buffer)


def offsets(view: View, places: Tensor) -> Tensor:
    """The floats from the begin of a view to `places` in it, which may have gaps between pixels."""
    places, width = places.long(), view.shape[1]
    if view.dense:
        return places
    found = places // width * view.pixel + places % width
    return torch.where(places < 0, -1, found)


def runs_on(where: Tensor) -> bool:
    """Whether the numbers along the last dimension lie side by side."""
    return bool((where[..., 1:] == where[..., :-1] + 1).all())


def _laid(builder: Builder, x: Moved, shape: Shape) -> Buffer:
    """Rows of channels, in the order in which they shall lie, as a buffer of this shape."""
    if x.buffer.shape[1] == shape[1] and x.where.numel() == _size(x) and _counts(x.where):
        return recast(x.buffer, shape)
    y = builder.buffer(shape)
    place(builder, x, Moved(y, _count(x.where.numel()).view(x.where.shape)))
    return y


def recast(buffer: Buffer, shape: Shape) -> Buffer:
    """The same pixels, counted as rows and columns of another image."""
    return buffer if buffer.shape == shape else Buffer(shape, buffer, 0, movable=False)


def _size(x: Moved) -> int:
    return math.prod(x.buffer.shape)


def _count(number: int) -> Tensor:
    return torch.arange(number, dtype=torch.int32)


def _counts(where: Tensor) -> bool:
    """Whether `where` counts from zero on."""
    return bool((where.reshape(-1) == _count(where.numel())).all())


def _counts_each(order: Tensor) -> bool:
    """Whether `order` has each number from zero on once."""
    seen = torch.zeros(order.numel(), dtype=torch.bool)
    if order.numel() and (order.min() < 0 or order.max() >= order.numel()):
        return False
    seen[order.reshape(-1).long()] = True
    return bool(seen.all())


def _piece(x: Moved) -> int:
    """The most floats that all pieces can have whose floats lie side by side within a pixel."""
    where = x.where.reshape(-1).numpy()
    both_lie = (where[1:] == where[:-1] + 1) & (where[1:] % x.buffer.shape[1] != 0)
    together = both_lie | ((where[1:] < 0) & (where[:-1] < 0))
    return runs_of(together)


def _image_places(shape: Sequence[int]) -> Tensor:
    """Where the numbers of an image or volume lie in channels last; of rows, as they are."""
    count = _count(math.prod(shape))
    if len(shape) not in (4, 5):
        return count.view(*shape)
    return count.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1)


def _image_order(where: Tensor) -> Tensor:
    """The places of a tensor's numbers in the order in which channels last has them."""
    return where.movedim(1, -1) if where.ndim in (4, 5) else where
