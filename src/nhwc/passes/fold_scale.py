"""Fold a product or a sum with a constant per channel into the layer before it.

Layer scale is such a product. A batch norm that is spelled out, `x * scale + shift` of buffers, as
the frozen ones of detectors are, is one of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.conv import _ConvNd

from ..graph import attribute, erase, module_of, replace_module
from ..graph.modules.folded import FrozenConv2d, PromotedFrozenConv2d
from ..graph.report import PassReport, Site
from ..operators.kinds import writes_first
from ._arithmetic import fold_after, frozen, promoted
from ._folding_sites import (
    called_again,
    folded_before,
    input_of,
    layer_unfit,
    name_of,
    weight_read_elsewhere,
)
from ._matching import TO_IMAGE, arithmetic, only_user, permutation
from ._reporting import reported


def fold_scale(gm: fx.GraphModule) -> PassReport:
    """Fold each product or sum of a layer's result and a constant per channel into that layer."""
    sites = []
    for node in list(gm.graph.nodes):
        found = _with_constant(gm, node)
        if found is None:
            continue
        layer_node = _layer_behind(found.value)
        layer: Any = module_of(layer_node)
        permuted = found.value is not layer_node
        if layer_node is None or not _fits(layer, found.constant, permuted):
            continue
        shape = "x".join(map(str, found.constant.shape))
        what = f"{name_of(layer_node)} {'+' if found.is_sum else '*'} {shape}"
        folded, reason = _folded(layer_node, layer, found)
        if folded is not None and not writes_first(node.target):
            folded = promoted(folded)
        if folded is not None and not permuted and found.constant.ndim == layer.weight.ndim:
            # Given one image, it returned a batch of one; the folded layer must as well.
            folded = frozen(folded)
        sites.append(Site(name_of(layer_node), what, folded is not None, reason))
        if folded is not None:
            replace_module(layer_node, folded)
            erase(node, found.value)
    return reported(gm, "fold_scale", sites)


@dataclass(frozen=True)
class _WithConstant:
    """A product or a sum of a constant and a value that nothing else reads."""

    value: fx.Node
    constant: Tensor
    is_sum: bool


def _with_constant(gm: fx.GraphModule, node: fx.Node) -> _WithConstant | None:
    kind = arithmetic(node)
    if kind not in ("mul", "add") or len(node.args) != 2 or node.kwargs:
        return None
    orders = (node.args,) if writes_first(node.target) else (node.args, node.args[::-1])
    for value, other in orders:
        if not isinstance(value, fx.Node) or only_user(value) is not node:
            continue
        if isinstance(other, fx.Node) and other.op == "get_attr":
            constant = attribute(gm, str(other.target))
            if isinstance(constant, Tensor) and not constant.is_meta:
                return _WithConstant(value, constant.detach(), kind == "add")
    return None


def _layer_behind(value: fx.Node) -> fx.Node | None:
    """Return the layer that made `value`, looking through a permute to N, C, H, W."""
    if permutation(value) != TO_IMAGE:
        return value
    before = input_of(value)
    alone = before is not None and only_user(before) is value
    return before if alone and isinstance(module_of(before), nn.Linear) else None


def _fits(layer: Any, factor: Tensor, permuted: bool) -> bool:
    """Whether the factor has one number per channel of the result, for any batch."""
    if not isinstance(layer, _ConvNd | nn.Linear):
        return False
    channels = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
    spread = (channels, *[1] * (2 if permuted else layer.weight.ndim - 2))
    batched = permuted or isinstance(layer, nn.Conv2d)
    return factor.shape == spread or (batched and factor.shape == (1, *spread))


def _folded(node: fx.Node, layer: Any, found: _WithConstant) -> tuple[nn.Module | None, str]:
    # One that returns a single image as a batch of one adds as it multiplies: to all its pixels.
    frozen_one = isinstance(layer, FrozenConv2d | PromotedFrozenConv2d)
    undoes = None if frozen_one else folded_before(layer)
    reason = layer_unfit(layer) or undoes or weight_read_elsewhere(node) or called_again(node)
    if reason is None and found.constant.dtype != layer.weight.dtype:
        name = "summand" if found.is_sum else "factor"
        reason = f"the {name} is {found.constant.dtype}, the weights are {layer.weight.dtype}"
    if reason is not None:
        return None, reason
    numbers = found.constant.flatten().double()
    if found.is_sum:
        folded = fold_after(layer, torch.ones_like(numbers), numbers)
    else:
        folded = fold_after(layer, numbers, torch.zeros_like(numbers))
    if folded is None:
        return None, f"the folded weights do not fit {layer.weight.dtype}"
    if layer.bias is None and not found.is_sum:
        folded.bias = None
    return folded, ""
