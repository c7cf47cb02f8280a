"""Bring positions that are added to scores into the channels of queries and keys.

rows = einsum("bhwc,hkc->bhwk", q, by_row)          # what a query has for each row of keys
columns = einsum("bhwc,wkc->bhwk", q, by_column)
bias = (rows[..., :, None] + columns[..., None, :]).reshape(B, N, H * W)
y = F.scaled_dot_product_attention(q, k, v, bias)
                                        ->
y = F.scaled_dot_product_attention(cat([q, rows, columns], -1), cat([k, in_row, in_column], -1), v)

A number that all keys of a row get is a channel more: the query's is the number, a key's is one if
it lies in that row, and zero elsewhere. So a few channels take the place of a matrix of scores for
each head: of 4096 by 4096 in SAM, where 128 channels do. It needs to know all sizes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import fx

from ..graph import bound, erase_unused, fresh_name
from ..graph.modules.layers import as_elements
from ..graph.nodes.seen import note_new, seen_at, shape_at
from ..graph.report import PassReport, Site
from ._folding_sites import name_of, written_between
from ._matching import arithmetic, is_product, is_softmax, unscaled
from ._reporting import reported

_RESHAPES = ("view", "reshape", "flatten", "unflatten", "reshape_as", "view_as")
_MOVES = (*_RESHAPES, "permute", "transpose", "unsqueeze", "expand", operator.getitem)
_OF_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")


@dataclass(frozen=True)
class _Positions:
    """Numbers that are added to scores: each of `parts` has those of keys along some dimensions.

    The sum of all has the dimensions `queries`, and behind them `keys`. The scores begin so many
    `skipped` queries and keys before those that have a position: class tokens have none.
    """

    parts: tuple[fx.Node, ...]
    queries: tuple[int, ...]
    keys: tuple[int, ...]
    skipped: tuple[int, int] = (0, 0)

    def sizes(self, part: fx.Node) -> tuple[int, ...]:
        """The dimensions of the keys, one where the numbers are the same for all along it."""
        return _filled_up(part, len(self.queries + self.keys))[len(self.queries) :]

    def are_of_type(self, query: Any) -> bool:
        """Whether all numbers have the type of the queries, so that both can be channels."""
        seen = [seen_at(one) for one in (query, *self.parts)]
        return len({one and one.dtype for one in seen}) == 1

    @property
    def channels(self) -> int:
        return sum(math.prod(self.sizes(part)) for part in self.parts)


@dataclass(frozen=True)
class _Scores:
    """The product of queries and transposed keys, times a number, and what is added to it."""

    product: fx.Node
    scale: float
    positions: _Positions


def join_positions(gm: fx.GraphModule) -> PassReport:
    """Make channels of all positions that are added to scores, in attention called or spelled."""
    note_new(gm.graph)
    sites = []
    for node in list(gm.graph.nodes):
        called = node.target is F.scaled_dot_product_attention and _of_function(gm, node)
        if called or (is_softmax(node) and _of_softmax(gm, node)):
            sites.append(Site(name_of(node), "positions", True))
    return reported(gm, "join_positions", sites)


def _of_function(gm: fx.GraphModule, node: fx.Node) -> bool:
    given = bound(node, _OF_ATTENTION)
    query, key, mask = (given.get(name) for name in ("query", "key", "attn_mask"))
    of_query, of_key = shape_at(query), shape_at(key)
    plain = not given.get("dropout_p", 0.0) and not given.get("is_causal", False)
    if not plain or not given.keys() <= {*_OF_ATTENTION} or of_query is None or of_key is None:
        return False
    scale = given.get("scale")
    scale = of_query[-1] ** -0.5 if scale is None else scale
    if of_query[:-2] != of_key[:-2] or type(scale) is not float or not scale:
        return False
    scores = (*of_query[:-1], of_key[-2])
    positions = _positions(mask, scores) if shape_at(mask) == scores else None
    if positions is None or not positions.are_of_type(query):
        return False
    if written_between(positions.parts, min(positions.parts), node):
        return False
    with gm.graph.inserting_before(node):
        rows = _widened(query, _of_queries(positions, scores), -1)
        columns = _widened(key, [_of_keys(gm, positions, scores, scale)], -1)
    node.args = (rows, columns, given["value"])
    node.kwargs = {"scale": scale}
    erase_unused(mask)
    return True


def _of_softmax(gm: fx.GraphModule, node: fx.Node) -> bool:
    found = _spelled(node.args[0]) if node.args else None
    if found is None or not found.positions.are_of_type(found.product.args[0]):
        return False
    parts = found.positions.parts
    if written_between((*found.product.args, *parts), min(found.product, *parts), node):
        return False
    scores = shape_at(found.product)
    assert scores is not None
    query, keys = found.product.args
    with gm.graph.inserting_before(node):
        rows = _widened(query, _of_queries(found.positions, scores), -1)
        of_keys = _of_keys(gm, found.positions, scores, found.scale)
        columns = _widened(keys, [gm.graph.call_method("transpose", (of_keys, -2, -1))], -2)
        product = gm.graph.call_function(torch.matmul, (rows, columns))
        if found.scale != 1.0:
            product = gm.graph.call_function(operator.mul, (product, found.scale))
        product.meta = dict(found.product.meta)
    before = node.args[0]
    node.args = (product, *node.args[1:])
    erase_unused(before)
    return True


def _spelled(node: Any) -> _Scores | None:
    """The scores that a softmax reads, if they are a product and positions."""
    shape = shape_at(node)
    if shape is None:
        return None
    inside = _inside(node)
    whole, (value, skipped) = inside if inside else (None, (node, (0, 0)))
    value = _unshaped(value)
    if arithmetic(value) != "add":
        return None
    leaves = _leaves(value)
    products = [_product_of(one, whole, skipped) for one in leaves]
    found = [one for one in products if one is not None]
    if len(found) != 1 or shape_at(found[0][0]) != shape or len(shape) < 3:
        return None
    product, scale = found[0]
    if any((shape_at(one) or ())[:-2] != shape[:-2] for one in product.args):
        return None
    rest = [one for one, made in zip(leaves, products, strict=True) if made is None]
    sizes = (*shape[:-2], *(size - less for size, less in zip(shape[-2:], skipped, strict=True)))
    if len(rest) == 1 and shape_at(rest[0]) == sizes:
        positions = _positions(rest[0], sizes)
    else:
        positions = _separate(rest, shape_at(value), sizes)
    if positions is None:
        return None
    positions = _Positions(positions.parts, positions.queries, positions.keys, skipped)
    return _Scores(product, scale, positions)


def _inside(node: fx.Node) -> tuple[fx.Node, tuple[Any, tuple[int, int]]] | None:
    """What was put behind the first queries and keys of scores, these, and how many are before.

    `scores[:, :, 1:, 1:] += value` is two scatters, of which the inner is into a part.
    """
    outer = _scattered(node, -2)
    inner = _scattered(outer.value, -1) if outer else None
    if outer is None or inner is None or not _is_part(inner.into, outer.into, (outer.start, 0)):
        return None
    value = inner.value
    if isinstance(value, fx.Node) and value.target is as_elements:
        value, part = value.args
        if shape_at(value) != shape_at(part):
            return None
    return outer.into, (value, (outer.start, inner.start))


class _Scattered(NamedTuple):
    """A value that is put into another, behind a place of one dimension."""

    value: Any
    into: fx.Node
    start: int


def _scattered(node: Any, dim: int) -> _Scattered | None:
    if not isinstance(node, fx.Node) or node.target is not torch.slice_scatter:
        return None
    given = bound(node, ("input", "src", "dim", "start", "end", "step"))
    shape, start = shape_at(given["input"]), given.get("start")
    behind = given.get("end") is None and given.get("step", 1) == 1
    if shape is None or not behind or type(start) is not int or start < 0:
        return None
    if given.get("dim", 0) not in (dim, len(shape) + dim):
        return None
    return _Scattered(given["src"], given["input"], start)


def _is_part(node: Any, whole: fx.Node, starts: tuple[int, int]) -> bool:
    """Whether `node` is all of `whole` behind these places of its last two dimensions."""
    if not isinstance(node, fx.Node) or node.target is not operator.getitem:
        return False
    source, key = node.args
    dims = len(shape_at(whole) or ())
    if source is not whole or not isinstance(key, tuple) or not dims - 1 <= len(key) <= dims:
        return False
    slices = [*key, *[slice(None)] * (dims - len(key))]
    wanted = [0] * (dims - 2) + [*starts]
    return all(
        isinstance(one, slice)
        and (one.start or 0) == start
        and one.stop is None
        and one.step in (None, 1)
        for one, start in zip(slices, wanted, strict=True)
    )


def _product_of(
    node: fx.Node, whole: fx.Node | None, skipped: tuple[int, int]
) -> tuple[fx.Node, float] | None:
    """The product that `node` is in another shape, or a part of; and the number it is times."""
    if whole is None:
        product, scale = unscaled(_unshaped(node))
    else:
        product, scale = unscaled(whole) if _is_part(node, whole, skipped) else (None, 1.0)
    return (product, scale) if isinstance(product, fx.Node) and is_product(product) else None


def _positions(node: Any, scores: tuple[int, ...]) -> _Positions | None:
    """The positions whose sum `node` is, for scores of this shape."""
    value = _unshaped(node)
    if not isinstance(value, fx.Node) or arithmetic(value) != "add":
        return None
    return _separate(_leaves(value), shape_at(value), scores)


def _separate(
    parts: Sequence[fx.Node], whole: tuple[int, ...] | None, scores: tuple[int, ...]
) -> _Positions | None:
    """The positions of which `parts` are, whose sum has the shape `whole`.

    None if one has a number for each key, so that no channels could take its place.
    """
    if whole is None or math.prod(whole) != math.prod(scores):
        return None
    first = len(whole)
    while first and math.prod(whole[first:]) < scores[-1]:
        first -= 1
    if math.prod(whole[first:]) != scores[-1] or not parts or not all(map(_is_of_products, parts)):
        return None
    found = _Positions(tuple(parts), whole[:first], whole[first:])
    return found if 2 * found.channels < scores[-1] else None


def _is_of_products(part: Any) -> bool:
    """Whether the numbers are those of a product, which is finite.

    A mask may be minus infinity, and that times zero is not zero.
    """
    while isinstance(part, fx.Node) and seen_at(part) and part.target in _MOVES:
        part = part.args[0]
    known = isinstance(part, fx.Node) and (is_product(part) or part.target is torch.einsum)
    return bool(known and seen_at(part))


def _leaves(node: fx.Node) -> list[fx.Node]:
    """What is added up, one by one; nothing if a number is among it."""
    found: list[fx.Node] = []
    for one in node.args:
        if not isinstance(one, fx.Node) or node.kwargs or len(node.args) != 2:
            return []
        inner = _leaves(one) if arithmetic(one) == "add" else []
        found += inner or [one]
    return found


def _unshaped(node: Any) -> Any:
    """What `node` is in another shape."""
    while isinstance(node, fx.Node) and node.target in _RESHAPES:
        seen, of_source = seen_at(node), seen_at(node.args[0])
        if seen is None or of_source is None or seen.dtype != of_source.dtype:
            return node
        node = node.args[0]
    return node


def _filled_up(part: fx.Node, dims: int) -> tuple[int, ...]:
    shape = shape_at(part)
    assert shape is not None
    return (1,) * (dims - len(shape)) + shape


def _of_queries(positions: _Positions, scores: tuple[int, ...]) -> list[fx.Node]:
    """The channels of queries: rows of numbers, in the shape of the scores but for the last."""
    made = []
    for part in positions.parts:
        sizes = positions.sizes(part)
        graph, value = part.graph, part
        if _filled_up(part, len(positions.queries + sizes)) != positions.queries + sizes:
            value = graph.call_method("expand", (value, *positions.queries, *sizes))
        before, _ = positions.skipped
        rows = (*scores[:-2], scores[-2] - before, math.prod(sizes))
        value = graph.call_method("reshape", (value, *rows))
        if before:
            value = graph.call_function(F.pad, (value, (0, 0, before, 0)))
        made.append(value)
    return made


def _of_keys(
    gm: fx.GraphModule, positions: _Positions, scores: tuple[int, ...], scale: float
) -> fx.Node:
    """The channels of keys, which undo the scale."""
    columns = []
    for part in positions.parts:
        sizes = positions.sizes(part)
        ones = torch.eye(math.prod(sizes)).view(*sizes, -1)
        columns.append(ones.expand(*positions.keys, -1).flatten(0, -2))
    channels = F.pad(torch.cat(columns, 1), (0, 0, positions.skipped[1], 0)) / scale
    seen = seen_at(positions.parts[0])
    assert seen is not None
    name = fresh_name(gm, "of_keys")
    gm.register_buffer(name, channels.to(seen.device, seen.dtype))
    constant = gm.graph.get_attr(name)
    return gm.graph.call_method("expand", (constant, *scores[:-2], *channels.shape))


def _widened(value: Any, more: Sequence[fx.Node], dim: int) -> fx.Node:
    made: fx.Node = value.graph.call_function(torch.cat, ([value, *more],), {"dim": dim})
    return made
