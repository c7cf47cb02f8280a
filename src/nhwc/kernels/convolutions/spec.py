"""The specification of a convolution: shapes and settings, all that a kernel's speed depends on."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import InputError
from ...operators.windows import places
from ..layers.activations import Activation

Pair = tuple[int, int]


@dataclass(frozen=True)
class ConvSpec:
    """activation(convolution + bias + residual) of an image (n, c, h, w) by k filters of r by s.

    >>> spec = ConvSpec(1, 64, 56, 56, 128, 3, 3, stride=(2, 2), padding=(1, 1))
    >>> spec.out_h, spec.depth, spec.gflop
    (28, 576, 0.115605504)

    `slope` is the slope of leaky relu.
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

    def __post_init__(self) -> None:
        if self.groups < 1 or self.c % self.groups or self.k % self.groups:
            raise InputError(
                f"{self.c} channels to {self.k} cannot be cut into {self.groups} groups. "
                "Both must be multiples of the number of groups."
            )
        if min(self.r, self.s, *self.stride, *self.dilation) < 1 or min(self.padding) < 0:
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
        count: int = places(
            length,
            size,
            stride=self.stride[side],
            padding=self.padding[side],
            dilation=self.dilation[side],
        )
        return count

    @property
    def pixels(self) -> int:
        """Output pixels of all images: the rows of the matrix product."""
        return self.n * self.out_h * self.out_w

    @property
    def depth(self) -> int:
        """The number of products in one output: the inner dimension of the matrix product."""
        return self.r * self.s * self.c // self.groups

    @property
    def is_flat(self) -> bool:
        """Whether each output pixel sees the one input pixel at the same place."""
        alone = self.r == self.s == 1 and self.padding == (0, 0)
        return alone and self.stride == (1, 1)

    @property
    def gflop(self) -> float:
        """Multiplications and additions of the direct sum, in 10^9."""
        return 2e-9 * self.pixels * self.depth * self.k
