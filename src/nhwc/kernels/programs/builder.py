"""Write down a model as steps on symbolic buffers; `build` turns the list into a program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ...errors import InputError
from ...formats import Format
from ..layers.copies import nchw_step
from ..layers.elementwise import copy_step
from ..tape.steps import Step, View
from .pool import Pool
from .program import Program
from .schedule import Output

Shape = tuple[int, int, int, int]


@dataclass(eq=False)
class Buffer:
    """Pixels that some step writes: memory of its own, or some channels of another buffer.

    Where it lies may be decided after the steps that use it were added: `cat` moves its parts into
    the whole, which is how a concatenation costs nothing.
    """

    shape: Shape
    parent: Buffer | None = None
    offset: int = 0
    movable: bool = True

    @property
    def root(self) -> Buffer:
        """The buffer that it is a part of, as far as decided; itself, if of none."""
        return self if self.parent is None else self.parent.root

    @property
    def start(self) -> int:
        """The first of its channels within the root."""
        return 0 if self.parent is None else self.parent.start + self.offset

    @property
    def whole(self) -> Buffer | None:
        """The movable buffer whose pixels it counts otherwise, if it is no more than that."""
        parent = self.parent
        alike = parent is not None and parent.parent is None and parent.movable
        return parent if alike and parent and parent.shape[1] == self.shape[1] else None

    def view(self) -> View:
        return View(self.root, self.shape, self.root.shape[1], self.start)


Make = Callable[..., Step | Sequence[Step]]


@dataclass
class Builder:
    """Collects the steps of a model, in the order in which they run.

    >>> builder = Builder()
    >>> x = builder.input((1, 16, 8, 8))
    >>> left, right = builder.slice(x, 0, 8), builder.slice(x, 8, 16)
    >>> builder.output(builder.cat([right, left]))
    >>> swapped = builder.build()

    `swapped(tensor)` returns a list with one tensor.
    """

    _records: list[tuple[Make, tuple[Buffer, ...]]] = field(default_factory=list)
    _inputs: list[Buffer] = field(default_factory=list)
    _outputs: list[tuple[Buffer, tuple[int, ...], Format]] = field(default_factory=list)

    def input(self, shape: Sequence[int]) -> Buffer:
        """The next input: a tensor of this shape (N, C, H, W, a volume or rows), in any format.

        One that is given in another shape is seen as rows of its last dimension, if it has as many.
        """
        buffer = Buffer(four(shape), movable=False)
        self._inputs.append(buffer)
        return buffer

    def buffer(self, shape: Sequence[int]) -> Buffer:
        """Room for a result; write it before it is read."""
        return Buffer(four(shape))

    def add(self, make: Make, *buffers: Buffer) -> None:
        """Append the step or steps that `make(*views)` returns, once all places are decided."""
        self._records.append((make, buffers))

    def slice(self, source: Buffer, begin: int, end: int) -> Buffer:
        """The channels from `begin` up to `end` of a buffer, in place."""
        n, c, h, w = source.shape
        if not 0 <= begin < end <= c:
            raise InputError(f"channels {begin} to {end} of {c} do not exist.")
        return Buffer((n, end - begin, h, w), source, begin, movable=False)

    def reshaped(self, source: Buffer, shape: Sequence[int]) -> Buffer:
        """The same pixels counted as images of another number and size, in place."""
        return Buffer(four(shape), source, movable=False)

    def cat(self, parts: Sequence[Buffer]) -> Buffer:
        """The channels of all parts, one after the other; parts are moved here where they can be.

        A part stays where it is, and is copied, if it is an input, an output, a slice, or was asked
        to be dense. Parts that an earlier concatenation joined already move as that whole: so
        DenseNet's ever longer concatenations become one buffer.
        """
        n, _, h, w = parts[0].shape
        if any((p.shape[0], *p.shape[2:]) != (n, h, w) for p in parts):
            shapes = ", ".join(str(p.shape) for p in parts)
            raise InputError(f"only channels may differ in a concatenation; got {shapes}.")
        whole = self.buffer((n, sum(p.shape[1] for p in parts), h, w))
        offset = 0
        for part in _joined(parts):
            if part.movable:
                part.parent, part.offset, part.movable = whole, offset, False
            else:
                target = Buffer(part.shape, whole, offset, movable=False)
                self.add(copy_step, part, target)
            offset += part.shape[1]
        return whole

    def dense(self, source: Buffer) -> Buffer:
        """The same pixels with no gaps between them: the buffer itself, or a copy of a slice."""
        if source.parent is None:
            source.movable = False
            return source
        target = self.buffer(source.shape)
        target.movable = False
        self.add(copy_step, source, target)
        return target

    def output(
        self,
        source: Buffer,
        shape: Sequence[int] | None = None,
        format: Format = Format.CHANNELS_LAST,
    ) -> None:
        """Make a buffer the next output, as a tensor of this shape and format.

        Any `shape` other than the buffer's own is a view of the contiguous tensor, as `flatten`
        gives it. Without one, N, C, 1, 1 stays four-dimensional.
        """
        wanted = tuple(source.shape if shape is None else shape)
        n, c, h, w = source.shape
        same = len(wanted) in (3, 4, 5) and four(wanted) == source.shape
        rows = same and len(wanted) == 3
        planes = not rows and (format is Format.CONTIGUOUS or not same)
        if h * w > 1 and c > 1 and planes:
            target = self.buffer((n, c * h * w, 1, 1))
            self.add(nchw_step, source, target)
            format = Format.CONTIGUOUS
        elif source.movable:
            target = source
        elif source.whole is not None:
            target = source.whole
        else:
            target = self.buffer(source.shape)
            self.add(copy_step, source, target)
        target.movable = False
        self._outputs.append((target, wanted, format))

    def build(self, pool: Pool | None = None) -> Program:
        """Decide all places and return the program, which takes its memory from `pool`."""
        records = []
        for make, buffers in self._records:
            made = make(*(buffer.view() for buffer in buffers))
            records += [made] if isinstance(made, Step) else list(made)
        outputs = [Output(buffer.view(), shape, format) for buffer, shape, format in self._outputs]
        return Program(records, [b.view() for b in self._inputs], outputs, pool)


def _joined(parts: Sequence[Buffer]) -> Iterator[Buffer]:
    """The parts, where neighbours that fill a movable buffer are replaced by that buffer."""
    index = 0
    while index < len(parts):
        whole, end, filled = parts[index].root, index, 0
        while end < len(parts) and parts[end].root is whole and parts[end].start == filled:
            filled += parts[end].shape[1]
            end += 1
        if end > index and whole.movable and filled == whole.shape[1]:
            yield whole
            index = end
        else:
            yield parts[index]
            index += 1


def four(shape: Sequence[int]) -> Shape:
    """The shape as that of an image: channels are last in rows of numbers, with or without a batch.

    Of a volume the frames lie one below the other.

    >>> four((8, 16)), four((2, 7, 16)), four((2, 16, 3, 8, 8))
    ((8, 16, 1, 1), (2, 16, 7, 1), (2, 16, 24, 8))
    """
    if len(shape) == 5:
        n, c, d, h, w = shape
        return n, c, d * h, w
    if len(shape) == 3:
        n, h, c = shape
        return n, c, h, 1
    if len(shape) not in (2, 4):
        raise InputError(
            f"a buffer of shape {tuple(shape)}: give N, C or N, L, C or N, C, H, W, or a volume's."
        )
    n, c, h, w = (*shape, 1, 1)[:4]
    return n, c, h, w
