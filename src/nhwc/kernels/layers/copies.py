"""Moving pixels: into channels last, out of it, and channels of one order into another."""

from __future__ import annotations

from collections.abc import Sequence

from llvmlite import ir

from ..language.compiler import Args, Kernel
from ..language.loops import each_vector
from ..language.values import WORD, Value
from ..language.vectors import Emitter
from ..tape.steps import Argument, Step, View, step

INPUT_ARGUMENTS = ("x", "pixels", "x_n", "x_c", "x_h", "x_w")
"""The first fields of the kernel that brings an input in; a program sets them for every call."""
CHUNK = 16
"""How many vectors of a column are turned at once by one thread, which so fills whole lines."""
PLANES = "planes"
"""The field of a kernel that itself reads `x` as N, C, H, W where a program sets this to 1."""


def input_step(y: View) -> Step:
    """Bring a tensor of any strides to `y`, once the input arguments are set; nothing before."""
    _, c, h, w = y.shape
    given = dict.fromkeys(INPUT_ARGUMENTS, 0)
    return step(INPUT, **given, y=y, y_pixel=y.pixel, c=c, h=h, w=w)


def nchw_step(x: View, y: View) -> Step:
    """Bring x, channels last, to y as N, C, H, W without gaps; y has one pixel per image."""
    n, c, h, w = x.shape
    return step(NCHW, x=x, x_pixel=x.pixel, n=n, c=c, area=h * w, y=y, y_pixel=y.pixel)


def interleave_steps(parts: Sequence[View], y: View) -> list[Step]:
    """The first channel of every part, then the second of every part: cat, then channel shuffle."""
    c = parts[0].shape[1]
    shape: dict[str, Argument] = {"pixels": y.pixels, "c": c, "y": y, "y_pixel": y.pixel}
    if len(parts) == 2:
        x, other = parts
        return [
            step(INTERLEAVE, x=x, x_pixel=x.pixel, other=other, other_pixel=other.pixel, **shape)
        ]
    return [
        step(SPREAD, x=x, x_pixel=x.pixel, first=first, apart=len(parts), **shape)
        for first, x in enumerate(parts)
    ]


def shuffle_steps(x: View, y: View, groups: int) -> list[Step]:
    """Channel shuffle: y[:, i * groups + g] = x[:, g * (channels / groups) + i]."""
    size = x.shape[1] // groups
    return interleave_steps([x.channels(g * size, (g + 1) * size) for g in range(groups)], y)


def _emit_input(e: Emitter, a: Args, thread: Value, threads: Value) -> None:
    begin, end = e.share(a.pixels // e.max(a.w, 1), thread, threads)
    with e.range(begin, end) as row:
        source = a.x.floats() + (row // a.h * a.x_n + row % a.h * a.x_h)
        target = a.y.floats() + row * a.w * a.y_pixel
        done = e.variable(0)
        planes = (a.c == 3) & (a.x_w == 1) & (a.y_pixel == 3)
        with e.when(planes):
            whole = a.w // e.width * e.width
            with e.range(0, whole, e.width) as column:
                colours = [e.load(source + (a.x_c * i + column)) for i in range(3)]
                for number, vector in enumerate(in_turns(e, colours)):
                    e.store(vector, target + (column * 3 + number * e.width))
            done.value = whole
        with e.when(~planes & (a.c > 2) & (a.x_w == 1) & (a.w >= e.width)):
            _emit_turned_in(e, a, source, target)
            done.value = a.w
        with e.range(done.value, a.w) as column, e.range(0, a.c) as c:
            value = e.read(source + (column * a.x_w + c * a.x_c))
            e.write(value, target + (column * a.y_pixel + c))


def _emit_turned_in(e: Emitter, a: Args, source: Value, target: Value) -> None:
    """A row of an image whose planes lie apart, in blocks of pixels; the last two may overlap."""
    with e.range(0, a.w, e.width) as column:
        first = e.min(column, a.w - e.width)

        def channels(c: Value, mask: Value | None) -> None:
            # What a narrow block has too many of is read again, and left out by the mask.
            planes = [e.min(c + i, a.c - 1) * a.x_c for i in range(e.width)]
            rows = [e.load(source + (plane + first)) for plane in planes]
            for i, pixel in enumerate(transposed(e, rows)):
                e.store(pixel, target + ((first + i) * a.y_pixel + c), mask)

        each_vector(e, 0, a.c, channels)


def in_turns(e: Emitter, vectors: Sequence[Value]) -> list[Value]:
    """The first lane of every vector, then the second of every vector, and so on."""
    count, width = len(vectors), e.width
    results = []
    for block in range(count):
        lanes = [divmod(block * width + lane, count) for lane in range(width)]
        # A shuffle takes two vectors: the first two give their lanes, each further one its own.
        mixed = vectors[0].llvm
        for source in range(1, count):
            picks = []
            for lane, (index, owner) in enumerate(lanes):
                if source == 1 and owner == 0:
                    picks.append(index)
                else:
                    picks.append(width + index if owner == source else lane)
            shuffle = ir.Constant(ir.VectorType(WORD, width), picks)
            mixed = e.builder.shuffle_vector(mixed, vectors[source].llvm, shuffle)
        results.append(Value(e, mixed))
    return results


def transposed(e: Emitter, rows: list[Value]) -> list[Value]:
    """As many vectors as a vector has lanes, the first of which holds the first lane of each row.

    Two halves of all rows are shuffled into one another, as cards are, until each is in its place.
    """
    half = len(rows) // 2
    for _ in range(half.bit_length()):
        pairs = zip(rows[:half], rows[half:], strict=True)
        rows = [
            e.shuffle(one, [at for lane in lanes for at in (lane, e.width + lane)], other)
            for one, other in pairs
            for lanes in (range(half), range(half, e.width))
        ]
    return rows


def _emit_nchw(e: Emitter, a: Args, thread: Value, threads: Value) -> None:
    """Blocks of pixels and channels are turned in registers; the last two of pixels may overlap."""
    long = CHUNK * e.width
    chunks = (a.area + (long - 1)) // long
    begin, end = e.share(a.n * chunks, thread, threads)
    with e.range(begin, end) as unit:
        image, first = unit // chunks, unit % chunks * long
        last = e.min(first + long, a.area)
        source = a.x.floats() + image * a.area * a.x_pixel
        target = a.y.floats() + image * a.y_pixel

        def channels(c: Value, mask: Value | None) -> None:
            with e.range(first, last, e.width) as pixel:
                at = e.min(pixel, a.area - e.width)
                rows = [e.load(source + ((at + i) * a.x_pixel + c), mask) for i in range(e.width)]
                for i, plane in enumerate(transposed(e, rows)):
                    with e.when(c + i < a.c):
                        e.store(plane, target + ((c + i) * a.area + at))

        def numbers() -> None:
            with e.range(0, a.c) as c, e.range(first, last) as pixel:
                e.write(e.read(source + (pixel * a.x_pixel + c)), target + (c * a.area + pixel))

        turns = (a.area >= e.width) & (a.c > 2)
        e.branch(turns, lambda: each_vector(e, 0, a.c, channels), numbers)


def _emit_interleave(e: Emitter, a: Args, thread: Value, threads: Value) -> None:
    begin, end = e.share(a.pixels, thread, threads)
    with e.range(begin, end) as pixel:
        left, right = a.x.floats() + pixel * a.x_pixel, a.other.floats() + pixel * a.other_pixel
        target = a.y.floats() + pixel * a.y_pixel
        whole = a.c // e.width * e.width
        with e.range(0, whole, e.width) as c:
            low, high = in_turns(e, [e.load(left + c), e.load(right + c)])
            e.store(low, target + c * 2)
            e.store(high, target + (c * 2 + e.width))
        with e.when(whole < a.c):
            mask = e.lanes(a.c - whole)
            parts = [e.load(left + whole, mask), e.load(right + whole, mask)]
            low, high = in_turns(e, parts)
            rest = (a.c - whole) * 2
            e.store(low, target + whole * 2, e.lanes(rest))
            e.store(high, target + (whole * 2 + e.width), e.lanes(rest - e.width))


def _emit_spread(e: Emitter, a: Args, thread: Value, threads: Value) -> None:
    begin, end = e.share(a.pixels, thread, threads)
    with e.range(begin, end) as pixel, e.range(0, a.c) as c:
        value = e.read(a.x.floats() + (pixel * a.x_pixel + c))
        e.write(value, a.y.floats() + (pixel * a.y_pixel + (c * a.apart + a.first)))


INPUT = Kernel("input", (*INPUT_ARGUMENTS, "y", "y_pixel", "c", "h", "w"), _emit_input)
NCHW = Kernel("nchw", ("x", "x_pixel", "n", "c", "area", "y", "y_pixel"), _emit_nchw)
INTERLEAVE = Kernel(
    "interleave",
    ("x", "x_pixel", "other", "other_pixel", "pixels", "c", "y", "y_pixel"),
    _emit_interleave,
)
SPREAD = Kernel(
    "spread", ("x", "x_pixel", "first", "apart", "pixels", "c", "y", "y_pixel"), _emit_spread
)
