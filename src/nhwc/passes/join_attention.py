"""Join attention that a model spells out into one layer, which reads heads where they lie.

rows = qkv(x)                                           rows = qkv(x)
q, k, v = rows.reshape(B, N, 3, H, D)
              .permute(2, 0, 3, 1, 4).unbind(0)   ->    y = Attention(H)(rows)
y = F.scaled_dot_product_attention(q, k, v)
y = y.transpose(1, 2).reshape(B, N, H * D)
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from ..graph import add_module, bound, erase, erase_unused, module_of
from ..graph.modules.leaves import is_leaf
from ..graph.modules.mended import Attention
from ..graph.nodes.edit import numbers_given
from ..graph.report import PassReport, Site
from ._folding_sites import input_of, name_of
from ._matching import permutation, shape_given
from ._reporting import reported

_DEFAULTS = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None}
_ORDER = (2, 0, 3, 1, 4)
"""From image, token, part, head, channel to part, image, head, token, channel."""


def join_attention(gm: fx.GraphModule) -> PassReport:
    """Join all attention that reads queries, keys and values of one linear layer, without mask."""
    sites = []
    for node in list(gm.graph.nodes):
        if node.target is not F.scaled_dot_product_attention:
            continue
        found = _packed(node)
        reason = "" if found else "it is not of one layer's rows, or has a mask"
        ending = _rows_again(node) if found else None
        if found and (ending is None or not _same_shape(found[1], ending)):
            reason = "its result is not put into rows of tokens"
        sites.append(Site(name_of(node), "attention", not reason, reason))
        if found and ending and not reason:
            rows, heads = found[0], found[1][3]
            with gm.graph.inserting_before(node):
                joined = add_module(gm.graph, f"{rows.name}_joined", Attention(heads), (rows,))
            swapped = ending.args[0]
            erase(ending, joined)
            erase_unused(swapped)
    return reported(gm, "join_attention", sites)


def _packed(node: fx.Node) -> tuple[fx.Node, list[Any]] | None:
    """The rows of queries, keys and values, and the shape in which their parts are told apart."""
    plain = all(_DEFAULTS.get(name, 0) == value for name, value in node.kwargs.items())
    if not plain or len(node.args) != 3 or len({*node.args}) != 3:
        return None
    items: tuple[Any, ...] = node.args
    if not all(map(_is_item, items)) or [item.args[1] for item in items] != [0, 1, 2]:
        return None
    unbound = {item.args[0] for item in items}
    if len(unbound) != 1:
        return None
    parts: Any = unbound.pop()
    given = bound(parts, ("input", "dim"))
    if parts.target not in ("unbind", torch.unbind) or given.get("dim", 0) != 0:
        return None
    moved = given["input"]
    apart = input_of(moved)
    if permutation(moved) != _ORDER or apart is None:
        return None
    rows, shape = input_of(apart), shape_given(apart)
    if rows is None or shape is None or not _are_rows_of(rows, shape):
        return None
    return rows, shape


def _is_item(value: Any) -> bool:
    return isinstance(value, fx.Node) and value.target is operator.getitem


def _are_rows_of(rows: fx.Node, shape: list[Any]) -> bool:
    """Whether `rows` are what a linear layer makes of tokens (B, N, C), and `shape` begins B, N."""
    linear = module_of(rows)
    if not isinstance(linear, nn.Linear) or not is_leaf(linear):
        return False
    if len(shape) != 5 or shape[2] != 3:
        return False
    if not all(type(number) is int for number in shape[3:]):
        return False
    tokens = input_of(rows)
    sides = [_side_of(number, (rows, tokens)) for number in shape[:2]]
    return sides == [0, 1] and linear.out_features == 3 * shape[3] * shape[4]


def _side_of(number: Any, tensors: tuple[Any, ...]) -> int | None:
    """Which side of one of `tensors` a number is."""
    if not isinstance(number, fx.Node) or len(number.args) != 2:
        return None
    source, side = number.args
    if isinstance(source, fx.Node) and source.target is getattr and source.args[1] == "shape":
        asked = _is_item(number) and source.args[0] in tensors
    else:
        asked = number.target == "size" and source in tensors
    return side if asked and isinstance(side, int) else None


def _rows_again(node: fx.Node) -> fx.Node | None:
    """The reshape that puts the heads of each token side by side, if all goes through it."""
    if len(node.users) != 1:
        return None
    swapped = next(iter(node.users))
    dims = numbers_given(swapped) if swapped.target in ("transpose", torch.transpose) else None
    if list(dims or ()) != [1, 2] or len(swapped.users) != 1:
        return None
    ending = next(iter(swapped.users))
    return ending if ending.target in ("reshape", "flatten") else None


def _same_shape(shape: list[Any], ending: fx.Node) -> bool:
    """Whether `ending` gives images and tokens as they were in `shape`, and all channels."""
    if ending.target == "flatten":
        return ending.args[1:] in ((2,), (-2,), (2, 3), (2, -1), (-2, -1))
    wanted, width = shape_given(ending) or [], shape[3] * shape[4]
    return len(wanted) == 3 and wanted[:2] == shape[:2] and wanted[2] in (width, -1)
