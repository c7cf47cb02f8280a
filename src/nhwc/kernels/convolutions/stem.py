"""A filter over few channels, as the first layer's, read where they lie.

So few channels make short, crooked rows for a matrix product, and to pack them costs as much as to
multiply them. Here a thread copies the lines of the image that a few output lines see, with the
padding around them, and what is multiplied is broadcast from there:

    a copied line, c = 3, padding 1:   000 rgb rgb rgb rgb rgb ... 000
                                       [   window of   ]
    output 0, a filter of 3 taps:      [000 rgb rgb]
    output 1, stride 1, step = 3:          [rgb rgb rgb]
    output 2:                                  [rgb rgb rgb]

The pixels under a line of the filter follow one another in memory, `filter_line` floats, and
neighbouring outputs see the same ones `step` floats on. That distance is known while the kernel is
generated, so a tile of outputs needs one address. As in the micro-kernel, a tile is some outputs by
a panel of filters, whose sums stay in registers; of a narrower panel it has more outputs.

An image that lies as N, C, H, W is copied as well as one that lies channels last (`planes`): three
lines, one per colour, are interleaved in registers. So a model's input need not be converted. Of a
volume the lines of all frames that a filter sees are copied, frame after frame.

Lines are copied once for a block of output lines, and the block is as high as the nearest caches
hold lines for; then for each panel all of its output lines are computed, since a panel of filters
and a window of lines are both at hand, while the whole image is not.
"""

from __future__ import annotations

from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..language import isa as isas
from ..language.compiler import Args, Kernel
from ..language.loops import Place, each_vector
from ..language.values import Value
from ..language.vectors import Emitter
from ..layers.copies import PLANES, in_turns
from ..layers.ending import ENDING, activated, ending, put
from ..layers.pooling import emit_larger
from ..product.weights import after
from ..tape.steps import Scratch, Step, View, pieces_of, step
from .pooled import POOL, emit_pooled
from .spec import ConvSpec

_FIELDS = (
    *("x", "x_pixel", PLANES, "weights", "bias", "lines"),
    *("n", "c", "w", "k", "out_w", "filter_line", "pad_w"),
    *("d", "h", "out_d", "out_h", "t", "r", "held"),
    *("stride_d", "stride_h", "pad_d", "pad_h", "dilation_d"),
    *("blocks", "panels", "line", "lines_floats", POOL, *ENDING),
)
"""`line` is the floats of a copied line, `filter_line` those under a line of the filter."""

STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 32)
"""Floats from the window of one output to its neighbour's: few channels, stride 1, 2 or 4."""
_CHANNELS = 16
"""With more, packing them costs little beside multiplying them."""
_LINES_BYTES = 64 << 10
"""How much of the nearest caches the lines of a block may take."""
_OUTPUTS = 14
"""The outputs of the longest tile."""


def serves(spec: ConvSpec) -> bool:
    """Whether `spec` is such a layer, on an image wide enough for a tile."""
    plain = spec.groups == 1 and spec.dilation == (1, 1) and min(spec.padding) >= 0
    few = spec.c <= _CHANNELS and spec.c * spec.stride[1] in STEPS
    # A single pixel needs no packing but where it lies in planes of three colours.
    packs = spec.depth > spec.c or spec.c == 3
    return plain and few and packs and spec.out_w >= _OUTPUTS


def stem_steps(
    spec: ConvSpec, x: View, y: View, packed: Tensor | View, residual: View | None = None
) -> tuple[Step, ...]:
    """The convolution as one step, on weights packed as `direct` has them."""
    isa = isas.host()
    padded_k = isa.padded(spec.k)
    seen = (spec.out_w - 1) * spec.stride[1] + spec.s
    line = max(spec.w + spec.padding[1], seen) * spec.c
    blocks = _blocks(spec, line)
    # Lines that are pooled come in pairs.
    highest = -(-spec.out_h // (2 * blocks)) * 2
    lines = spec.frames.t * ((highest - 1) * spec.stride[0] + spec.r)
    # The last line is cleared in whole vectors, up to one beyond its end.
    floats = lines * line + isa.width
    return (
        step(
            stem_kernel(spec.c * spec.stride[1]),
            pieces_of(spec.n * spec.frames.out_d * blocks, spec.products),
            x=x,
            x_pixel=x.pixel,
            planes=0,
            weights=packed,
            bias=after(packed, spec.depth * padded_k),
            lines=Scratch(4 * floats, per_thread=True),
            **{name: value for name, value in spec.sides().items() if name in _FIELDS},
            n=spec.n,
            c=spec.c,
            k=spec.k,
            filter_line=spec.s * spec.c,
            blocks=blocks,
            panels=isa.panels(spec.k),
            line=line,
            lines_floats=floats,
            pool=0,
            **ending(y, spec.activation, spec.slope, residual),
        ),
    )


def _blocks(spec: ConvSpec, line: int) -> int:
    """How many blocks of output lines an image is cut into: as many for each thread."""
    lines = _LINES_BYTES // (4 * line * spec.frames.t)
    fitting = max(1, (lines - spec.r) // spec.stride[0] + 1)
    threads = torch.get_num_threads()
    blocks = -(-spec.out_h // fitting)
    return min(-(-blocks // threads) * threads, spec.out_h)


class _Seen(NamedTuple):
    """A line of the input, which may lie beyond its edges."""

    image: Value
    frame: Value
    row: Value


class _Line(NamedTuple):
    """A line of the result, of which each frame is an image."""

    image: Value
    row: Value


class _Window(NamedTuple):
    """An output's window begins in the copied lines at `source`, its neighbour's `step` further,
    and `frame` further what it sees of the next frame."""

    source: Value
    step: int
    frame: Value


class _Outputs(NamedTuple):
    """The place of the first of a tile's outputs, which are neighbours in a line."""

    image: Value
    row: Value
    column: Value


class _Panel(NamedTuple):
    """Filters: the number of the first, and what emits each vector, the last maybe narrower."""

    channel: Value
    vectors: list[Emitter]


def _emit(e: Emitter, a: Args, thread: Value, threads: Value, *, step: int) -> None:
    lines = a.lines.floats() + a.worker * a.lines_floats
    begin, end = e.share(a.n * a.out_d * a.blocks, thread, threads)
    with e.range(begin, end) as unit:
        image, block = unit // a.blocks, unit % a.blocks
        side = a.pool + 1
        # Blocks are cut in lines of what is stored, so that none cuts a pooled window in two.
        height = emit_pooled(e, a, a.out_h)
        first, last = (n * height // a.blocks * side for n in (block, block + 1))
        top, front = first * a.stride_h - a.pad_h, image % a.out_d * a.stride_d - a.pad_d
        seen_lines = (last - first - 1) * a.stride_h + a.r
        frame = seen_lines * a.line
        with e.range(0, a.t) as i, e.range(0, seen_lines) as j:
            seen = _Seen(image // a.out_d, front + i * a.dilation_d, top + j)
            _emit_line(e, a, seen, lines + (i * frame + j * a.line))
        with e.range(0, a.panels) as panel, e.range(first, last) as row:
            window = _Window(lines + (row - first) * a.stride_h * a.line, step, frame)
            _emit_row(e, a, window, _Line(image, row), panel * e.isa.panel_columns)


def _emit_line(e: Emitter, a: Args, seen: _Seen, to: Value) -> None:
    """Copy a line of an image with the padding beside it; zeros for one beyond the edges."""
    image, frame, row = seen
    nearest = e.max(0, e.min(frame, a.d - 1))
    line, area = nearest * a.h + row, a.d * a.h * a.w
    plane, skipped = image * a.c * area + line * a.w, (image * area + line * a.w) * a.x_pixel
    source = a.x.floats() + skipped
    floats, pad = a.w * a.c, a.pad_w * a.c
    behind = a.line - pad - floats

    def copy() -> None:
        """Pixels without gaps, channels last, are one row of floats."""
        _clear(e, to, pad)
        with e.range(0, floats // e.width * e.width, e.width) as i:
            e.store(e.load(source + i), to + (pad + i))
        rest = floats // e.width * e.width
        mask = e.lanes(floats - rest)
        e.store(e.load(source + rest, mask), to + (pad + rest), mask)
        _clear(e, to + (pad + floats), behind)

    def colours() -> None:
        """Three lines, one per colour, become one."""
        _clear(e, to, pad)
        _clear(e, to + (pad + floats), behind)
        red = a.x.floats() + plane

        def put(column: Value, mask: Value | None) -> None:
            lines = [e.load(red + (area * colour + column), mask) for colour in range(3)]
            for number, vector in enumerate(in_turns(e, lines)):
                place = column * 3 + number * e.width
                part = None if mask is None else e.lanes(floats - place)
                e.store(vector, to + (pad + place), part)

        each_vector(e, e.i64(0), a.w, put)

    def gather() -> None:
        """Pixels with gaps between them, a slice of a wider image; or planes of other channels."""
        _clear(e, to, a.line)
        planes = a.planes != 0
        begin = a.x.floats() + e.select(planes, plane, skipped)
        pixel = e.select(planes, e.i64(1), a.x_pixel)
        channel = e.select(planes, area, e.i64(1))
        with e.range(0, a.w) as column, e.range(0, a.c) as c:
            value = e.read(begin + (column * pixel + c * channel))
            e.write(value, to + (pad + column * a.c + c))

    def inside() -> None:
        coloured = (a.planes != 0) & (a.c == 3)
        # A single channel is its own plane.
        dense = ((a.planes == 0) | (a.c == 1)) & (a.x_pixel == a.c)
        e.branch(coloured, colours, lambda: e.branch(dense, copy, gather))

    there = (a.held != 0) | (nearest == frame)
    e.branch(there & (row >= 0) & (row < a.h), inside, lambda: _clear(e, to, a.line))


def _clear(e: Emitter, to: Value, count: Value) -> None:
    """Store zeros in whole vectors. What they cover beyond is written later, or is nobody's."""
    with e.range(0, count, e.width) as i:
        e.store(e.vector(0.0), to + i)


def _emit_row(e: Emitter, a: Args, window: _Window, line: _Line, channel: Value) -> None:
    """Compute a line of outputs for one panel of channels."""
    least = e.isa.least
    columns = e.min(a.k - channel, e.i64(e.isa.panel_columns))
    cases = {
        parts: partial(_emit_tiles, e, a, window, line, channel, parts * least)
        for parts in range(1, e.isa.panel_columns // least + 1)
    }
    e.switch((columns + (least - 1)) // least, cases)


def _emit_tiles(
    e: Emitter, a: Args, window: _Window, line: _Line, channel: Value, columns: int
) -> None:
    """Compute a line of outputs for so many columns of a panel."""
    whole, rest = divmod(columns, e.width)
    panel = _Panel(channel, [e] * whole + [e.of_width(rest)] * (rest > 0))
    # Tiles are even everywhere, so that none cuts a pooled window in two.
    tile = min(_OUTPUTS, e.isa.rows * e.isa.vectors // len(panel.vectors)) // 2 * 2
    outputs = emit_pooled(e, a, a.out_w) * (a.pool + 1)
    with e.range(0, outputs, tile) as wanted:
        # The last tile moves left to end with the line, and computes some outputs again.
        left = e.min(wanted, outputs - tile)
        here = window._replace(source=window.source + left * window.step)
        _emit_tile(e, a, here, _Outputs(line.image, line.row, left), panel, tile)


def _emit_tile(
    e: Emitter, a: Args, window: _Window, first: _Outputs, panel: _Panel, outputs: int
) -> None:
    """Compute neighbouring outputs for some vectors of filters, all sums in registers."""
    columns = len(panel.vectors) * e.width
    weights = a.weights.floats() + panel.channel * a.t * a.r * a.filter_line
    sums = [[own.variable(0.0) for _ in range(outputs)] for own in panel.vectors]
    for j, line in enumerate(sums):
        bias = panel.vectors[j].load(a.bias.floats() + (panel.channel + j * e.width))
        for one in line:
            one.value = bias
    with e.range(0, a.t) as frame, e.range(0, a.r) as row:
        values = window.source + (frame * window.frame + row * a.line)
        filters = weights + (frame * a.r + row) * a.filter_line * columns
        with e.range(0, a.filter_line) as tap:
            place = filters + tap * columns
            factors = [own.load(place + j * e.width) for j, own in enumerate(panel.vectors)]
            for number in range(outputs):
                value = e.read(values + (tap + number * window.step))
                for own, line, factor in zip(panel.vectors, sums, factors, strict=True):
                    one = line[number]
                    one.value = own.fma(own.broadcast(value), factor, one.value)
    for j, (own, line) in enumerate(zip(panel.vectors, sums, strict=True)):
        channel = panel.channel + j * e.width
        totals = [e.shuffle(one.value, [*range(e.width)]) for one in line]
        whole, part = (Place(channel, mask) for mask in (None, e.lanes(a.k - channel)))
        if own.width < e.width:
            _finish(e, a, totals, first, part)
        elif j < len(sums) - 1:
            _finish(e, a, totals, first, whole)
        else:
            fill = partial(_finish, e, a, totals, first)
            e.branch(channel + e.width <= a.k, partial(fill, whole), partial(fill, part))


def _finish(e: Emitter, a: Args, sums: list[Value], first: _Outputs, place: Place) -> None:
    """Store neighbouring outputs; pooled, if they should be."""
    image, row, column = first
    pixel = (image * a.out_h + row) * a.out_w + column
    values = activated(e, a, sums, pixel, place)

    def pool() -> None:
        corner = (image * (a.out_h // 2) + row // 2) * (a.out_w // 2) + column // 2
        pairs = [e.variable(0.0) for _ in values[::2]]
        for pair, one, other in zip(pairs, values[::2], values[1::2], strict=True):
            pair.value = emit_larger(e, one, other)
        # The line above was pooled and stored before, by this thread: lines come in order.
        with e.when(row % 2 == 1):
            above = a.y.floats() + (corner * a.y_pixel + place.channel)
            for number, pair in enumerate(pairs):
                stored = e.load(above + a.y_pixel * number, place.mask)
                pair.value = emit_larger(e, stored, pair.value)
        put(e, a, [pair.value for pair in pairs], corner, place)

    e.branch(a.pool != 0, pool, partial(put, e, a, values, pixel, place))


@cache
def stem_kernel(step: int) -> Kernel:
    """The kernel for windows `step` floats apart."""
    return Kernel(f"stem{step}", _FIELDS, partial(_emit, step=step))
