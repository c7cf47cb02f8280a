"""Fold a factor and a shift behind an activation, one number each, into the layer that reads it.

    conv(factor * x + shift)  =  (factor * w) * x + (bias + shift * sum(w))

StarReLU ends so. Zeros beside an image have no shift: before a layer that pads with them, the
factor goes into the layer, and `shift / factor` is added in front of it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from ..graph import erase, fresh_name, module_of, replace_module
from ..graph.report import PassReport, Site
from ._arithmetic import fold_before
from ._folding_sites import (
    called_again,
    folded_before,
    input_of,
    layer_unfit,
    name_of,
    pads_zeros,
    weight_read_elsewhere,
    written_between,
)
from ._matching import WithNumber, activation_of, only_user, with_number
from ._reporting import reported


def fold_scale_before(gm: fx.GraphModule) -> PassReport:
    """Fold each `factor * activation(layer(x)) + shift` into the layer that reads it alone."""
    sites = []
    for node in list(gm.graph.nodes):
        layer: Any = module_of(node)
        if not isinstance(layer, _ConvNd | nn.Linear) or isinstance(layer, _ConvTransposeNd):
            continue
        total = _before(gm, node, "add")
        product = _before(gm, total.node if total else node, "mul")
        found = [one for one in (product, total) if one]
        if not found or activation_of(found[0].value) is None:
            continue
        factor = float(product.number) if product else 1.0
        shift = float(total.number) if total else 0.0
        stays = bool(shift) and isinstance(layer, _ConvNd) and pads_zeros(layer)
        reason = _unfit(node, layer, found) or _without_use(factor, shift, stays=stays)
        folded = None if reason else _folded(layer, factor, 0.0 if stays else shift)
        if folded is None and not reason:
            reason = f"the folded weights do not fit {layer.weight.dtype}"
        what = " + ".join([*(name_of(one.node) for one in found), name_of(node)])
        sites.append(Site(name_of(node), what, folded is not None, reason))
        if folded is None:
            continue
        replace_module(node, folded)
        if stays:
            _add(gm, found[-1], shift / factor)
        for one in found[:1] if stays else reversed(found):
            erase(one.node, one.value)
    return reported(gm, "fold_scale_before", sites)


def _before(gm: fx.GraphModule, node: fx.Node, kind: str) -> WithNumber | None:
    """What computes the input of `node`, which nothing else reads, with a number."""
    before = input_of(node)
    return with_number(gm, before, kind) if before and only_user(before) else None


def _unfit(node: fx.Node, layer: Any, found: list[WithNumber]) -> str:
    """Why nothing may be folded into the layer, or what comes before it is of another type."""
    before: Any = module_of(input_of(found[0].value))
    types = {getattr(getattr(before, "weight", None), "dtype", None)}
    types |= {one.number.dtype for one in found}
    reason = (
        layer_unfit(layer)
        or folded_before(layer)
        or weight_read_elsewhere(node)
        or called_again(node)
    )
    if reason is None and types != {layer.weight.dtype}:
        reason = f"a number, or the layer before it, is not {layer.weight.dtype}"
    if reason is None and only_user(found[0].value) is None:
        reason = "the activation is read elsewhere, too"
    return reason or written_between([found[0].value], found[0].node, node)


def _without_use(factor: float, shift: float, *, stays: bool) -> str:
    if not math.isfinite(factor) or not math.isfinite(shift):
        return f"the factor is {factor:g}, the shift {shift:g}"
    if stays and factor in (0.0, 1.0):
        return "the layer pads with zeros, which have no shift"
    return ""


def _folded(layer: Any, factor: float, shift: float) -> nn.Module | None:
    inputs = layer.in_channels if isinstance(layer, _ConvNd) else layer.in_features
    ones = torch.ones(inputs, dtype=torch.float64)
    folded = fold_before(layer, factor * ones, shift * ones)
    if folded is not None and layer.bias is None and not shift:
        folded.bias = None
    return folded


def _add(gm: fx.GraphModule, total: WithNumber, shift: float) -> None:
    """Add another number than before."""
    name = fresh_name(gm, f"{total.node.name}_shift")
    gm.register_buffer(name, torch.full_like(total.number, shift))
    with gm.graph.inserting_before(total.node):
        number = gm.graph.get_attr(name)
    total.node.args = tuple(one if one is not total.held else number for one in total.node.args)
