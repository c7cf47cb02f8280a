"""Convolution in fewer multiplications, by Winograd's minimal filtering.

The image is cut into tiles. Each is transformed, channel by channel side by side in vectors; then
what was a convolution is one matrix product per element of the transformed tile; the products are
transformed back, and bias, residual and activation follow while they are in registers (tiles.py).

    filter       tile of      products for an output    numbers held of a filter
    3x3          2x2             16 / 4  = 4    of 9          16
    3x3          4x4             36 / 16 = 2.25 of 9          36
    3x3, lean    4x4             36 / 16 = 2.25 of 9           9
    2x2          3x3             16 / 9  = 1.78 of 4          16
    4x4          3x3             36 / 9  = 4    of 16         36
    5x5          4x4             64 / 16 = 4    of 25         64
    7x7          2x2             64 / 4  = 16   of 49         64
    1x3, 3x1     four             6 / 4  = 1.5  of 3           6
    1x7, 7x1     four            10 / 4  = 2.5  of 7          10

What it saves in products it pays in transforms, in memory for filters, and in digits. Which form
wins depends on shape and machine, so all are candidates, and measured. Small images are covered by
tiles of 2x2 with less waste; the lean form is for tiles so few that to read transformed filters
would take longer than to transform them (lean.py). Tiles of 6x6 for 3x3, 64 / 36 products, were
tried: they won a tenth at most, on images of 112 pixels and more with few channels, and little or
less than nothing on all others.

If the taps of a filter are apart, so are the pixels of a tile: one of every second pixel lies
beside one of the pixels between. A filter that moves by two sees an image of even and one of odd
pixels through every second of its taps, moving by one: their channels lie one after the other, and
5x5 becomes 3x3 of four times as many channels, of which some taps are zero.

The work is cut into blocks of tiles (`_cut`): `_MOST_TILES` of them make reading a panel of filters
cheap, and `_BLOCK_BYTES` keeps a transformed block within the second-level cache, as every panel
reads all of it. If the filters outweigh the tiles, all tiles are one block, and the threads share
out the panels: each filter is seen once. Where blocks are fewer than threads, these transform the
tiles together, meet at a barrier, and share panels: two steps, INPUT and PRODUCTS.

Sums are rounded differently than in the direct sum, and err as much, but for 5x5 in tiles of 4x4
and for seven taps, which err two to three times as much. NaN and infinity spread to the outputs of
the whole tile that holds them, always as NaN or infinity, where the direct sum would reach only the
pixels next to them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..language import isa as isas
from ..layers.activations import clamp
from ..layers.ending import ending
from ..product.microkernel import tiles_for
from ..product.weights import after, fill_panels, pack_bias
from ..tape.pages import room, shared
from ..tape.steps import Scratch, Step, View, pieces_of, step
from .direct import pack_direct
from .parts import ALL, INPUT, PRODUCTS, outweighs
from .pooled import POOL
from .spec import IMAGE, ConvSpec, Pair
from .tiles import APART, FORMS, Form
from .transforms import Tiling


def forms_of(spec: ConvSpec) -> list[Form]:
    """The forms that compute this convolution; groups fill a vector at least.

    Of a volume they take rows and columns; how a filter moves from frame to frame is no matter.
    """
    if (spec.groups > 1 or spec.stride != (1, 1)) and min(_channels(spec)) < isas.host().width:
        return []
    return [form for form in FORMS.values() if form.t.taps == _taps(spec) and _saves(form, spec)]


def _saves(form: Form, spec: ConvSpec) -> bool:
    """Whether it saves a third of the products; less is lost in the transforms."""
    products = form.t.elements * prod(spec.stride) / prod(form.t.outputs)
    return 3 * products <= 2 * spec.r * spec.s


def copies(form: Form, spec: ConvSpec) -> float:
    """How many times the numbers of a filter it holds."""
    return form.numbers * prod(spec.stride) / (spec.r * spec.s)


def _taps(spec: ConvSpec) -> Pair:
    """The rows and columns of a filter that moves by two, say, and sees every second pixel."""
    rows, columns = (-(-n // by) for n, by in zip((spec.r, spec.s), spec.stride, strict=True))
    return rows, columns


def _channels(spec: ConvSpec) -> tuple[int, int]:
    """The channels that a group reads, and those that it writes."""
    return spec.c // spec.groups, spec.k // spec.groups


def _deep(spec: ConvSpec) -> int:
    """The channels of a group in all parts of what a filter sees; each part fills whole vectors.

    A frame of a volume is a part; where a filter moves by two, so are its even and its odd pixels.
    """
    c, parts = spec.c // spec.groups, spec.frames.t * prod(spec.stride)
    return c if parts == 1 else parts * isas.host().padded(c)


def _as_image(spec: ConvSpec, weight: Tensor) -> tuple[ConvSpec, Tensor]:
    """The filters as those of an image that has the channels of each part in turn."""
    t, (down, across), (rows, columns) = spec.frames.t, spec.stride, _taps(spec)
    if (t, down, across) == (1, 1, 1):
        return spec, weight
    k, c = weight.shape[:2]
    wide = _deep(spec) // (t * down * across)
    beyond = (0, columns * across - spec.s, 0, rows * down - spec.r, 0, 0, 0, wide - c)
    filled = F.pad(weight.detach().reshape(k, c, t, spec.r, spec.s), beyond)
    parts = filled.reshape(k, wide, t, rows, down, columns, across).permute(0, 2, 4, 6, 1, 3, 5)
    wanted = spec.out_h, spec.out_w
    moves: dict[str, Any] = {"stride": (1, 1), "frames": IMAGE, "wanted": wanted}
    image = replace(spec, c=spec.groups * _deep(spec), r=rows, s=columns, **moves)
    return image, parts.reshape(k, _deep(spec), rows, columns)


def pack_winograd(form: Form, spec: ConvSpec, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The filters in panels, one number of each after the other; then the bias."""
    spec, weight = _as_image(spec, weight)
    if form.lean:
        return pack_direct(spec, weight, bias)
    isa, (c, k) = isas.host(), _channels(spec)
    packed, depth = room(packed_floats(form, spec)), form.numbers * c
    ending = pack_bias(bias, k, spec.groups, isa)
    places = packed[: -len(ending)].view(spec.groups, -1)
    for place, part in zip(places, weight.unflatten(0, (spec.groups, k)), strict=True):
        # A panel at a time: in float64 all of them are many times the weights.
        for first in range(0, k, isa.panel_columns):
            filters = form.t.filters(part[first : first + isa.panel_columns])
            panel = place[depth * first : depth * (first + isa.padded(filters.shape[2]))]
            fill_panels(panel, filters.flatten(0, 1), isa)
    packed[-len(ending) :] = ending
    return shared(packed)


def packed_floats(form: Form, spec: ConvSpec) -> int:
    """How many numbers `pack_winograd` returns."""
    padded_k = isas.host().padded(spec.k // spec.groups)
    return spec.groups * (form.numbers * _deep(spec) + 1) * padded_k


def winograd_steps(
    form: Form,
    spec: ConvSpec,
    x: View,
    y: View,
    packed: Tensor | View,
    residual: View | None = None,
) -> tuple[Step, ...]:
    """One step, or two where the tiles are too few to give each thread blocks of its own."""
    isa, threads, t = isas.host(), torch.get_num_threads(), form.t
    (c, k), deep, frames = _channels(spec), _deep(spec), spec.frames
    tiles_h, tiles_w = _tiles(t, spec)
    tiles = spec.n * frames.out_d * tiles_h * tiles_w
    # Transformed, filters are about twice as many numbers, or more.
    shared_out = outweighs(2 * k, tiles)
    # All tiles together: the threads share the panels, and each filter is seen once.
    cut = _Cut(tiles, 1) if shared_out else _cut(t, tiles, isa.panels(k), isa.padded(deep), threads)
    alone = spec.groups > 1 or cut.blocks >= threads
    block_floats = t.elements * cut.block * isa.padded(deep)
    own_floats = t.elements * cut.block * isa.panel_columns + form.room(t, isa.panel_columns)
    own_floats += block_floats * alone
    low, high = clamp(spec.activation, spec.slope)
    sides = spec.sides()
    # A filter is transformed: nobody counts its rows.
    del sides["r"]
    moves = {name: sides.pop(name) for name in APART}
    neighbours = {*moves.values()} == {1}
    given = moves if not neighbours else {POOL: 0} if form.pools else {}
    units = cut.blocks * (spec.groups if alone else isa.panels(k))
    make = partial(
        step,
        form.kernel if neighbours else form.apart,
        pieces_of(units, tiles * t.elements * spec.groups * k * deep),
        x=x,
        weights=packed,
        bias=after(packed, spec.groups * form.numbers * deep * isa.padded(k)),
        shared=Scratch(64 if alone else 4 * block_floats * cut.blocks),
        own=Scratch(4 * own_floats, per_thread=True),
        tile=tiles_for(isa.padded(k)),
        n=spec.n,
        c=c,
        k=k,
        groups=spec.groups,
        deep=deep,
        tiles_h=tiles_h,
        tiles_w=tiles_w,
        block=cut.block,
        blocks=cut.blocks,
        panels=isa.panels(k),
        x_pixel=x.pixel,
        block_floats=block_floats,
        own_floats=own_floats,
        low=low,
        high=high,
        **sides,
        **ending(y, spec.activation, spec.slope, residual),
        **given,
    )
    if alone:
        return (make(phase=ALL),)
    # Transforming tiles alone is short work.
    return replace(make(phase=INPUT), pieces=1), make(phase=PRODUCTS)


def _tiles(t: Tiling, spec: ConvSpec) -> Pair:
    """How many tiles cover an image, down and across; where taps are apart, so are their pixels."""
    sides = zip((spec.out_h, spec.out_w), t.outputs, spec.dilation, strict=True)
    down, across = (apart * -(-out // (apart * outputs)) for out, outputs, apart in sides)
    return down, across


class _Cut(NamedTuple):
    """How many tiles a block has, and how many blocks there are."""

    block: int
    blocks: int


_MOST_TILES = 28
"""How many tiles a block may have: from there on, reading a panel of filters costs little."""
_BLOCK_BYTES = 256 << 10
"""How much of the second-level cache the transformed tiles of a block may take."""


def _cut(t: Tiling, tiles: int, panels: int, depth: int, threads: int) -> _Cut:
    """Blocks as large as is useful, and as many as give every thread the same work."""
    rows = isas.host().rows
    fitting = _BLOCK_BYTES // (4 * t.elements * depth)
    blocks = -(-tiles // max(rows, min(fitting, _MOST_TILES) // rows * rows))
    if blocks * panels % threads:
        blocks = min(-(-blocks // threads) * threads, max(tiles, 1))
    block = -(-tiles // blocks)
    return _Cut(block, -(-tiles // block))
