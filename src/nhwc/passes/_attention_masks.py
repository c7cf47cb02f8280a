"""The masks of torch's attention: what they say, and the numbers that they add to its scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from ..graph import attribute
from ..graph.nodes.seen import SeenTensor, seen_at

MASKS = ("key_padding_mask", "attn_mask", "mask", "is_causal")


@dataclass(frozen=True)
class Masks:
    """What a call of attention hides from its queries; nothing, as it stands.

    `pairs` hides keys from single queries, perhaps of single heads, `keys` from all queries of a
    sample: in bool masks what is True is hidden, others are added to the scores. If `causal`, a
    query sees no keys behind its own place. A query that sees none gives zeros if `safe`, else NaN.
    """

    pairs: fx.Node | None = None
    keys: fx.Node | None = None
    causal: bool = False
    safe: bool = True


UNMASKED = Masks()


def has_masks(given: Mapping[str, Any]) -> bool:
    """Whether a call of torch's attention is given any."""
    return any(given.get(name) not in (None, False) for name in MASKS)


def masks_of(
    gm: fx.GraphModule, given: Mapping[str, Any], attention: nn.Module | None
) -> Masks | None:
    """The masks of a call of the module, or of the function if there is none.

    None where a trace did not note their types and sizes.
    """
    if not has_masks(given):
        return UNMASKED
    masks = [given.get(name) for name in ("attn_mask", "key_padding_mask")]
    query, seen = seen_at(given["query"]), [mask_at(gm, mask) for mask in masks if mask is not None]
    if (
        not query
        or not seen
        or not all(one and one.dtype in (torch.bool, query.dtype) for one in seen)
    ):
        return None
    short = isinstance(attention, nn.MultiheadAttention) and _takes_shortcut(attention, given)
    short = short and all(one and one.dtype is torch.bool for one in seen)
    weighed = given.get("need_weights", True)
    pairs, keys = masks
    # Here torch believes the word, and does not look at the mask.
    causal = bool(given.get("is_causal")) and keys is None and not weighed and not short
    return Masks(None if causal else pairs, keys, causal, safe=not weighed and not short)


def mask_at(gm: fx.GraphModule, mask: Any) -> SeenTensor | None:
    """What is known of a mask; None if nothing is."""
    if isinstance(mask, fx.Node) and mask.op == "get_attr":
        held = attribute(gm, str(mask.target))
        return SeenTensor(tuple(held.shape), held.dtype, held.device)
    return seen_at(mask)


def _takes_shortcut(attention: nn.MultiheadAttention, given: Mapping[str, Any]) -> bool:
    """Whether torch computes it by one operator, where no gradients and bool masks are asked for.

    That gives NaN for a query that sees no key, also where the code around it would give zeros.
    """
    alike = len({given[name] for name in ("query", "key", "value")}) == 1
    even = attention.num_heads % 2 == 0 and attention.in_proj_bias is not None
    return alike and even and attention.batch_first


def bias_of(gm: fx.GraphModule, query: fx.Node, masks: Masks, heads: int) -> fx.Node | None:
    """Insert what makes of the masks a tensor to add to scores; None if nothing is added."""
    queries = seen_at(query)
    added = []
    for mask, of_keys in ((masks.pairs, False), (masks.keys, True)):
        seen = mask_at(gm, mask)
        if mask is None or seen is None or queries is None:
            continue
        numbers, batched = mask, len(queries.shape) == 3
        if seen.dtype is torch.bool:
            numbers = numbers_of(gm.graph, mask, queries.dtype, hidden=True)
        if batched and of_keys:
            numbers = gm.graph.call_method("unflatten", (numbers, -1, (1, 1, seen.shape[-1])))
        elif batched and len(seen.shape) == 3:
            numbers = gm.graph.call_method("unflatten", (numbers, 0, (-1, heads)))
        added.append(numbers)
    if not added:
        return None
    return added[0] if len(added) == 1 else gm.graph.call_function(torch.add, tuple(added))


def numbers_of(graph: fx.Graph, mask: fx.Node, dtype: torch.dtype, *, hidden: bool) -> fx.Node:
    """Insert what makes numbers of a bool mask, in which True is `hidden` or seen."""
    either = (float("-inf"), 0.0) if hidden else (0.0, float("-inf"))
    numbers = graph.call_function(torch.where, (mask, *either))
    if dtype is torch.get_default_dtype():
        return numbers
    return graph.call_method("to", (numbers, dtype))
