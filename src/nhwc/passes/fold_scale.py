"""Fold a multiplication by a constant per channel, like layer scale, into the layer before it."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.conv import _ConvNd

from ..graph import attribute, clean, erase, module_of, replace_module
from ..graph.report import PassReport, Site
from ._arithmetic import fold_after, frozen, overflows
from ._folding_sites import (
    called_again,
    folded_before,
    layer_unfit,
    name_of,
    weight_read_elsewhere,
)
from ._matching import TO_IMAGE, only_user, permutation

_PRODUCTS = (operator.mul, operator.imul, torch.mul, torch.multiply, "mul", "mul_")


def fold_scale(gm: fx.GraphModule) -> PassReport:
    """Fold each product of a layer's result and a constant per channel into that layer."""
    sites = []
    for node in list(gm.graph.nodes):
        found = _product(gm, node)
        if found is None:
            continue
        value, factor = found
        layer_node = _layer_behind(value)
        layer: Any = module_of(layer_node)
        if layer_node is None or not _fits(layer, factor, value is not layer_node):
            continue
        what = f"{name_of(layer_node)} * {'x'.join(map(str, factor.shape))}"
        folded, reason = _folded(layer_node, layer, factor)
        if folded is not None and value is layer_node and factor.ndim == layer.weight.ndim:
            # Given one image, the product returned a batch of one; the folded layer must as well.
            folded = frozen(folded)
        sites.append(Site(name_of(layer_node), what, folded is not None, reason))
        if folded is not None:
            replace_module(layer_node, folded)
            erase(node, value)
    if any(site.applied for site in sites):
        clean(gm)
    return PassReport("fold_scale", tuple(sites))


def _product(gm: fx.GraphModule, node: fx.Node) -> tuple[fx.Node, Tensor] | None:
    """Return the value that only this product reads, and the constant that multiplies it."""
    if node.target not in _PRODUCTS or len(node.args) != 2 or node.kwargs:
        return None
    for value, other in (node.args, node.args[::-1]):
        if not isinstance(value, fx.Node) or only_user(value) is not node:
            continue
        if isinstance(other, fx.Node) and other.op == "get_attr":
            factor = attribute(gm, str(other.target))
            if isinstance(factor, Tensor) and not factor.is_meta:
                return value, factor.detach()
    return None


def _layer_behind(value: fx.Node) -> fx.Node | None:
    """Return the layer that made `value`, looking through a permute to N, C, H, W."""
    if permutation(value) != TO_IMAGE:
        return value
    before = value.args[0]
    alone = isinstance(before, fx.Node) and only_user(before) is value
    return before if alone and isinstance(module_of(before), nn.Linear) else None  # type: ignore[return-value]


def _fits(layer: Any, factor: Tensor, permuted: bool) -> bool:
    """Whether the factor has one number per channel of the result, for any batch."""
    if not isinstance(layer, _ConvNd | nn.Linear):
        return False
    channels = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
    spread = (channels, *[1] * (2 if permuted else layer.weight.ndim - 2))
    batched = permuted or isinstance(layer, nn.Conv2d)
    return factor.shape == spread or (batched and factor.shape == (1, *spread))


def _folded(node: fx.Node, layer: Any, factor: Tensor) -> tuple[nn.Module | None, str]:
    reason = (
        layer_unfit(layer)
        or folded_before(layer)
        or weight_read_elsewhere(node)
        or called_again(node)
    )
    if reason is None and factor.dtype != layer.weight.dtype:
        reason = f"the factor is {factor.dtype}, the weights are {layer.weight.dtype}"
    if reason is not None:
        return None, reason
    scale = factor.flatten().double()
    folded: Any = fold_after(layer, scale, torch.zeros_like(scale))
    if layer.bias is None:
        folded.bias = None
    elif overflows(folded):
        return None, f"the folded weights do not fit {layer.weight.dtype}"
    return folded, ""
