"""Operators that fill a new NCHW tensor, written so that it lies in memory as the input does.

Each permutes its input to the order in which its dimensions lie in memory, does there what torch
does, and permutes back: a permutation moves no data, and the result is dense in that order.
"""

from __future__ import annotations

from torch import Tensor

from .leaf import Leaf


def order_in_memory(x: Tensor) -> list[int]:
    """The dimensions of `x` from the one with the largest stride to the densest.

    >>> import torch
    >>> order_in_memory(torch.empty(2, 8, 4, 4).contiguous(memory_format=torch.channels_last))
    [0, 2, 3, 1]

    Those of size 1, whose strides say nothing, come first, where they give no stride to others.
    """
    order: list[int] = []
    for dim in range(x.dim()):
        place = len(order)
        while place > 0 and _is_outside(x, dim, order[place - 1]):
            place -= 1
        order.insert(place, dim)
    return order


def _is_outside(x: Tensor, dim: int, other: int) -> bool:
    larger = x.size(dim) == 1 or x.stride(dim) > x.stride(other)
    return x.size(other) > 1 and larger


def is_in_another_order(x: Tensor) -> bool:
    """Whether the channels of an image, a volume or a stack of images are densest in memory."""
    if x.dim() < 4:
        return False
    stacked = x.dim() - 3
    channels = x.stride(1) == 1 and x.size(1) > 1
    return channels or (x.stride(stacked) == 1 and x.size(stacked) > 1)


def positions(order: list[int]) -> list[int]:
    """Where each dimension is in `order`: the permutation back."""
    return [order.index(dim) for dim in range(len(order))]


class Reduced(Leaf):
    """A sum, mean, maximum or minimum over some dimensions of stacked images."""

    def __init__(self, kind: str, dims: tuple[int, ...], keepdim: bool) -> None:
        super().__init__()
        self.kind = kind
        self.dims = dims
        self.keepdim = keepdim

    def forward(self, x: Tensor) -> Tensor:
        dims = list(self.dims)
        if not is_in_another_order(x):
            return self._reduce(x, dims, self.keepdim)
        order = order_in_memory(x)
        places = positions(order)
        within = [places[dim % x.dim()] for dim in dims]
        result = self._reduce(x.permute(order), within, True).permute(places)
        return result if self.keepdim else result.squeeze(dims)

    def _reduce(self, x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
        if self.kind == "sum":
            return x.sum(dims, keepdim=keepdim)
        if self.kind == "mean":
            return x.mean(dims, keepdim=keepdim)
        if self.kind == "amax":
            return x.amax(dims, keepdim=keepdim)
        return x.amin(dims, keepdim=keepdim)


class Softmax(Leaf):
    """`softmax`, or its logarithm, over one dimension of images."""

    def __init__(self, dim: int, logarithm: bool = False) -> None:
        super().__init__()
        self.dim = dim
        self.logarithm = logarithm

    def forward(self, x: Tensor) -> Tensor:
        if not is_in_another_order(x):
            return self._softmax(x, self.dim)
        order = order_in_memory(x)
        places = positions(order)
        return self._softmax(x.permute(order), places[self.dim % x.dim()]).permute(places)

    def _softmax(self, x: Tensor, dim: int) -> Tensor:
        return x.log_softmax(dim) if self.logarithm else x.softmax(dim)


class Repeat(Leaf):
    """`Tensor.repeat` of images: as often along each dimension as `sizes` says."""

    def forward(self, x: Tensor, sizes: list[int]) -> Tensor:
        if not is_in_another_order(x) or len(sizes) != x.dim():
            return x.repeat(sizes)
        order = order_in_memory(x)
        repeated = x.permute(order).repeat([sizes[dim] for dim in order])
        return repeated.permute(positions(order))
