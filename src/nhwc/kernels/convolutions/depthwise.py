"""Depthwise convolution: channels in vectors, and a few neighbouring outputs in registers.

Each channel has a filter of its own, so there is no product to share: an output costs as many loads
as multiplications. Neighbouring outputs see mostly the same pixels, though, and are computed
together, `tile` of them. Each pixel of a row is loaded once for all of them:

    a 3x3 filter, stride 1, tile of 4:

    pixels      p0 p1 p2 p3 p4 p5        six loads for a row of the filter, not twelve
    outputs     [ 0    ]
                   [ 1    ]
                      [ 2    ]           four sums, three taps and a pixel in registers
                         [ 3    ]

The row of the filter is unrolled, and so are the outputs. The innermost loop runs over rows of the
filter; around it are the vectors of channels, the tiles of a row of outputs, and the rows. So there
is a kernel for each length of a row of the filter, stride and dilation along it, and tile; how many
rows a filter has and how far they are apart is known when it runs. `ANY_DEPTHWISE` computes what is
too narrow for a tile, one output at a time.

A row of outputs ends with a tile that moves left and computes some again: cheaper than a tile of
another length. `tile_for` takes the tile that computes the fewest outputs in all.

Of a volume, each frame that a filter sees gives an image's sum: the kernels for volumes have one
more loop, around the rows of the filter, and pass by frames in the padding.

`emit_row` is also the depthwise part of two larger steps, with a 1x1 convolution before
(expanded.py) or behind it (projected.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

from torch import Tensor

from ..language.compiler import Args, Kernel
from ..language.loops import Place, each_vector, emit_padded, padded
from ..language.values import Value
from ..language.vectors import Emitter
from ..layers.activations import Activation
from ..layers.ending import ENDING, ending, finish
from ..product.rows import emit_frame
from ..product.weights import pad_channels
from ..tape.steps import Step, View, step
from .spec import IMAGE, Frames

_LONGEST = 31
"""How many taps a row of the filter may have to be unrolled: the most that networks have."""

_IN_STEPS = {(3, 1), (3, 2), (5, 1), (5, 2), (7, 1), (7, 2)}
"""The (size, stride) of square filters that larger steps know."""

_TILES = (8, 7, 4)
"""How many neighbouring outputs a kernel may compute at once. 7 divides the widths that an image
of 224 pixels has in later layers."""

_FIELDS = (
    *("x", "x_pixel", "weights", "bias", "n", "h", "w", "c", "out_h", "out_w", "r", "s"),
    *("pad_h", "pad_w", "stride_h", "stride_w", "dilation_h", "dilation_w", "piece", "pieces"),
    *ENDING,
)

_FRAMES = ("d", "out_d", "t", "stride_d", "pad_d", "dilation_d", "held")
"""What the kernels for volumes are told besides."""
_DEEP_FIELDS = (*_FIELDS, *_FRAMES)


@dataclass(frozen=True)
class Window:
    """The size and the movement of the filters, where they are a part of a larger step."""

    size: tuple[int, int]
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)

    def tile(self, width: int) -> int:
        """How many of `width` neighbouring outputs to compute at once; 0 if no kernel does."""
        square = self.size[0] == self.size[1] and self.stride[0] == self.stride[1]
        known = square and (self.size[0], self.stride[0]) in _IN_STEPS and self.dilation == (1, 1)
        return tile_for(self.size[1], self.padding[1], 1, width) if known else 0


def depthwise_step(
    x: View,
    y: View,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    dilation: tuple[int, int] = (1, 1),
    activation: Activation = Activation.NONE,
    slope: float = 0.01,
    residual: View | None = None,
    frames: Frames = IMAGE,
) -> Step:
    """activation(depthwise(x, weight) + bias + residual); weight is C, 1, r, s as in torch.

    Of a volume, whose `frames` lie one below the other in `x` and `y`, it is C, 1, t, r, s.
    """
    n, c, h, w = x.shape
    out_h, out_w = y.shape[2:]
    h, out_h = h // frames.d, out_h // frames.out_d
    r, s = weight.shape[-2:]
    apart = dilation[1] if s > 1 else 1
    beyond = (out_w - 1) * stride[1] - padding[1] + (s - 1) * apart - (w - 1)
    tile = tile_for(s, max(padding[1], beyond), apart, out_w)
    deep = frames != IMAGE
    some = DEPTHWISE_OF_FRAMES if deep else ANY_DEPTHWISE
    kernel = tiled_depthwise(s, stride[1], tile, apart, deep=deep) if tile else some
    piece, pieces = _pieces(n * frames.out_d * out_h, c)
    counts = (frames.d, frames.out_d, frames.t)
    moves = (frames.stride, frames.padding, frames.dilation, int(frames.held))
    numbers = {
        "n": n,
        "h": h,
        "w": w,
        "c": c,
        "out_h": out_h,
        "out_w": out_w,
        "r": r,
        "s": s,
        "pad_h": padding[0],
        "pad_w": padding[1],
        "piece": piece,
        "pieces": pieces,
        "stride_h": stride[0],
        "stride_w": stride[1],
        "dilation_h": dilation[0],
        "dilation_w": dilation[1],
    }
    return step(
        kernel,
        x=x,
        x_pixel=x.pixel,
        weights=pad_channels(weight.flatten(1).t(), c),
        bias=pad_channels(bias, c),
        **numbers,
        **(dict(zip(_FRAMES, (*counts, *moves), strict=True)) if deep else {}),
        **ending(y, activation, slope, residual),
    )


def tile_for(taps: int, padding: int, dilation: int, width: int) -> int:
    """How many neighbouring outputs of a row to compute at once; 0 if no kernel is tiled so.

    `taps`, `padding`, the larger one, and `dilation` are those along a row.
    """
    known = taps <= _LONGEST and padding <= taps // 2 * dilation
    fitting = [tile for tile in _TILES if tile <= width]
    if not known or not fitting:
        return 0
    return min(fitting, key=lambda tile: (-(-width // tile) * tile, -tile))


def _pieces(rows: int, channels: int) -> tuple[int, int]:
    """Channels of a piece of work, and pieces of a row, which is cut where rows are few."""
    wanted = min(padded(channels) // 16, max(1, -(-16 // max(rows, 1))))
    piece = padded(-(-channels // wanted))
    return piece, -(-channels // piece)


@cache
def tiled_depthwise(
    size: int, stride: int, tile: int, dilation: int = 1, *, deep: bool = False
) -> Kernel:
    """The kernel for filters with rows of `size` taps, of `tile` neighbouring outputs at once."""
    emit = partial(_emit_tiled, tiled=TiledRow(size, stride, tile, dilation), deep=deep)
    apart = f"d{dilation}" if dilation > 1 else ""
    name = f"depthwise{size}s{stride}t{tile}{apart}"
    return Kernel(f"{name}f", _DEEP_FIELDS, emit) if deep else Kernel(name, _FIELDS, emit)


@dataclass(frozen=True)
class TiledRow:
    """What is unrolled: `tile` neighbouring outputs, by the `size` taps of a row of the filter."""

    size: int
    stride: int
    tile: int
    dilation: int = 1

    @property
    def columns(self) -> list[int]:
        """The pixels of a row that the outputs see, counted from the first one."""
        return sorted({self.column(t, k) for t in range(self.tile) for k in range(self.size)})

    @property
    def taps(self) -> dict[int, list[tuple[int, int]]]:
        """The outputs that see each of the columns, each with the tap under which it lies."""
        found: dict[int, list[tuple[int, int]]] = {column: [] for column in self.columns}
        for t in range(self.tile):
            for k in range(self.size):
                found[self.column(t, k)].append((t, k))
        return found

    @property
    def outer(self) -> list[int]:
        """The columns that can lie in the padding, which is at most half a filter."""
        columns, most = self.columns, self.size // 2 * self.dilation
        return [j for j in columns if j < most or j > columns[-1] - most]

    def column(self, output: int, tap: int) -> int:
        return output * self.stride + tap * self.dilation


class OutputRow(NamedTuple):
    """Channels from `first` up to `last` of a row of outputs.

    `out` is its first pixel in `y`, `top` the input row under its first tap, which may lie in the
    padding, and `source` where that row would begin.
    """

    out: Value
    top: Value
    source: Value
    first: Value
    last: Value


def _row(e: Emitter, a: Args, piece: Value) -> OutputRow:
    line, first = piece // a.pieces, piece % a.pieces * a.piece
    image, top = line // a.out_h, line % a.out_h * a.stride_h - a.pad_h
    source = a.x.floats() + (image * a.h + top) * a.w * a.x_pixel
    return OutputRow(line * a.out_w, top, source, first, e.min(first + a.piece, a.c))


def _emit_tiled(
    e: Emitter,
    a: Args,
    thread: Value,
    threads: Value,
    *,
    tiled: TiledRow,
    deep: bool,
) -> None:
    rows = a.n * a.out_d * a.out_h if deep else a.n * a.out_h
    begin, end = e.share(rows * a.pieces, thread, threads)
    with e.range(begin, end) as piece:
        row, taps = _deep_row(e, a, piece) if deep else (_row(e, a, piece), _one_frame)
        emit_row(e, a, row, tiled, rows=a.r, apart=a.dilation_h, each_frame=taps)


Frame = Callable[[Value, Value], None]
"""Adds what a frame gives, from where its row begins and its part of the filter does."""


def _one_frame(row: OutputRow, weights: Value, add: Frame) -> None:
    add(row.source, weights)


def _deep_row(
    e: Emitter, a: Args, piece: Value
) -> tuple[OutputRow, Callable[[OutputRow, Value, Frame], None]]:
    """The row of a volume's result, and what calls for each frame that a filter sees there."""
    line, first = piece // a.pieces, piece % a.pieces * a.piece
    image, frame = line // (a.out_d * a.out_h), line // a.out_h % a.out_d
    front, top = frame * a.stride_d - a.pad_d, line % a.out_h * a.stride_h - a.pad_h
    source = a.x.floats() + ((image * a.d + front) * a.h + top) * a.w * a.x_pixel
    row = OutputRow(line * a.out_w, top, source, first, e.min(first + a.piece, a.c))

    def each_frame(row: OutputRow, weights: Value, add: Frame) -> None:
        filters = a.r * a.s * emit_padded(a.c)
        with e.range(0, a.t) as m:
            seen = emit_frame(e, a, front + m * a.dilation_d)
            with e.when((seen >= 0) & (seen < a.d)):
                add(row.source + (seen - front) * a.h * a.w * a.x_pixel, weights + m * filters)

    return row, each_frame


def emit_row(
    e: Emitter,
    a: Args,
    row: OutputRow,
    tiled: TiledRow,
    *,
    rows: Any,
    apart: Any = 1,
    end: Callable[..., None] = finish,
    each_frame: Callable[[OutputRow, Value, Frame], None] = _one_frame,
) -> None:
    """Compute a row of outputs, a tile of neighbours at once, and `end` them.

    The filter has `rows`, which are `apart` in the image.
    """
    padded_channels = emit_padded(a.c)
    first_tap = (e.max(0 - row.top, 0) + (apart - 1)) // apart
    last_tap = e.min((e.max(a.h - row.top, 0) + (apart - 1)) // apart, rows)
    with e.range(0, a.out_w, tiled.tile) as wanted:
        # The last tile moves left to end with the row, and computes some outputs again.
        ow = e.min(wanted, a.out_w - tiled.tile)
        left = ow * tiled.stride - a.pad_w
        pixels = {j: (left + j) * a.x_pixel for j in tiled.columns}
        inside = {j: (left + j >= 0) & (left + j < a.w) for j in tiled.outer}

        def channels(c: Value, mask: Value | None) -> None:
            sums = [e.variable(0.0) for _ in range(tiled.tile)]
            for one in sums:
                one.value = e.load(a.bias.floats() + c)

            def add_frame(source: Value, of_frame: Value) -> None:
                with e.range(first_tap, last_tap) as i:
                    line = source + (i * apart * a.w * a.x_pixel + c)
                    weights = of_frame + (i * tiled.size * padded_channels + c)
                    filters = [e.load(weights + padded_channels * k) for k in range(tiled.size)]

                    def add_column(j: int) -> None:
                        value = e.load(line + pixels[j], mask)
                        for t, k in tiled.taps[j]:
                            sums[t].value = e.fma(value, filters[k], sums[t].value)

                    for j in tiled.columns:
                        if j in inside:
                            with e.when(inside[j]):
                                add_column(j)
                        else:
                            add_column(j)

            each_frame(row, a.weights.floats(), add_frame)
            end(e, a, [s.value for s in sums], row.out + ow, Place(c, mask))

        each_vector(e, row.first, row.last, channels)


def _emit_any(e: Emitter, a: Args, thread: Value, threads: Value, *, deep: bool) -> None:
    """Any size, stride, padding and dilation, one output at a time."""
    rows = a.n * a.out_d * a.out_h if deep else a.n * a.out_h
    begin, end = e.share(rows * a.pieces, thread, threads)
    padded_channels = emit_padded(a.c)
    with e.range(begin, end) as piece, e.range(0, a.out_w) as ow:
        row, each_frame = _deep_row(e, a, piece) if deep else (_row(e, a, piece), _one_frame)
        left = ow * a.stride_w - a.pad_w

        def channels(c: Value, mask: Value | None) -> None:
            total = e.variable(0.0)
            total.value = e.load(a.bias.floats() + c)

            def add_frame(source: Value, weights: Value) -> None:
                with e.range(0, a.r) as i, e.range(0, a.s) as j:
                    down, x = i * a.dilation_h, left + j * a.dilation_w
                    y = row.top + down
                    with e.when((y >= 0) & (y < a.h) & (x >= 0) & (x < a.w)):
                        value = e.load(source + ((down * a.w + x) * a.x_pixel + c), mask)
                        tap = (i * a.s + j) * padded_channels + c
                        total.value = e.fma(value, e.load(weights + tap), total.value)

            each_frame(row, a.weights.floats(), add_frame)
            finish(e, a, [total.value], row.out + ow, Place(c, mask))

        each_vector(e, row.first, row.last, channels)


ANY_DEPTHWISE = Kernel("depthwise", _FIELDS, partial(_emit_any, deep=False))
DEPTHWISE_OF_FRAMES = Kernel("depthwise_of_frames", _DEEP_FIELDS, partial(_emit_any, deep=True))
