"""The nouns that a computation on channels-last memory is made of: views, scratch and steps.

A `Step` says which compiled kernel runs and what it is given; its arguments may still be symbolic.
The same step serves a single operator, whose views lie in tensors and are bound at once, and a
whole program, whose views lie in buffers that get their place when the arena is planned.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ...errors import InputError
from ..language.compiler import Kernel, Kernels


@dataclass(frozen=True)
class View:
    """Float32 pixels in memory: `pixel` floats from one to the next, `shape[1]` of them used.

    Rows and images follow each other without a gap, so one number says how they lie. A view of
    some channels of a larger image has that image's `pixel` and starts `offset` floats into it.

    >>> View(None, (1, 8, 4, 4), pixel=24, offset=16).row
    96
    """

    buffer: object
    shape: tuple[int, int, int, int]
    pixel: int
    offset: int = 0

    @property
    def row(self) -> int:
        return self.shape[3] * self.pixel

    @property
    def pixels(self) -> int:
        return self.shape[0] * self.shape[2] * self.shape[3]

    @property
    def floats(self) -> int:
        """How many floats lie from where it begins to where its last channel ends."""
        return (self.pixels - 1) * self.pixel + self.shape[1] if self.pixels else 0

    @property
    def dense(self) -> bool:
        """Whether the channels of one pixel end where the next one begins."""
        return self.pixel == self.shape[1] or self.pixels == 1

    def channels(self, begin: int, end: int) -> View:
        """The channels from `begin` up to `end`, in place."""
        n, _, h, w = self.shape
        return View(self.buffer, (n, end - begin, h, w), self.pixel, self.offset + begin)

    def as_images(self, n: int, h: int, w: int) -> View:
        """The same pixels, counted as `n` images of `h` x `w`."""
        seen = replace(self, shape=(n, self.shape[1], h, w))
        if seen.pixels != self.pixels:
            raise _strangers(seen, self)
        return seen

    def as_numbers(self, n: int, c: int, h: int, w: int) -> View:
        """The same numbers, which lie without gaps, counted as images of `c` channels."""
        seen = View(self.buffer, (n, c, h, w), c, self.offset)
        if not self.dense or seen.floats != self.floats:
            raise _strangers(seen, self)
        return seen


def held(table: Tensor, room: int, *, before: int = 0, behind: int = 1, signs: int = 0) -> Tensor:
    """`table` as kernels read it, once it is sure that what it names is theirs.

    From `before` each of its numbers (0 or less) up to `behind` all lies in `room`. The numbers
    from -`signs` to -1 name nothing.

    >>> import torch
    >>> held(torch.tensor([0, 4]), 8, behind=4).tolist()
    [0, 4]
    """
    least, most = (int(table.min()), int(table.max())) if table.numel() else (-before, -1)
    if least + (signs or before) < 0 or (most >= 0 and most + behind > room):
        raise InputError(
            f"a table of {tuple(table.shape)} names what lies outside of {room} numbers, where a "
            "kernel would read or write the memory of others. Report this model."
        )
    return table.long().contiguous()


def covers(one: View, other: View) -> None:
    """Make sure that `one` has the pixels of `other`, and no fewer channels.

    >>> covers(View(None, (1, 8, 2, 2), 8), View(None, (2, 4, 2, 1), 8))
    """
    if one.pixels != other.pixels or one.shape[1] < other.shape[1]:
        raise _strangers(one, other)


def sharing(one: View, whole: View) -> int:
    """How many neighbouring pixels of `whole` stand beside each pixel of `one`.

    >>> sharing(View(None, (2, 8, 1, 1), 8), View(None, (2, 8, 3, 3), 8))
    9
    """
    share, rest = divmod(whole.pixels, one.pixels) if one.pixels else (1, whole.pixels)
    if rest or one.shape[1] < whole.shape[1]:
        raise _strangers(one, whole)
    return share


def _strangers(one: View, other: View) -> InputError:
    return InputError(
        f"a view of {one.shape} stands beside one of {other.shape}: a kernel would read or "
        "write the memory of others. Report this model."
    )


def pixelwise(x: View, y: View) -> dict[str, Argument]:
    """The arguments of a kernel that makes of each pixel of `x` the one of `y` in its place."""
    covers(y, x)
    return {"x": x, "x_pixel": x.pixel, "pixels": x.pixels, "c": x.shape[1]}


def view_of(tensor: Tensor) -> View | None:
    """The view of a float32 tensor that lies channels last (or is a slice of one), or None.

    >>> import torch
    >>> image = torch.empty(2, 8, 4, 4).to(memory_format=torch.channels_last)
    >>> view_of(image[:, 2:5]).pixel, view_of(torch.empty(2, 8, 4, 4))
    (8, None)
    """
    if tensor.ndim == 2:
        tensor = tensor[:, :, None, None]
    n, c, h, w = tensor.shape
    strides = tensor.stride()
    pixel = next((s for s, size in zip((3, 2, 0), (w, h, n), strict=True) if size > 1), None)
    if pixel is None:
        floats = c
    else:
        floats = strides[pixel] // {3: 1, 2: w, 0: h * w}[pixel]
    wanted = (h * w * floats, 1, w * floats, floats)
    fits = all(
        size <= 1 or have == want
        for size, have, want in zip(tensor.shape, strides, wanted, strict=True)
    )
    return View(tensor, (n, c, h, w), floats) if fits and floats >= c else None


@dataclass(frozen=True, eq=False)
class Scratch:
    """Memory that a step needs while it runs; the same object in two steps is the same memory."""

    bytes: int
    per_thread: bool = False


Argument = int | float | Tensor | View | Scratch | Kernels | None
"""Kernels are given to one that calls them."""


@dataclass(frozen=True)
class Access:
    """Channels `begin` to `end` of a buffer's pixels, or a whole scratch, and whether a step writes
    them. A pixel has so many floats; the last of all those used lies in front of `last`."""

    item: object
    begin: int
    end: int
    writes: bool
    pixel: int = 1
    last: int = 1

    def meets(self, other: Access) -> bool:
        """Whether both may use the same number."""
        if self.item is not other.item:
            return False
        if self.pixel == other.pixel:
            return self.begin < other.end and other.begin < self.end
        # Of pixels that are counted otherwise, channels tell nothing.
        return self.begin < other.last and other.begin < self.last


@dataclass(frozen=True)
class Step:
    """One kernel and what it is given, in the order of its fields.

    Whatever view is given as `y` is written, all others are only read. Its work comes in `pieces`,
    each of which takes long enough to be claimed for itself.
    """

    kernel: Kernel
    args: tuple[Argument, ...]
    pieces: int = 1

    def __post_init__(self) -> None:
        if len(self.args) != len(self.kernel.fields):
            raise InputError(
                f"kernel {self.kernel.name} has {len(self.kernel.fields)} fields and got "
                f"{len(self.args)} arguments. Give one for each of {self.kernel.fields}."
            )

    @property
    def given(self) -> dict[str, Any]:
        """The arguments by the names of the kernel's fields."""
        return dict(zip(self.kernel.fields, self.args, strict=True))

    def but(self, **others: Argument) -> Step:
        """The same step with some arguments replaced."""
        return replace(self, args=tuple((self.given | others).values()))

    def disturbs(self, other: Step) -> bool:
        """Whether the two must not run at the same time: one writes what the other uses."""
        return any((a.writes or b.writes) and a.meets(b) for a in self.uses for b in other.uses)

    @property
    def uses(self) -> tuple[Access, ...]:
        """The buffers and scratch among the arguments."""
        found = []
        for name, argument in self.given.items():
            if isinstance(argument, View):
                begin, end = argument.offset, argument.offset + argument.shape[1]
                place = argument.buffer, begin, end, name == "y", argument.pixel
                found.append(Access(*place, begin + argument.floats))
            elif isinstance(argument, Scratch):
                found.append(Access(argument, 0, 1, True))
        return tuple(found)


_LEAST = 1 << 22
"""The multiply-adds that a piece of work takes at least: some thirty microseconds."""


def pieces_of(units: int, products: int) -> int:
    """In how many pieces work comes that is cut into `units`, all in all of `products`."""
    return max(1, min(units, products // _LEAST))


def step(kernel: Kernel, pieces: int = 1, /, **args: Argument) -> Step:
    """A step whose arguments are given by the names of the kernel's fields."""
    if set(args) != set(kernel.fields):
        wrong = ", ".join(sorted(set(args) ^ set(kernel.fields)))
        raise InputError(f"kernel {kernel.name} has the fields {kernel.fields}; check {wrong}.")
    return Step(kernel, tuple(args[name] for name in kernel.fields), pieces)


def bits(value: float) -> int:
    """The bits of a float32, as kernels receive it: of infinity for what float32 cannot hold.

    >>> hex(bits(1.0)), bits(1e39) == bits(float("inf"))
    ('0x3f800000', True)
    """
    return ctypes.c_int32.from_buffer(ctypes.c_float(value)).value


def bind(args: Iterable[Argument], address: Callable[[object], int]) -> list[int]:
    """The int64 that a kernel receives; `address` tells where a buffer or a scratch begins."""
    numbers = []
    for argument in args:
        if isinstance(argument, View):
            numbers.append(address(argument.buffer) + 4 * argument.offset)
        elif isinstance(argument, Scratch):
            numbers.append(address(argument))
        elif isinstance(argument, Kernels):
            numbers.append(argument.address)
        elif isinstance(argument, Tensor):
            numbers.append(argument.data_ptr())
        elif isinstance(argument, float):
            numbers.append(bits(argument))
        else:
            numbers.append(argument or 0)
    return numbers
