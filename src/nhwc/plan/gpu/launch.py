"""Functions that launch the kernels for GPUs, made once for a layer; and where these can be had."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...formats import Format, strides_of
from ...operators.activations import NamedActivation
from ..implementation import Run
from ..specs import Affine, Convolution, Linear

_MOST = 1 << 31
"""Tensors of as many numbers or more have places that the kernels cannot count."""

_NUMBERS = 1024
"""Numbers that a program of `finish` writes."""


@dataclass(frozen=True)
class Block:
    """What a program of `convolve` computes: so many pixels by filters, at a time so much depth."""

    pixels: int
    filters: int
    depth: int
    warps: int
    stages: int

    @property
    def name(self) -> str:
        return f"{self.pixels}x{self.filters}x{self.depth}"

    def bytes(self, size: int) -> int:
        """The shared memory that it takes, of numbers of `size` bytes."""
        return (self.pixels + self.filters) * self.depth * size * self.stages


_BLOCKS = (
    Block(128, 128, 32, 8, 3),
    Block(128, 64, 32, 4, 4),
    Block(64, 64, 64, 4, 3),
    Block(128, 32, 32, 4, 4),
    Block(64, 32, 64, 4, 3),
    Block(32, 64, 64, 4, 3),
    Block(32, 32, 128, 4, 3),
    Block(16, 32, 128, 2, 3),
    Block(16, 16, 256, 4, 3),
)
"""From the largest, which read each number least often, to those that leave no processor idle."""

_ROUNDS = (0.5, 24.0)
"""Blocks are tried that give each processor about so many programs."""


@cache
def unavailable(device: torch.device) -> str | None:
    """Why the kernels cannot be used on this GPU, or None if they can.

    Triton, its compiler, or a C compiler for it may be missing, each with an error of its own.
    """
    if torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0):
        return "they are for GPUs of NVIDIA from Ampere on"
    try:
        from . import kernels  # noqa: F401

        with torch.cuda.device(device):
            x = torch.arange(4.0, device=device)
            run = finishing(Affine((1, 4), False, None, x.dtype, str(device)), x, x, 1)
            worked = torch.equal(run(x[None])[0], x * x + x)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None if worked else "they answer wrongly"


def blocks(spec: Convolution | Linear, precision: str) -> tuple[Block, ...]:
    """The blocks worth trying for `spec`."""
    pixels, filters, groups = _sides(spec)
    card: Any = torch.cuda.get_device_properties(torch.device(spec.device))
    room, processors = int(card.shared_memory_per_block_optin), card.multi_processor_count
    least, most = _ROUNDS

    def programs(block: Block) -> int:
        return -(-pixels // block.pixels) * -(-filters // block.filters) * groups

    # With three products of each pair a deep block has more numbers than registers hold.
    deepest = 64 if precision == "tf32x3" else 256
    fit = [one for one in _BLOCKS if one.bytes(spec.dtype.itemsize) <= room]
    fit = [one for one in fit if one.filters < max(33, 2 * filters) and one.depth <= deepest]
    known = [one for one in fit if least * processors <= programs(one) <= most * processors]
    # Where none is of the right size, the first or the last is next to it.
    few = not known and bool(fit) and programs(fit[-1]) < least * processors
    return tuple(known[:4] or (fit[-2:] if few else fit[:2]))


def fits(*shapes: tuple[int, ...]) -> bool:
    """Whether the kernels can count the places of tensors of these shapes."""
    return all(math.prod(shape) < _MOST for shape in shapes)


def finishing(
    spec: Affine | Convolution, scale: Tensor | None, shift: Tensor | None, inner: int
) -> Run:
    """A scale and a shift of each channel, a residual and an activation in one pass.

    The numbers of a channel lie `inner` by `inner` side by side. What is finished for a convolution
    is its own result, which is written over.
    """
    from . import kernels

    channels, ending = spec.output[1], _ending(spec.activation)
    over = isinstance(spec, Convolution)

    def finish(x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = x if over else torch.empty_like(x)
        total = x.numel()
        with _beside(x):
            kernels.finish[(-(-total // _NUMBERS),)](
                x, y, scale, shift, residual, total, channels, inner,
                SCALES=scale is not None, SHIFTS=shift is not None, ADDS=residual is not None,
                BLOCK=_NUMBERS, **ending,
            )  # fmt: skip
        return y

    return finish


def depthwise(spec: Convolution, weight: Tensor, bias: Tensor | None) -> Run:
    """A filter for each channel of images that lie channels last."""
    from . import kernels

    images, channels, height, width = spec.input
    rows, columns = spec.output[2:]
    taps, ending = weight.flatten(1).t().contiguous(), _ending(spec.activation)
    deep = min(64, _power(channels))
    wide = max(1, min(_power(columns), 512 // deep, 16))
    grid = (images * rows, -(-columns // wide), -(-channels // deep))

    def convolve(x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = _images(spec, x)
        with _beside(x):
            kernels.depthwise[grid](
                x, y, taps, bias, residual,
                height, width, channels, rows, columns, *spec.padding,
                HEIGHT=spec.weight[2], WIDTH=spec.weight[3],
                STRIDE_Y=spec.stride[0], STRIDE_X=spec.stride[1],
                APART_Y=spec.dilation[0], APART_X=spec.dilation[1],
                SHIFTS=bias is not None, ADDS=residual is not None, COLUMNS=wide, CHANNELS=deep,
                num_warps=4 if wide * deep >= 512 else 2, **ending,
            )  # fmt: skip
        return y

    return convolve


def product(
    spec: Convolution | Linear, block: Block, precision: str, weight: Tensor, bias: Tensor | None
) -> Run:
    """A convolution of images that lie channels last, or a linear layer, as products of blocks."""
    from . import kernels

    pixels, filters, groups = _sides(spec)
    if isinstance(spec, Linear):
        taken, make, points = spec.weight[1], _rows, True
        geometry: tuple[int, ...] = (1, 1, taken, 1, 1)
        taps: tuple[int, ...] = (1, 1)
        steps: tuple[int, ...] = (1, 1, 0, 0, 1, 1)
        weight = weight.contiguous()
    else:
        taken, make = spec.weight[1], _images
        geometry = (*spec.input[2:], spec.input[1], *spec.output[2:])
        taps, steps = spec.weight[2:], (*spec.stride, *spec.padding, *spec.dilation)
        points = taps == (1, 1) and steps[:4] == (1, 1, 0, 0) and spec.behind is None
        weight = weight.contiguous(memory_format=torch.channels_last)
    if precision == "tf32":
        weight = rounded(weight)
    ending = _ending(spec.activation)
    grid = (-(-pixels // block.pixels), -(-filters // block.filters), groups)

    def convolve(x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = make(spec, x)
        with _beside(x):
            kernels.convolve[grid](
                x, y, weight, bias, residual,
                pixels, *geometry, filters, taken, math.prod(taps), taps[1], *steps,
                POINTS=points, SHIFTS=bias is not None, ADDS=residual is not None,
                PRECISION=precision, PIXELS=block.pixels, FILTERS=block.filters,
                DEPTH=block.depth, num_warps=block.warps, num_stages=block.stages, **ending,
            )  # fmt: skip
        return y

    return convolve


def rounded(numbers: Tensor) -> Tensor:
    """float32 numbers rounded to TF32, which has 13 bits less.

    >>> rounded(torch.tensor([1.0, 1.0 + 2**-10, 1.0 + 2**-11, 1.0 + 2**-12])).tolist()
    [1.0, 1.0009765625, 1.0009765625, 1.0]
    """
    bits = numbers.view(torch.int32)
    nearest = ((bits + (1 << 12)) & -(1 << 13)).view(torch.float32)
    return torch.where(numbers.isnan(), numbers, nearest)


def _sides(spec: Convolution | Linear) -> tuple[int, int, int]:
    """How many pixels or rows there are, how many filters in a group, and how many groups."""
    if isinstance(spec, Linear):
        return math.prod(spec.input[:-1]), spec.weight[0], 1
    images, filters, *sides = spec.output
    return images * math.prod(sides), filters // spec.groups, spec.groups


def _images(spec: Any, x: Tensor) -> Tensor:
    strides = strides_of(spec.output, Format.CHANNELS_LAST)
    return torch.empty_strided(spec.output, strides, dtype=x.dtype, device=x.device)


def _rows(spec: Any, x: Tensor) -> Tensor:
    return torch.empty(spec.output, dtype=x.dtype, device=x.device)


def _beside(x: Tensor) -> AbstractContextManager[object]:
    """Where kernels are launched: beside the tensors that they read."""
    return torch.cuda.device_of(x) if x.is_cuda else nullcontext()


def _ending(activation: NamedActivation | None) -> dict[str, Any]:
    """What a kernel does to its sums: the activation, and up to two numbers of it."""
    first, second, *_ = (*(activation.numbers if activation else ()), 0.0, 0.0)
    return {"ACTIVATION": activation.name if activation else "", "first": first, "second": second}


def _power(number: int) -> int:
    """The least power of two that is not less."""
    return 1 << max(0, number - 1).bit_length()
