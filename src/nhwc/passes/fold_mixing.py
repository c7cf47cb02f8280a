"""Fold two layers that mix channels, one behind the other, into one.

rows = Linear(64, 768)(x)                           rows = Linear(64, 256)(x)
image = rows.transpose(1, 2).reshape(N, -1, H, W)   y = rows.transpose(1, 2).reshape(N, -1, H, W)
y = Conv2d(768, 256, 1)(image)                 ->

There is nothing but their order between them, so their weights are multiplied once, in float64. It
is done where the product has fewer numbers than both. In SegFormer's head a resize kept them apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from ..graph import erase, module_of, replace_module
from ..graph.modules.folded import PROMOTED
from ..graph.modules.leaves import is_leaf
from ..graph.nodes.edit import numbers_given
from ..graph.nodes.ranks import ranks_of
from ..graph.nodes.seen import note_side, shape_at
from ..graph.report import PassReport, Site
from ._arithmetic import promoted
from ._folding_sites import folded_before, input_of, layer_unfit, name_of
from ._matching import is_own, shape_given, size_read
from ._reporting import reported
from .lift_functional import layer
from .mend_tokens import turns_tokens
from .move_mixing import mixes_channels

_KINDS: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv2d, nn.Conv3d)


def fold_mixing(gm: fx.GraphModule) -> PassReport:
    """Fold 1x1 convolutions and linear layers into such a layer before them, if that is less."""
    ranks = ranks_of(gm.graph, sure=True)
    sites = []
    for node in list(gm.graph.nodes):
        chain = _before(node, ranks)
        if not chain:
            continue
        before, *views = chain
        first: Any = module_of(before)
        second: Any = module_of(node)
        if not _is_less(first, second):
            continue
        what, folded = f"{name_of(before)} + {name_of(node)}", _folded(first, second)
        if folded is not None:
            replace_module(before, folded)
            _follow(before, views, len(second.weight))
            erase(node, chain[-1])
        reason = "" if folded else f"the product does not fit {first.weight.dtype}"
        sites.append(Site(name_of(node), what, not reason, reason))
    return reported(gm, "fold_mixing", sites)


def _before(node: fx.Node, ranks: Mapping[fx.Node, int | None]) -> list[fx.Node]:
    """The layer whose channels alone `node` mixes again, and the views that lead from it."""
    mixing, value = module_of(node), input_of(node)
    if value is None or not _mixes(mixing) or not is_own(value):
        return []
    if any(isinstance(module_of(value), kind) and isinstance(mixing, kind) for kind in _KINDS):
        return [value]
    turned = input_of(value) if isinstance(mixing, nn.Conv2d) and shape_given(value) else None
    rows = input_of(turned) if turned and is_own(turned) and turns_tokens(turned) else None
    if rows is None or not is_own(rows) or not isinstance(module_of(rows), nn.Linear):
        return []
    fits = ranks[rows] == 3 and _are_images_of(value, rows)
    return [rows, turned, value] if turned and fits else []


def _are_images_of(value: fx.Node, rows: fx.Node) -> bool:
    """Whether a reshape of turned rows has as many images. If the channels, which the next layer
    tells, are as many too, each of them is what it was."""
    before, after, shape = shape_at(rows), shape_at(value), shape_given(value) or []
    if before and after:
        return len(after) == 4 and after[0] == before[0]
    read = size_read(shape[0]) if len(shape) == 4 else None
    return read is not None and read[1] == 0


def _mixes(mixing: Any) -> bool:
    """Whether each of its results is a sum over all channels of one pixel or row."""
    if isinstance(mixing, nn.Linear) and is_leaf(mixing):
        return not layer_unfit(mixing) and mixing.weight.dtype in (torch.float32, torch.float64)
    return mixes_channels(mixing) and mixing.groups == 1 and not folded_before(mixing)


def _is_less(first: Any, second: Any) -> bool:
    """Whether one layer has fewer weights than both, which fit together."""
    if not _mixes(first) or len(first.weight) != second.weight.shape[1]:
        return False
    product = first.weight.shape[1] * second.weight.shape[0]
    return bool(product < first.weight.numel() + second.weight.numel())


def _folded(first: Any, second: Any) -> nn.Module | None:
    """The layer that does both, of the kind of the first; None if numbers become infinite."""
    inner, outer = (one.weight.detach().double().flatten(1) for one in (first, second))
    tensors = {"weight": (outer @ inner).reshape(len(outer), *first.weight.shape[1:])}
    shifts = [] if first.bias is None else [outer @ first.bias.detach().double()]
    shifts += [] if second.bias is None else [second.bias.detach().double()]
    if shifts:
        tensors["bias"] = sum(shifts[1:], shifts[0])
    tensors = {name: tensor.to(first.weight) for name, tensor in tensors.items()}
    if not all(tensor.is_meta or tensor.isfinite().all() for tensor in tensors.values()):
        return None
    kind = next(kind for kind in _KINDS if isinstance(first, kind))
    folded: nn.Module = layer(kind, tensors, {}).train(first.training)
    if isinstance(second, PROMOTED):
        folded = promoted(folded)
    return folded.requires_grad_(first.weight.requires_grad)


def _follow(before: fx.Node, views: list[fx.Node], channels: int) -> None:
    """Let the views from a layer that has other channels now have these, too."""
    first = -1 if isinstance(module_of(before), nn.Linear) else 1
    for node, side in zip((before, *views), (first, 1, 1), strict=False):
        note_side(node, node, side, channels)
    if views:
        images, _, *sides = numbers_given(views[-1])
        views[-1].args = (views[0], images, channels, *sides)
