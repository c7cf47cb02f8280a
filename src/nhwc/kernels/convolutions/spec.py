"""The specification of a convolution: shapes and settings, all that a kernel's speed depends on."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...errors import InputError
from ...operators.windows import places
from ..layers.activations import Activation

Pair = tuple[int, int]

SIDES = (
    *("d", "h", "w", "out_d", "out_h", "out_w", "t", "r", "held"),
    *("stride_d", "stride_h", "stride_w", "pad_d", "pad_h", "pad_w"),
    *("dilation_d", "dilation_h", "dilation_w"),
)
"""The fields of a kernel that `ConvSpec.sides` gives."""


@dataclass(frozen=True)
class Frames:
    """The third side of a volume: `d` frames, of which a filter sees `t`.

    A volume lies in memory as its frames one after the other, each an image. There are `padding`
    frames of zeros on both sides; if `wanted` says how many frames the result has, as many behind.
    If `held`, the frames beside the volume are the one at that end, over and over.
    """

    d: int = 1
    t: int = 1
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    wanted: int | None = None
    held: bool = False

    @property
    def out_d(self) -> int:
        """The frames of the result."""
        if self.wanted is not None:
            return self.wanted
        count: int = places(
            self.d, self.t, stride=self.stride, padding=self.padding, dilation=self.dilation
        )
        return count

    def seen(self) -> slice:
        """The part of a filter that sees a frame of the volume at some place.

        >>> Frames(1, 3, padding=1).seen(), Frames(4, 3, padding=1).seen()
        (slice(1, 2, None), slice(0, 3, None))
        """
        if self.held:
            return slice(0, self.t)
        return _seen(self.d, self.out_d, self.t, self.stride, self.padding, self.dilation)

    def without_unseen(self) -> Frames:
        """The same with a filter of nothing but its `seen` part.

        >>> Frames(1, 3, padding=1).without_unseen() == Frames(1)
        True
        """
        seen = self.seen()
        padding = self.padding - seen.start * self.dilation
        if padding < 0 or seen == slice(0, self.t):
            return self
        cut = Frames(self.d, seen.stop - seen.start, self.stride, padding, self.dilation)
        if (cut.t, cut.padding, self.out_d) == (1, 0, self.d == 1):
            return Frames(self.d)
        return cut if cut.out_d == self.out_d else replace(cut, wanted=self.out_d)


IMAGE = Frames()
"""A single frame."""


@dataclass(frozen=True)
class ConvSpec:
    """activation(convolution + bias + residual) of an image (n, c, h, w) by k filters of r by s.

    >>> spec = ConvSpec(1, 64, 56, 56, 128, 3, 3, stride=(2, 2), padding=(1, 1))
    >>> spec.out_h, spec.depth, spec.gflop
    (28, 576, 0.115605504)

    `slope` is the slope of leaky relu. `wanted` says how many rows and columns the result has,
    where the padding behind is not that in front. Of a volume, `frames` tells the third side.

    >>> ConvSpec(1, 64, 56, 56, 64, 3, 3, frames=Frames(8, 3, padding=1)).pixels
    23328
    """

    n: int
    c: int
    h: int
    w: int
    k: int
    r: int
    s: int
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1
    activation: Activation = Activation.NONE
    slope: float = 0.01
    has_residual: bool = False
    has_bias: bool = True
    frames: Frames = IMAGE
    wanted: Pair | None = None

    def __post_init__(self) -> None:
        if self.groups < 1 or self.k < 0 or self.c % self.groups or self.k % self.groups:
            raise InputError(
                f"{self.c} channels to {self.k} cannot be cut into {self.groups} groups. "
                "Both must be multiples of the number of groups, and none below 0."
            )
        deep = self.frames
        moves = (deep.t, deep.stride, deep.dilation, self.r, self.s, *self.stride, *self.dilation)
        # Where the size of the result is given, padding below zero skips pixels.
        skips = self.wanted is None and min(deep.padding, *self.padding) < 0
        if min(moves) < 1 or skips:
            raise InputError(
                f"a filter of {self.r}x{self.s} with stride {self.stride}, padding {self.padding}, "
                f"dilation {self.dilation} is no convolution: padding may be 0, the others not."
            )

    @property
    def out_h(self) -> int:
        return self._places(self.h, self.r, 0)

    @property
    def out_w(self) -> int:
        return self._places(self.w, self.s, 1)

    def _places(self, length: int, size: int, side: int) -> int:
        if self.wanted is not None:
            return self.wanted[side]
        count: int = places(
            length,
            size,
            stride=self.stride[side],
            padding=self.padding[side],
            dilation=self.dilation[side],
        )
        return count

    def sides(self) -> dict[str, int]:
        """What lies along each side, and how a filter moves there; but for its columns."""
        deep = self.frames
        along = ((deep.d, self.h, self.w), (deep.out_d, self.out_h, self.out_w))
        moves = ((deep.stride, *self.stride), (deep.padding, *self.padding))
        numbers = (*along[0], *along[1], deep.t, self.r, int(deep.held), *moves[0], *moves[1])
        return dict(zip(SIDES, (*numbers, deep.dilation, *self.dilation), strict=True))

    @property
    def pixels(self) -> int:
        """Output pixels of all images: the rows of the matrix product."""
        return self.n * self.frames.out_d * self.out_h * self.out_w

    @property
    def depth(self) -> int:
        """The number of products in one output: the inner dimension of the matrix product."""
        return self.frames.t * self.r * self.s * self.c // self.groups

    @property
    def is_flat(self) -> bool:
        """Whether each output pixel sees the one input pixel at the same place."""
        deep = self.frames
        alone = self._of_pixels and (deep.t, deep.padding, deep.stride) == (1, 0, 1)
        return alone and (deep.out_d, self.out_h, self.out_w) == (deep.d, self.h, self.w)

    @property
    def _of_pixels(self) -> bool:
        """Whether a filter sees one pixel of each frame, and moves from pixel to pixel."""
        return self.r == self.s == 1 and self.padding == (0, 0) and self.stride == (1, 1)

    def folded(self) -> ConvSpec:
        """The same convolution with one side fewer, if it looks along that side in no way.

        >>> ConvSpec(1, 8, 6, 6, 8, 3, 3, frames=Frames(4)).folded().n
        4
        >>> folded = ConvSpec(1, 8, 6, 6, 8, 1, 1, frames=Frames(4, 3, padding=1)).folded()
        >>> (folded.h, folded.w), (folded.r, folded.s), folded.padding
        ((4, 36), (3, 1), (1, 0))
        """
        deep = self.frames
        if deep == Frames(deep.d):
            # Each frame is an image of its own.
            return replace(self, n=self.n * deep.d, frames=IMAGE)
        if self._of_pixels and not deep.held and self.wanted is None:
            # All pixels of a frame are a row of an image, as high as there are frames.
            return replace(
                self,
                h=deep.d,
                w=self.h * self.w,
                r=deep.t,
                frames=IMAGE,
                stride=(deep.stride, 1),
                padding=(deep.padding, 0),
                dilation=(deep.dilation, 1),
                wanted=None if deep.wanted is None else (deep.wanted, self.h * self.w),
            )
        return self

    def seen(self) -> tuple[slice, slice]:
        """The rows and the columns of a filter that see a pixel of the image at some place.

        A filter whose taps are as far apart as the image is wide sees nothing but padding under
        most of them.

        >>> ConvSpec(1, 8, 16, 16, 8, 3, 3, padding=(24, 12), dilation=(24, 12)).seen()
        (slice(1, 2, None), slice(0, 3, None))
        """
        moves = zip(self.stride, self.padding, self.dilation, strict=True)
        sides = ((self.h, self.out_h, self.r), (self.w, self.out_w, self.s))
        rows, columns = (_seen(*side, *move) for side, move in zip(sides, moves, strict=True))
        return rows, columns

    def without_unseen(self) -> ConvSpec:
        """The same with filters of nothing but their `seen` part.

        >>> dilated = ConvSpec(1, 8, 16, 16, 8, 3, 3, padding=(24, 24), dilation=(24, 24))
        >>> dilated.without_unseen() == ConvSpec(1, 8, 16, 16, 8, 1, 1)
        True
        """
        parts = self.seen()
        if parts == (slice(0, self.r), slice(0, self.s)):
            return self
        r, s = (part.stop - part.start for part in parts)
        moves = zip(self.padding, parts, self.dilation, strict=True)
        padding = tuple(pad - part.start * apart for pad, part, apart in moves)
        cut = replace(
            self,
            r=r,
            s=s,
            padding=(padding[0], padding[1]),
            # A single tap is no distance from others.
            dilation=(self.dilation[0] if r > 1 else 1, self.dilation[1] if s > 1 else 1),
            wanted=(self.out_h, self.out_w),
        )
        plain = min(padding) >= 0 and replace(cut, wanted=None)
        return plain if plain and (plain.out_h, plain.out_w) == cut.wanted else cut

    @property
    def products(self) -> int:
        """The multiplications of the direct sum."""
        return self.pixels * self.depth * self.k

    @property
    def gflop(self) -> float:
        """Multiplications and additions of the direct sum, in 10^9."""
        return 2 * self.products / 1e9


def _seen(length: int, outputs: int, size: int, stride: int, padding: int, dilation: int) -> slice:
    """The taps along a side that see what is `length` long from one of the outputs; else all."""
    places = range(-padding, -padding + stride * outputs, stride)
    taps = [m for m in range(size) if any(0 <= p + m * dilation < length for p in places)]
    return slice(taps[0], taps[-1] + 1) if taps else slice(0, size)
