"""The kernel of attention, a head of an image at a time; `attention` draws it.

Scores are the convolutions' product (`TILE`): keys and values are its panels, a mask is its
residual.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ..language.compiler import Args, Kernel
from ..language.isa import Isa
from ..language.loops import each_vector, emit_whole, padded
from ..language.values import Value
from ..language.vectors import Emitter
from ..product.microkernel import FINAL, Cut, TileCall, even
from ..tape.steps import bits
from .activations import Activation, clamp
from .copies import transposed
from .curves import emit_bounded_exp, larger
from .normalize import across

APART = ("pixel", "head", "n")
"""What is so far apart in a mask: its rows, its heads, its images."""

_OF_MASK = ("", *(f"_{field}" for field in (*APART, "images")))
"""The ends of the names of a mask's fields."""


@dataclass(frozen=True)
class Attended:
    """The sizes of an attention: `depth` channels of each head are multiplied, `outputs` mixed."""

    images: int
    heads: int
    queries: int
    keys: int
    depth: int
    outputs: int

    @property
    def products(self) -> int:
        scores = self.images * self.heads * self.queries * self.keys
        return scores * (self.depth + self.outputs)


def floats_of(size: Attended, block: int, isa: Isa) -> int:
    """The floats that a thread needs for itself, for blocks of so many queries; see `_Memory`."""
    keys, outputs = padded(size.keys), padded(size.outputs)
    return (
        keys * size.depth
        + outputs * size.keys
        + block * padded(size.depth)
        + 2 * block * keys
        + block * outputs
        + padded(block)
        + padded(isa.panel_columns)
    )


class _Memory(NamedTuple):
    """Where the parts of a thread's own memory begin."""

    keys: Value
    values: Value
    queries: Value
    scores: Value
    weights: Value
    mixed: Value
    sums: Value
    bias: Value


def _memory(e: Emitter, a: Args, thread: Value) -> _Memory:
    """Where the parts begin; rows of vectors as wide as here take no more than `floats_of` says."""
    keys, outputs = emit_whole(e, a.tokens), emit_whole(e, a.outputs)
    floats = (
        keys * a.depth,
        outputs * a.tokens,
        a.block * emit_whole(e, a.depth),
        a.block * keys,
        a.block * keys,
        a.block * outputs,
        emit_whole(e, a.block),
    )
    places = [a.scratch.floats() + a.worker * a.scratch_floats]
    for count in floats:
        places.append(places[-1] + count)
    return _Memory(*places)


class _Head(NamedTuple):
    """A head of an image."""

    image: Value
    head: Value


class _Block(NamedTuple):
    """Queries that are multiplied at once: the first, how many, and how they make tiles."""

    first: Value
    rows: Value
    tiles: Cut


def _emit(e: Emitter, a: Args, thread: Value, threads: Value) -> None:
    memory, tile = _memory(e, a, thread), TileCall(e, a.tile)
    with e.range(0, e.isa.panel_columns, e.width) as lane:
        e.store(e.vector(0.0), memory.bias + lane)
    low, high = (bits(bound) for bound in clamp(Activation.NONE))
    tile.set(segments=1, bias=memory.bias, low=low, high=high, mode=FINAL)
    begin, end = e.share(a.n * a.heads * a.row_parts, thread, threads)
    with e.range(begin, end) as unit:
        part, number = unit % a.row_parts, unit // a.row_parts
        head = _Head(number // a.heads, number % a.heads)
        with e.when((unit == begin) | (part == 0)):
            _pack_keys(e, a, head, memory.keys)
            _pack_values(e, a, head, memory.values)
        first, last = (index * a.queries // a.row_parts for index in (part, part + 1))
        with e.range(first, last, a.block) as row:
            rows = e.min(a.block, last - row)
            block = _Block(row, rows, even(e, rows))
            _pack_queries(e, a, head, block, memory.queries)
            _score(e, a, head, block, memory, tile)
            _add_second(e, a, head, block, memory)
            _exponentiate(e, a, block, memory)
            _mix(e, a, memory, tile)
            _put(e, a, head, block, memory)


def _seen(e: Emitter, a: Args, query: Value) -> Value:
    """How many keys a query sees."""
    return e.min(a.tokens, e.select(a.causal != 0, query + 1, a.tokens))


def _place(e: Emitter, places: Value, token: Value) -> Value:
    """The float at which the first head of a token begins."""
    return e.read(places.integers() + token)


def _pack_keys(e: Emitter, a: Args, head: _Head, into: Value) -> None:
    """Transpose the keys of a head: [panel][channel][key], a vector of keys at a time."""
    whole, wide = emit_whole(e, a.tokens), e.isa.panel_columns
    source = a.keys.floats() + head.head * a.keys_head
    with e.range(0, whole, e.width) as key:
        # Behind the last key it is repeated: what is computed of that is not stored.
        tokens = [e.min(key + lane, a.tokens - 1) for lane in range(e.width)]
        places = [_place(e, a.keys_places, head.image * a.tokens + token) for token in tokens]
        lines = [source + place for place in places]
        panel = key // wide * wide
        columns = e.min(whole - panel, e.i64(wide))
        to = into + (panel * a.depth + (key - panel))

        def transpose(channel: Value, mask: Value | None) -> None:
            turned = transposed(e, [e.load(line + channel, mask) for line in lines])
            for number, vector in enumerate(turned):
                place = to + (channel + number) * columns
                if mask is None:
                    e.store(vector, place)
                    continue
                with e.when(channel + number < a.depth):
                    e.store(vector, place)

        each_vector(e, 0, a.depth, transpose)


def _pack_values(e: Emitter, a: Args, head: _Head, into: Value) -> None:
    """Copy the values of a head: [panel][key][channel]."""
    whole, wide = emit_whole(e, a.outputs), e.isa.panel_columns
    source = a.values.floats() + head.head * a.values_head
    with e.range(0, a.tokens) as key:
        line = source + _place(e, a.values_places, head.image * a.tokens + key)

        def copy(channel: Value, mask: Value | None) -> None:
            panel = channel // wide * wide
            columns = e.min(whole - panel, e.i64(wide))
            to = into + (panel * a.tokens + key * columns + (channel - panel))
            e.store(e.load(line + channel, mask), to)

        each_vector(e, 0, a.outputs, copy)


def _pack_queries(e: Emitter, a: Args, head: _Head, block: _Block, into: Value) -> None:
    """Scale some queries, and pack them as rows of the product."""
    source = a.x.floats() + head.head * a.x_head
    scale, floats = e.broadcast(e.float_of_bits(a.scale)), emit_whole(e, a.depth)
    first = head.image * a.queries + block.first
    with e.range(0, block.rows) as row:
        line = source + _place(e, a.x_places, first + row)
        to, rows = _packed(e, block, row, floats, into)

        def copy(channel: Value, mask: Value | None) -> None:
            e.store(e.load(line + channel, mask) * scale, to + channel * rows)

        each_vector(e, 0, a.depth, copy)


def _packed(
    e: Emitter, block: _Block, row: Value, floats: Value, into: Value
) -> tuple[Value, Value]:
    """Where the first chunk of a packed row lies, and how many rows its tile has."""
    first, rows = block.tiles.around(e, row)
    return into + (first * floats + (row - first) * e.width), rows


def _score(
    e: Emitter, a: Args, head: _Head, block: _Block, memory: _Memory, tile: TileCall
) -> None:
    """Multiply some queries by the keys that any of them sees, and add the mask."""
    seen = _seen(e, a, block.first + block.rows - 1)
    wide, apart = e.isa.panel_columns, emit_whole(e, a.tokens)
    own = head.image % a.mask_images * a.mask_n + head.head * a.mask_head
    own = own + block.first * a.mask_pixel
    tile.set(**block.tiles._asdict(), a=memory.queries, a_row=emit_whole(e, a.depth))
    tile.set(segment=a.depth, y_row=apart, residual_row=a.mask_pixel)
    with e.range(0, seen, wide) as column:
        masked = a.mask.floats() + (own + column)
        tile(
            b=memory.keys + column * a.depth,
            columns=e.min(a.tokens - column, e.i64(wide)),
            y=memory.scores + column,
            residual=e.select(a.mask != 0, masked.address(), e.i64(0)),
        )


def _add_second(e: Emitter, a: Args, head: _Head, block: _Block, memory: _Memory) -> None:
    """Add the second mask, if there is one, to the scores of some queries."""
    own = head.image % a.second_images * a.second_n + head.head * a.second_head
    with e.when(a.second != 0), e.range(0, block.rows) as row:
        scores = memory.scores + row * emit_whole(e, a.tokens)
        added = a.second.floats() + (own + (block.first + row) * a.second_pixel)

        def add(key: Value, mask: Value | None) -> None:
            e.store(e.load(scores + key, mask) + e.load(added + key, mask), scores + key, mask)

        each_vector(e, 0, a.tokens, add)


def _exponentiate(e: Emitter, a: Args, block: _Block, memory: _Memory) -> None:
    """Bring scores to exponentials, packed as rows of the product, and keep what divides them.

    What a query does not see has none: zeros, by which the product multiplies the values.
    """
    floats, lowest = emit_whole(e, a.tokens), e.vector(float("-inf"))
    with e.range(0, block.rows) as row:
        seen = _seen(e, a, block.first + row)
        line = memory.scores + row * floats
        to, rows = _packed(e, block, row, floats, memory.weights)
        top, total = e.variable(float("-inf")), e.variable(0.0)

        def find_top(key: Value, mask: Value | None) -> None:
            value = e.load(line + key, mask)
            top.value = larger(
                e, top.value, value if mask is None else e.select(mask, value, lowest)
            )

        each_vector(e, 0, seen, find_top)
        highest = across(e, top.value, lambda p, q: larger(e, p, q))
        # Where all scores are minus infinity, all exponentials are zero if zero is subtracted.
        lost = e.lanes(e.select(a.safe != 0, e.i64(e.width), e.i64(0))) & (highest == lowest)
        highest = e.select(lost, e.vector(0.0), highest)

        def raise_e(key: Value, mask: Value | None) -> None:
            value = emit_bounded_exp(e, e.load(line + key, mask) - highest)
            value = value if mask is None else e.select(mask, value, e.vector(0.0))
            e.store(value, to + key * rows)
            total.value = total.value + value

        each_vector(e, 0, seen, raise_e)
        with e.range(emit_whole(e, seen), floats, e.width) as key:
            e.store(e.vector(0.0), to + key * rows)
        divisor = across(e, total.value, lambda p, q: p + q)
        e.store(e.select(lost, e.vector(1.0), divisor), memory.sums + row, e.lanes(1))


def _mix(e: Emitter, a: Args, memory: _Memory, tile: TileCall) -> None:
    """Multiply the exponentials of some queries by the values."""
    wide = e.isa.panel_columns
    tile.set(a=memory.weights, a_row=emit_whole(e, a.tokens), segment=a.tokens)
    tile.set(y_row=emit_whole(e, a.outputs), residual=0)
    with e.range(0, a.outputs, wide) as column:
        tile(
            b=memory.values + column * a.tokens,
            columns=e.min(a.outputs - column, e.i64(wide)),
            y=memory.mixed + column,
        )


def _put(e: Emitter, a: Args, head: _Head, block: _Block, memory: _Memory) -> None:
    """Divide by the sums, and store each query's result in its row."""
    first = head.image * a.queries + block.first
    with e.range(0, block.rows) as row:
        line = memory.mixed + row * emit_whole(e, a.outputs)
        divisor = e.broadcast(e.read(memory.sums + row))
        to = a.y.floats() + (_place(e, a.y_places, first + row) + head.head * a.y_head)

        def divide(channel: Value, mask: Value | None) -> None:
            e.store(e.load(line + channel, mask) / divisor, to + channel, mask)

        each_vector(e, 0, a.outputs, divide)


ATTENTION = Kernel(
    "attention",
    (
        *("x", "x_head", "x_places"),
        *("keys", "keys_head", "keys_places"),
        *("values", "values_head", "values_places"),
        *(f"{name}{end}" for name in ("mask", "second") for end in _OF_MASK),
        *("y", "y_head", "y_places"),
        *("n", "heads", "queries", "tokens", "depth", "outputs"),
        *("scale", "causal", "safe"),
        *("block", "row_parts", "scratch", "scratch_floats", "tile"),
    ),
    _emit,
)
