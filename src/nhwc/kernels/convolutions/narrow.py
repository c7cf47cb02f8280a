"""A convolution of as many filters as channels, of which a vector holds several pixels.

The last layers of a segmentation of two classes have two channels and two filters. A vector of the
image then is a few neighbours, and so is one of the result; each sum wants the channels of its own
pixel one after the other, times the weights of its own filter:

    of the image      a0 a1  b0 b1  c0 c1  d0 d1
    channel 0         a0 a0  b0 b0  c0 c0  d0 d0    times  f0 g0  f0 g0  f0 g0  f0 g0
    channel 1         a1 a1  b1 b1  c1 c1  d1 d1    times  f1 g1  f1 g1  f1 g1  f1 g1

So no lane is idle, and the lanes of a sum need not be added. Strips of a row and what they see are
few.py's; but what lies beside the image is not copied: masks leave it out of the vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from itertools import chain

from torch import Tensor

from ..language import isa as isas
from ..language.compiler import Args, Kernel
from ..language.loops import Place
from ..language.values import Value
from ..language.vectors import Emitter, Variable
from ..layers.ending import finish
from ..product.weights import after
from ..tape.pages import room, shared
from ..tape.steps import Step, View, step
from .few import STRIP_FIELDS, Strip, each_row, each_strip, strip_arguments
from .spec import ConvSpec

CHANNELS = (1, 2, 4)
"""With so many channels a vector ends between two pixels."""

VECTORS = (4, 1)
"""A strip has so many vectors, one where rows are short."""


def serves(spec: ConvSpec) -> bool:
    """Whether this kernel can compute `spec`, and gains by it."""
    narrow = spec.groups == 1 and spec.c == spec.k in CHANNELS and spec.stride[1] == 1
    return narrow and spec.frames.t * spec.r * spec.s > 1 and spec.out_w >= _pixels(spec.k)


def _pixels(channels: int) -> int:
    """The pixels of a vector."""
    return isas.host().width // channels


def _vectors(spec: ConvSpec) -> int:
    return next(count for count in VECTORS if spec.out_w >= count * _pixels(spec.k))


def _emit(
    e: Emitter, a: Args, thread: Value, threads: Value, *, channels: int, vectors: int
) -> None:
    for strip in each_strip(e, a, thread, threads, vectors * e.width // channels):
        # Neighbouring channels are summed apart: no product waits for the one before.
        sums = [[e.variable(0.0) for _ in range(vectors)] for _ in range(min(2, channels))]
        for one in chain(*sums):
            one.value = e.vector(0.0)
        e.branch(
            strip.inside,
            partial(_add_inside, e, a, strip, channels, sums),
            partial(_add_at_the_side, e, a, strip, channels, sums),
        )
        bias, place = e.load(a.bias.floats()), strip.to + strip.left * channels
        for number, parts in enumerate(zip(*sums, strict=True)):
            total = bias
            for part in parts:
                total = total + part.value
            finish(e, a, [total], e.i64(0), Place(place + number * e.width, None))


Sums = list[list[Variable]]
"""For each parity of channels, a sum for each vector."""


def _add_inside(e: Emitter, a: Args, strip: Strip, channels: int, sums: Sums) -> None:
    """Add the products of all taps."""
    masks = [None] * len(sums[0])
    with each_row(e, a, strip) as (i, j, source), e.range(0, a.s) as tap:
        there = source + tap * a.dilation_w * channels
        _multiply(e, channels, sums, there, masks, _weights(e, a, i, j, tap, channels))


def _add_at_the_side(e: Emitter, a: Args, strip: Strip, channels: int, sums: Sums) -> None:
    """The same, of numbers that are zero where they lie beside the image."""
    with e.range(0, a.s) as tap:
        moved = tap * a.dilation_w * channels
        first = strip.column * channels + moved
        places = [first + number * e.width for number in range(len(sums[0]))]
        masks = [e.lanes(a.w * channels - place) & ~e.lanes(-place) for place in places]
        with each_row(e, a, strip) as (i, j, source):
            weights = _weights(e, a, i, j, tap, channels)
            _multiply(e, channels, sums, source + moved, masks, weights)


def _weights(e: Emitter, a: Args, i: Value, j: Value, tap: Value, channels: int) -> Value:
    place: Value = ((i * a.r + j) * a.s + tap) * (channels * e.width)
    weights: Value = a.weights.floats() + place
    return weights


def _multiply(
    e: Emitter,
    channels: int,
    sums: Sums,
    there: Value,
    masks: Sequence[Value | None],
    weights: Value,
) -> None:
    """Add the products of one tap."""
    seen = [e.load(there + number * e.width, mask) for number, mask in enumerate(masks)]
    for channel in range(channels):
        factor = e.load(weights + channel * e.width)
        own = [lane // channels * channels + channel for lane in range(e.width)]
        for one, value in zip(sums[channel % 2], seen, strict=True):
            spread = value if channels == 1 else e.shuffle(value, own)
            one.value = e.fma(spread, factor, one.value)


@cache
def narrow_kernel(channels: int, vectors: int) -> Kernel:
    """The kernel for so many channels, whose strips have so many vectors."""
    emit = partial(_emit, channels=channels, vectors=vectors)
    return Kernel(f"narrow{channels}x{vectors}", (*STRIP_FIELDS, "s"), emit)


def pack_narrow(spec: ConvSpec, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[tap][channel][filter], the filters over and over until a vector is full; so the bias."""
    packed = room(packed_floats(spec)).zero_()
    width, pixels = isas.host().width, _pixels(spec.k)
    filters = weight.detach().float().reshape(spec.k, spec.c, -1).permute(2, 1, 0)
    packed[:-width].view(-1, spec.c, pixels, spec.k).copy_(filters[:, :, None])
    if bias is not None:
        packed[-width:] = bias.detach().float().repeat(pixels)
    return shared(packed)


def packed_floats(spec: ConvSpec) -> int:
    """How many numbers `pack_narrow` returns."""
    taps = spec.frames.t * spec.r * spec.s
    return (taps * spec.c + 1) * isas.host().width


def narrow_steps(
    spec: ConvSpec, x: View, y: View, packed: Tensor | View, residual: View | None = None
) -> tuple[Step, ...]:
    """The convolution as one step; all that it reads and writes lies without gaps."""
    vectors = _vectors(spec)
    return (
        step(
            narrow_kernel(spec.k, vectors),
            bias=after(packed, packed_floats(spec) - isas.host().width),
            s=spec.s,
            **strip_arguments(spec, x, y, packed, residual, vectors * _pixels(spec.k)),
        ),
    )
