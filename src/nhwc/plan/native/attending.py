"""Attention of tokens as they lie: heads are read through tables, nothing is permuted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from ...graph import bound
from ...graph.modules.mended import Attention, SpelledAttention
from ...kernels.layers.attention import Lie, Mask, attention_step
from ...kernels.layers.heads import Attended
from ...kernels.programs.builder import Builder
from ...kernels.programs.moved import Moved, heads_of, room, settled_rows
from ...kernels.tape.steps import Step, View
from ..implementation import Implementation
from ..recording import Record
from ..specs import Layer
from .rows import as_it_lies


def packed_attention(record: Record, layer: Layer, module: Attention) -> Implementation:
    """Attention of rows that hold queries, keys and values of all heads side by side.

    As torch's, it gives zeros for a query whose scores are all minus infinity, and takes the tokens
    of one sample without a batch, too.
    """
    shape = record.values[layer.inputs[0]].shape
    depth = shape[-1] // (3 * module.heads)

    def turned(batches: Tensor) -> Tensor:
        if len(shape) == 2:
            return batches.squeeze(0)
        return batches if module.batch_first else batches.transpose(0, 1)

    def emit(builder: Builder, constants: None, x: Moved) -> Moved:
        where = x.where[None] if len(shape) == 2 else turned(x.where)
        parts = where.unflatten(-1, (3, module.heads, depth)).permute(2, 0, 3, 1, 4)
        q, k, v = (Moved(x.buffer, part) for part in (parts[0][..., : module.first, :], *parts[1:]))
        mixed = _attend(builder, (q, k, v), [], depth**-0.5, safe=True)
        heads = mixed.where.transpose(1, 2).flatten(2)
        return Moved(mixed.buffer, turned(heads))

    return as_it_lies(record, layer, emit)


@dataclass(frozen=True)
class _Asked:
    """What an attention is asked for, besides its queries, keys, values and masks."""

    scale: float | None
    turned: bool = False
    """Keys have their channels before their tokens."""
    grouped: bool = False
    """Each head of the keys serves as many neighbours among the queries."""
    causal: bool = False
    """No query sees keys behind its own place; an infinite value there makes NaN all the same."""
    safe: bool = False
    """A query whose scores are all minus infinity gets zeros, as torch's own attention gives."""
    windows: tuple[int, ...] | None = None
    """The shape that scores have while the last mask is added."""


def torchs_attention(record: Record, layer: Layer) -> Implementation | None:
    """`F.scaled_dot_product_attention`, unless it drops out.

    Fewer heads of keys and values serve several heads of queries, if there is one, or if asked for.
    """
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    given = bound(layer.node, names)
    fixed = {
        name: record.values[value] if isinstance(value, fx.Node) else value
        for name, value in given.items()
        if name in names[4:]
    }
    scale, causal, grouped = (fixed.get(name) for name in ("scale", "is_causal", "enable_gqa"))
    nodes = [given.get(name) for name in names[:4]]
    if fixed.get("dropout_p") or not isinstance(scale, (int, float, type(None))):
        return None
    asked = _Asked(scale, grouped=bool(grouped), causal=bool(causal), safe=True)
    return _attention(record, layer, nodes, asked)


def spelled_attention(
    record: Record, layer: Layer, module: SpelledAttention
) -> Implementation | None:
    given: tuple[Any, ...] = (*layer.node.args, None, None, None)
    *nodes, bias, masks, shape = given[:6]
    added = [bias] if masks is None else [masks] if bias is None else [bias, masks]
    windows = None if masks is None else tuple(shape)
    asked = _Asked(module.scale, turned=True, windows=windows)
    return _attention(record, layer, [*nodes, *added], asked)


def _attention(
    record: Record, layer: Layer, nodes: Sequence[Any], asked: _Asked
) -> Implementation | None:
    """Attention of queries, keys, values and perhaps masks; None for shapes that it does not know.

    A mask that is None is none.
    """
    given = [one for one in nodes if one is not None]
    if not all(one in layer.inputs for one in given):
        return None
    sizes = _Sizes.of([record.values[one].shape for one in given], asked)
    if sizes is None:
        return None
    places = [layer.inputs.index(one) for one in given]

    def emit(builder: Builder, constants: None, *inputs: Moved) -> Moved:
        q, k, v, *masks = (inputs[place] for place in places)
        k, v = (sizes.for_all(one, share) for one, share in zip((k, v), sizes.shared, strict=True))
        if asked.turned:
            k = Moved(k.buffer, k.where.transpose(-2, -1))
        added = [
            Moved(mask.buffer, _filled_up(mask.where, scores))
            for mask, scores in zip(masks, sizes.scores, strict=True)
        ]
        parts = (_as_heads(q), _as_heads(k), _as_heads(v))
        scale = parts[0].shape[-1] ** -0.5 if asked.scale is None else asked.scale
        mixed = _attend(builder, parts, added, scale, causal=asked.causal, safe=asked.safe)
        return Moved(mixed.buffer, mixed.where.reshape(sizes.result))

    return replace(as_it_lies(record, layer, emit), exact=not asked.causal)


@dataclass(frozen=True)
class _Sizes:
    """Sizes of queries, keys, values and masks that fit together."""

    batch: tuple[int, ...]
    """The dimensions before the tokens of the queries: images, say, and heads."""
    result: tuple[int, ...]
    shared: tuple[int, int]
    """How many heads of queries each head of the keys has to itself, and each of the values."""
    scores: list[tuple[int, ...]]
    """The shape of the scores that each mask is added to."""

    @classmethod
    def of(cls, shapes: Sequence[tuple[int, ...]], asked: _Asked) -> _Sizes | None:
        """None where they do not fit together."""
        queries, keys, values, *masks = shapes
        if min(map(len, (queries, keys, values))) < 2:
            return None
        *before, tokens, depth = queries
        batch, outputs = tuple(before), values[-1]
        count = keys[-1] if asked.turned else keys[-2]
        wanted = (depth, count) if asked.turned else (count, depth)
        if keys[-2:] != wanted or values[-2:-1] != (count,):
            return None
        if not batch and asked.windows is not None:
            return None
        of_keys, of_values = (_shares(one[:-2], batch, asked.grouped) for one in (keys, values))
        if of_keys is None or of_values is None:
            return None
        scores = [(*batch, tokens, count)] * len(masks)
        if asked.windows is not None:
            shape = _viewed(scores[-1], asked.windows)
            if shape[2:] != scores[-1][1:] or math.prod(shape[:2]) != batch[0]:
                return None
            scores[-1] = shape
        if not all(_expands(mask, one) for mask, one in zip(masks, scores, strict=True)):
            return None
        return cls(batch, (*batch, tokens, outputs), (of_keys, of_values), scores)

    def for_all(self, x: Moved, share: int) -> Moved:
        """Keys or values as often as there are queries for them: noted, not copied."""
        where = x.where if share == 1 else x.where.repeat_interleave(share, -3)
        return Moved(x.buffer, where.expand(*self.batch, *where.shape[-2:]))


def _shares(given: tuple[int, ...], same: tuple[int, ...], grouped: bool) -> int | None:
    """How many heads of queries each head has to itself; None if they do not fit together."""
    if len(given) != len(same):
        return None
    if grouped and given and given[:-1] == same[:-1] and same[-1] % given[-1] == 0:
        return same[-1] // given[-1]
    return 1 if all(one in (1, other) for one, other in zip(given, same, strict=True)) else None


def _viewed(shape: tuple[int, ...], asked: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of such a view, of which one side may be -1; empty if there is none."""
    try:
        return tuple(torch.empty(shape, device="meta").view(asked).shape)
    except RuntimeError:
        return ()


def _expands(shape: tuple[int, ...], scores: tuple[int, ...]) -> bool:
    pairs = zip(shape[::-1], scores[::-1], strict=False)
    return len(shape) <= len(scores) and all(one in (1, other) for one, other in pairs)


def _filled_up(mask: Tensor, scores: tuple[int, ...]) -> Tensor:
    """The mask with four dimensions: images that have masks of their own, heads, queries, keys."""
    mask = mask.view(*[1] * (len(scores) - mask.ndim), *mask.shape)
    mask = mask.expand(*mask.shape[:-1], scores[-1])
    if len(scores) < 4:
        return mask.view(-1, 1, *mask.shape[-2:])
    images = mask.shape[:-3]
    # A few images' masks take turns: only the first dimensions may be those of one mask for all.
    own = next((place for place, size in enumerate(images) if size > 1), len(images))
    return mask.expand(*images[:own], *scores[own:-3], *mask.shape[-3:]).flatten(0, -4)


def _as_heads(x: Moved) -> Moved:
    """Images, heads, tokens, channels."""
    where = x.where
    heads = where.shape[-3:-2] if where.ndim > 3 else (1,)
    return Moved(x.buffer, where.reshape(-1, *heads, *where.shape[-2:]))


def _attend(
    builder: Builder,
    parts: tuple[Moved, ...],
    masks: list[Moved],
    scale: float,
    *,
    causal: bool = False,
    safe: bool,
) -> Moved:
    """Attention of images, heads, tokens, channels; the result lies in the order of the queries."""
    q, k, v = (heads_of(builder, part) for part in parts)
    images, heads, queries, depth = parts[0].shape
    outputs = parts[2].shape[3]
    size = Attended(images, heads, queries, parts[1].shape[2], depth, outputs)
    y = room(builder, (images, queries, heads * outputs))
    own = q.pixels()
    rows = torch.arange(images * queries) if own is None else own
    buffers = [q.buffer, k.buffer, v.buffer]
    rows_of_masks = [
        settled_rows(builder, Moved(mask.buffer, mask.where.flatten(0, 2))) for mask in masks
    ]

    def make(*views: View) -> Step:
        lies = [Lie(*one.lie(view)) for one, view in zip((q, k, v), views[:3], strict=True)]
        given = zip(views[3:-1], masks, strict=True)
        return attention_step(
            views[0],
            views[1],
            views[2],
            views[-1],
            size=size,
            lies=(lies[0], lies[1], lies[2]),
            result=Lie(rows * views[-1].pixel, outputs),
            scale=scale,
            masks=[Mask(view, *mask.shape[:3]) for view, mask in given],
            causal=causal,
            safe=safe,
        )

    builder.add(make, *buffers, *rows_of_masks, y)
    places = rows.view(images, queries, 1, 1) * (heads * outputs) + torch.arange(
        heads * outputs
    ).view(1, 1, heads, outputs)
    return Moved(y, places.to(torch.int32).transpose(1, 2))
