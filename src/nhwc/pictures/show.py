"""`nhwc.show(tensor)`: which number lies where."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from torch import Tensor

from ..shown import is_coloured
from .html import memory_html
from .memory import Memory, memory_of
from .text import memory_text


@dataclass(frozen=True, repr=False)
class Drawing:
    """A tensor's memory, which a terminal draws in characters and a notebook in its cell.

    >>> import torch
    >>> drawing = show(torch.zeros(2, 3, 4, 4))
    >>> drawing.memory.strides
    (48, 16, 4, 1)
    >>> print(str(drawing).splitlines()[0])
    2x3x4x4 float32, contiguous, on cpu
    """

    memory: Memory

    def __repr__(self) -> str:
        return memory_text(self.memory, color=is_coloured(sys.stdout))

    def _repr_html_(self) -> str:
        return memory_html(self.memory)


def show(tensor: Tensor) -> Drawing:
    """Draw how a tensor lies in its storage: in a terminal, or as the result of a notebook's cell.

    >>> import torch
    >>> show(torch.empty(1, 3, 1, 4).to(memory_format=torch.channels_last))
    1x3x1x4 float32, channels_last, on cpu
    strides  N 12   C 1   H 12   W 3
    <BLANKLINE>
    N 0
      C 0           C 1           C 2
        0  1  2  3    4  5  6  7    8  9 10 11
    <BLANKLINE>
    place 0
        0  4  8  1  5  9  2  6 10  3  7 11
    <BLANKLINE>
    Densest first: C, W.

    The numbers are counted as the indices go; below they stand in the order of the storage. A `·`
    is a place that is not the tensor's, `⋯` leaves out those between. A large tensor is drawn by a
    corner of it, and says so.
    """
    return Drawing(memory_of(tensor))
