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
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError
from ..language import isa as isas
from ..language.isa import Isa
from ..language.loops import padded
from ..product.microkernel import tiles_for
from ..tape.steps import Scratch, Step, View, held, pieces_of, step
from .heads import APART, ATTENTION, Attended, floats_of

_SCORES = 24 << 10
"""The most floats of scores that a block of queries may have: with its exponentials, keys and
values it should fit into a second-level cache."""
_ROWS = 48
"""The most queries in a block: from here on reading a panel costs little beside using it."""


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
    floats = floats_of(size, block, isa)
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
        pieces_of(size.images * size.heads * parts, size.products),
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
        tile=tiles_for(size.keys, size.outputs),
    )


def _mask_fields(name: str, mask: Mask | None) -> dict[str, Any]:
    """The fields of one mask: where it is, and how far its rows, heads and images are apart."""
    if mask is None:
        return {name: None, **{f"{name}_{field}": 0 for field in APART}, f"{name}_images": 1}
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
