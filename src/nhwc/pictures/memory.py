"""What a picture of a tensor shows: which of its numbers lies in which place of its storage.

A place is worth one number; the first place of the storage is 0. All follows from shape, strides
and offset, so a picture reads no number, and a tensor on the meta device has one too.

A large tensor is drawn by a corner of it: the first few indices of every dimension.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..errors import InputError
from ..formats import CHANNELS_LAST_OF, Format, format_of, strides_of

DRAWN = 36
"""The most numbers that are drawn: the eye still finds each of them."""

WIDEST = 12
"""The most numbers of a row that are drawn."""

HOLES = 8
"""The most places in a row that are drawn although none of the tensor's numbers lies there."""

NAMES = {4: tuple("NCHW"), 5: tuple("NCDHW")}
"""What torch calls the dimensions of images and clips; of others it does not know."""


@dataclass(frozen=True)
class Axis:
    """A dimension: how many indices it has, how many places a step takes, how many are drawn."""

    name: str
    size: int
    stride: int
    drawn: int


@dataclass(frozen=True)
class Cell:
    """A number that is drawn: counted from 0 as the indices go, the last index fastest."""

    number: int
    index: tuple[int, ...]
    place: int
    hue: int
    """The index of its channel, which gives it its colour."""
    shade: float
    """Where in its channel it lies, from 0 to 1."""


@dataclass(frozen=True)
class Panel:
    """A grid of rows: the last two dimensions, where all others have one index."""

    title: str
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class Shelf:
    """Panels side by side: the last three dimensions, where all others have one index."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Stretch:
    """Places side by side, each with the cells that share it; `[]` is of others, or of nobody."""

    place: int
    cells: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class Memory:
    """How a tensor lies in its storage."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    places: int
    """How many numbers the storage has room for."""
    item_bytes: int
    dtype: str
    device: str
    format: Format
    names: tuple[str, ...]
    """What the dimensions are called."""

    def to_dict(self) -> dict[str, object]:
        return {**asdict(self), "format": str(self.format)}

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The dimensions, outermost first."""
        fields = zip(self.names, self.shape, self.strides, self.corner, strict=True)
        return tuple(itertools.starmap(Axis, fields))

    @cached_property
    def corner(self) -> tuple[int, ...]:
        """How many indices of each dimension are drawn, all or the first few.

        The channels come first, since they are what the formats differ in, and further images last.
        """
        drawn = [min(size, 1) for size in self.shape]
        most = [*self.shape[:-1], *(min(size, WIDEST) for size in self.shape[-1:])]
        pixels = [dim for dim in reversed(range(len(drawn))) if dim not in (0, self.channel)]
        for dims in ([self.channel, *pixels], [0]):
            before = None
            while drawn != before:
                before = drawn
                for dim in dims[: len(drawn)]:
                    wider = [size + (i == dim) for i, size in enumerate(drawn)]
                    if drawn[dim] < most[dim] and math.prod(wider) <= DRAWN:
                        drawn = wider
        return tuple(drawn)

    @property
    def channel(self) -> int:
        """The dimension that the colours tell apart: the channels where they are known."""
        return self.names.index("C") if "C" in self.names else 0

    @property
    def order(self) -> tuple[str, ...]:
        """The names of the dimensions that memory has an order of, the densest first."""
        axes = [axis for axis in self.axes if axis.size > 1 and axis.stride]
        return tuple(axis.name for axis in sorted(axes, key=lambda axis: axis.stride))

    @property
    def is_whole(self) -> bool:
        """Whether all numbers are drawn, rather than a corner."""
        return self.corner == self.shape

    @cached_property
    def cells(self) -> tuple[Cell, ...]:
        """The numbers that are drawn, in the order of their indices."""
        within = [size for dim, size in enumerate(self.corner) if dim != self.channel]
        last = max(1, math.prod(within) - 1)
        found = []
        for number, index in enumerate(itertools.product(*map(range, self.corner))):
            place = self.offset + sum(i * step for i, step in zip(index, self.strides, strict=True))
            others = [i for dim, i in enumerate(index) if dim != self.channel]
            position = 0
            for i, size in zip(others, within, strict=True):
                position = position * size + i
            hue = index[self.channel] if index else 0
            found.append(Cell(number, index, place, hue, position / last))
        return tuple(found)

    @cached_property
    def runs(self) -> tuple[Stretch, ...]:
        """The storage where the drawn numbers lie, from its front to its back."""
        at: dict[int, list[Cell]] = {}
        for cell in self.cells:
            at.setdefault(cell.place, []).append(cell)
        runs: list[list[int]] = []
        for place in sorted(at):
            if runs and place - runs[-1][-1] <= HOLES + 1 and self._is_empty(runs[-1][-1], place):
                runs[-1] += range(runs[-1][-1] + 1, place + 1)
            else:
                runs.append([place])
        return tuple(Stretch(run[0], tuple(tuple(at.get(p, ())) for p in run)) for run in runs)

    def _is_empty(self, first: int, second: int) -> bool:
        """Whether none of the tensor's numbers lies between the two places."""
        return not any(self._is_used(place) for place in range(first + 1, second))

    def _is_used(self, place: int) -> bool:
        """Whether one of the tensor's numbers may lie in a place.

        Each stride divides what the larger ones left. That is the answer where no dimension reaches
        into the next step of another; where one does, as in overlapping windows, it is not known.
        """
        axes = [axis for axis in self.axes if axis.size > 1 and axis.stride]
        left, reach = place - self.offset, 0
        for axis in sorted(axes, key=lambda axis: axis.stride):
            if axis.stride <= reach:
                return True
            reach += (axis.size - 1) * axis.stride
        for axis in sorted(axes, key=lambda axis: -axis.stride):
            left -= min(left // axis.stride, axis.size - 1) * axis.stride
        return left == 0

    @property
    def shelves(self) -> tuple[Shelf, ...]:
        """The drawn numbers by their indices."""
        sizes = (1, 1, 1, *self.corner)
        columns, rows = sizes[-1], sizes[-2]
        names = [axis.name for axis in self.axes[:-2]]
        grids: dict[tuple[int, ...], list[Cell]] = {}
        for cell in self.cells:
            grids.setdefault(cell.index[:-2], []).append(cell)
        shelves: dict[str, list[Panel]] = {}
        for head, cells in grids.items():
            lines = [tuple(cells[row * columns :][:columns]) for row in range(rows)]
            panel = Panel(_indices(names[-1:], head[-1:]), tuple(lines))
            shelves.setdefault(_indices(names[:-1], head[:-1]), []).append(panel)
        return tuple(Shelf(title, tuple(panels)) for title, panels in shelves.items())

    @property
    def words(self) -> tuple[str, ...]:
        """What there is to say about it, in sentences."""
        return tuple(self._sentences())

    def _sentences(self) -> Iterator[str]:
        if not math.prod(self.shape):
            yield "It holds no numbers, so there is nothing to draw."
            return
        if not self.is_whole:
            corner = "x".join(map(str, self.corner))
            yield f"Drawn is a corner of it, {corner} of {'x'.join(map(str, self.shape))}."
        yield from self._order()
        yield from self._density()
        if self.device == "meta":
            yield "It is on the meta device: no memory stands behind it."

    def _order(self) -> Iterator[str]:
        if self.format is Format.AMBIGUOUS:
            yield from self._ambiguity()
        if len(self.order) > 1:
            yield f"Densest first: {', '.join(self.order)}."
        if len(self.shape) == 3:
            yield "With three dimensions torch knows no channels last: there are strides alone."

    def _ambiguity(self) -> Iterator[str]:
        last = CHANNELS_LAST_OF[len(self.shape)]
        channel, *pixels = self.axes[1:]
        ones = [channel] if channel.size == 1 else []
        ones += pixels if all(axis.size == 1 for axis in pixels) else []
        are = f"{_listed([axis.name for axis in ones])} {'is' if len(ones) == 1 else 'are'} 1"
        yield f"The format is ambiguous: {are}, so contiguous and {last} are the same order."
        written = [
            str(format)
            for format in (Format.CONTIGUOUS, last)
            if strides_of(self.shape, format) == self.strides
        ]
        if written:
            yield f"Its strides are written as {' and as '.join(written)} would write them."

    def _density(self) -> Iterator[str]:
        shared = [a.name for a in self.axes if a.size > 1 and not a.stride]
        count = math.prod(self.shape)
        span = 1 + sum((a.size - 1) * a.stride for a in self.axes)
        if shared:
            yield f"All indices of {_listed(shared)} share the same places: the stride is 0."
        elif count > span:
            yield f"Its {count} numbers share {span} places: some have several indices."
        elif count < span:
            yield f"Its {count} numbers are spread over {span} places: it is not dense."


def _indices(names: Sequence[str], index: Sequence[int]) -> str:
    return ", ".join(f"{name} {i}" for name, i in zip(names, index, strict=True))


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def memory_of(tensor: Tensor, names: Sequence[str] = ()) -> Memory:
    """Look at how a tensor lies in its storage; `names` are those of its dimensions.

    >>> memory = memory_of(torch.empty(1, 2, 1, 2).to(memory_format=torch.channels_last))
    >>> [cell.place for cell in memory.cells]
    [0, 2, 1, 3]
    """
    format = format_of(tensor)
    if tensor.is_nested or tensor.layout is not torch.strided:
        kind = "a nested tensor" if tensor.is_nested else f"a tensor of layout {tensor.layout}"
        way = ".to_padded_tensor(0)" if tensor.is_nested else ".to_dense()"
        raise InputError(f"{kind} has no strides to draw. Call {way} first.")
    return Memory(
        tuple(tensor.shape),
        tuple(tensor.stride()),
        int(tensor.storage_offset()),
        _storage_bytes(tensor) // tensor.element_size(),
        tensor.element_size(),
        str(tensor.dtype).removeprefix("torch."),
        str(tensor.device),
        format,
        tuple(names) or NAMES.get(tensor.ndim, tuple(f"dim {i}" for i in range(tensor.ndim))),
    )


def _storage_bytes(tensor: Tensor) -> int:
    with contextlib.suppress(NotImplementedError, RuntimeError):
        if not is_traceable_wrapper_subclass(tensor):
            return tensor.untyped_storage().nbytes()
    raise InputError(
        f"this {type(tensor).__name__} has no memory of its own: it stands for other tensors. Draw "
        "those, such as x.to_local() of a distributed one, or the one that went into torch.vmap."
    )
