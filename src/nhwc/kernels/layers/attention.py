"""Attention, straight from the rows of tokens that linear layers write.

A token is a pixel whose channels are those of all heads. A head reads some channels of each row of
queries, keys and values, which may be one matrix or three, and writes its channels of the result.
Nothing is permuted: for each head a thread copies what the product wants into memory of its own.

    tokens, H heads of D channels              keys, transposed       values
    +------------------------------+           +-----+-----+--        +------+
    | q q q | k k k | v v v |      |  head h   | D deep,   |          | keys |
    | q q q | k k k | v v v |  ... | --------> | a column  |          | deep |
    +------------------------------+           | for a key |          +------+
                                               +-----+-----+--            |
                                                     |                    |
    a block of queries, scaled  ------------>   scores + mask             |
                                                     | exp(score - top)   v
                                                     +-------------->  result / sum

Scores of a block of queries stay in the second-level cache between the two products, which are the
convolutions' (`TILE`): keys and values are its panels, a mask is its residual. The exponentials
are stored as the second product wants its rows packed, and divided by their sum only at the end,
where a row has but D numbers.

Where the first head of a token begins is told by tables. So windows, shifted or not, are read from
the image as it lies, and the result is written to where the image wants it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import InputError
from ..language import isa as isas
from ..language.compiler import Args, Kernel
from ..language.isa import Isa
from ..language.loops import each_vector, emit_whole, padded
from ..language.values import Value
from ..language.vectors import Emitter
from ..product.microkernel import FINAL, TILE, Cut, TileCall, even
from ..tape.steps import Scratch, Step, View, bits, held, step
from .activations import Activation, clamp, emit_bounded_exp
from .normalize import across, largest

_SCORES = 24 << 10
"""The most floats of scores that a block of queries may have: with its exponentials, keys and
values it should fit into a second-level cache."""
_ROWS = 48
"""The most queries in a block: from here on reading a panel costs little beside using it."""


_APART = ("pixel", "head", "n")
_OF_MASK = ("", *(f"_{field}" for field in (*_APART, "images")))
"""The ends of the names of a mask's fields."""


@dataclass(frozen=True)
class Lie:
    """Where the heads of queries, keys or values lie.

    `places` holds the float at which the first head of each token begins, image after image; the
    next head begins `apart` further.
    """

    places: Tensor
    apart: int

    def table(self, view: View, heads: int, depth: int) -> Tensor:
        """The places, whose heads of so many channels all lie in the view."""
        end = (heads - 1) * self.apart
        return held(self.places, view.floats, before=min(0, end), behind=max(0, end) + depth)


@dataclass(frozen=True)
class Attended:
    """The sizes of an attention: `depth` channels of each head are multiplied, `outputs` mixed."""

    images: int
    heads: int
    queries: int
    keys: int
    depth: int
    outputs: int


@dataclass(frozen=True)
class Mask:
    """Numbers added to the scores: rows of a number for each key, in order of image, head, query.

    `images` and `heads` are how many of them have rows of their own; one set serves all, and a few
    images' take turns. Where there is one query's row it serves all queries.
    """

    view: View
    images: int
    heads: int
    queries: int

    def serves(self, size: Attended) -> bool:
        """Whether it has a row, in its memory, for every query that asks for one."""
        return (
            self.heads in (1, size.heads)
            and self.queries in (1, size.queries)
            and 0 < self.images * self.heads * self.queries <= self.view.pixels
            and self.view.shape[1] >= size.keys
        )


def attention_step(
    queries: View,
    keys: View,
    values: View,
    y: View,
    *,
    size: Attended,
    lies: tuple[Lie, Lie, Lie],
    result: Lie,
    scale: float,
    masks: Sequence[Mask] = (),
    causal: bool = False,
    safe: bool = False,
) -> Step:
    """softmax(scale * queries @ keys + masks) @ values for each head of each image.

    `lies` are of queries, keys and values, `result` is of what the queries get. There are at most
    two masks: a bias of all windows, say, and what each window does not see. If `causal`, a query
    sees no keys behind its own place. One whose scores are all minus infinity gives NaN, or zeros
    if `safe`.
    """
    isa = isas.host()
    block, parts = _cut(size, isa, torch.get_num_threads())
    floats = sum(_rooms(size, block, isa))
    tables = [
        lies[0].table(queries, size.heads, size.depth),
        lies[1].table(keys, size.heads, size.depth),
        lies[2].table(values, size.heads, size.outputs),
        result.table(y, size.heads, size.outputs),
    ]
    for mask in masks:
        if not mask.serves(size):
            raise InputError(
                f"a mask with rows for {mask.images} images, {mask.heads} heads and {mask.queries} "
                f"queries does not serve {size}: a kernel would read the memory of others. Report "
                "this model."
            )
    first, second = (*masks, None, None)[:2]
    return step(
        ATTENTION,
        x=queries,
        x_head=lies[0].apart,
        x_places=tables[0],
        keys=keys,
        keys_head=lies[1].apart,
        keys_places=tables[1],
        values=values,
        values_head=lies[2].apart,
        values_places=tables[2],
        **_mask_fields("mask", first),
        **_mask_fields("second", second),
        y=y,
        y_head=result.apart,
        y_places=tables[3],
        n=size.images,
        heads=size.heads,
        queries=size.queries,
        tokens=size.keys,
        depth=size.depth,
        outputs=size.outputs,
        scale=float(scale),
        causal=int(causal),
        safe=int(safe),
        block=block,
        row_parts=parts,
        scratch=Scratch(4 * floats, per_thread=True),
        scratch_floats=floats,
        tile=TILE,
    )


def _mask_fields(name: str, mask: Mask | None) -> dict[str, Any]:
    """The fields of one mask: where it is, and how far its rows, heads and images are apart."""
    if mask is None:
        return {name: None, **{f"{name}_{field}": 0 for field in _APART}, f"{name}_images": 1}
    row = mask.view.pixel
    return {
        name: mask.view,
        f"{name}_pixel": row if mask.queries > 1 else 0,
        f"{name}_head": mask.queries * row if mask.heads > 1 else 0,
        f"{name}_n": mask.heads * mask.queries * row,
        f"{name}_images": mask.images,
    }


def _cut(size: Attended, isa: Isa, threads: int) -> tuple[int, int]:
    """How many queries are multiplied at once, and into how many parts those of a head are cut.

    Each part packs keys and values anew, so heads are cut only where threads have too few of them.
    """
    tiles = max(1, min(_ROWS, _SCORES // padded(size.keys)) // isa.rows)
    block = min(size.queries, tiles * isa.rows)
    units, parts = size.images * size.heads, 1
    most = -(-size.queries // isa.rows)
    while parts < most and units * parts % threads and units * parts < 4 * threads:
        parts += 1
    return block, parts


class _Rooms(NamedTuple):
    """Floats of each part of a thread's memory, or where these parts begin."""

    keys: int
    values: int
    queries: int
    scores: int
    weights: int
    mixed: int
    sums: int
    bias: int


def _rooms(size: Attended, block: int, isa: Isa) -> _Rooms:
    keys, outputs = padded(size.keys), padded(size.outputs)
    return _Rooms(
        keys=keys * size.depth,
        values=outputs * size.keys,
        queries=block * padded(size.depth),
        scores=block * keys,
        weights=block * keys,
        mixed=block * outputs,
        sums=padded(block),
        bias=padded(isa.panel_columns),
    )


class _Memory(NamedTuple):
    """A thread's own memory, see `_Rooms`."""

    keys: Value
    values: Value
    queries: Value
    scores: Value
    weights: Value
    mixed: Value
    sums: Value
    bias: Value


def _memory(e: Emitter, a: Args, thread: Value) -> _Memory:
    """Where the parts begin; rows of vectors as wide as here take no more than `_rooms` has."""
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
    places = [a.scratch.floats() + thread * a.scratch_floats]
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
            top.value = largest(
                e, top.value, value if mask is None else e.select(mask, value, lowest)
            )

        each_vector(e, 0, seen, find_top)
        highest = across(e, top.value, lambda p, q: largest(e, p, q))
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
