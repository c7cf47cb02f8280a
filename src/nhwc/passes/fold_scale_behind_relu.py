"""Fold a positive factor and a shift behind a ReLU into the layer before it.

    factor * relu(x) + shift  =  max(factor * x + shift, shift)

The factor and the shift go into the weights and the bias of the layer that made `x`, and the ReLU
becomes a bound that is not zero. So learnable affine blocks, as of HGNetV2, cost nothing.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.conv import _ConvNd

from ..graph import add_module, erase, module_of, replace_module
from ..graph.report import PassReport, Site
from ..operators.kinds import writes_first
from ._arithmetic import fold_after, promoted
from ._folding_sites import (
    called_again,
    folded_before,
    input_of,
    layer_unfit,
    name_of,
    weight_read_elsewhere,
)
from ._matching import activation_of, only_user, with_number
from ._reporting import reported


class _Affine(NamedTuple):
    """The nodes behind a ReLU that multiply and add, the last one last, and their numbers.

    A number in a dimension of its own `promotes` the result to its type.
    """

    nodes: tuple[fx.Node, ...]
    factor: Tensor
    shift: Tensor
    promotes: bool


def fold_scale_behind_relu(gm: fx.GraphModule) -> PassReport:
    """Fold each `factor * relu(layer(x)) + shift` of single numbers into the layer."""
    sites = []
    for node in list(gm.graph.nodes):
        layer_node = input_of(node)
        layer: Any = module_of(layer_node)
        if not isinstance(activation_of(node), nn.ReLU) or not isinstance(layer, _ConvNd):
            continue
        found = _behind(gm, node)
        if found is None or layer_node is None:
            continue
        what = " + ".join([name_of(layer_node), *map(name_of, found.nodes)])
        folded, reason = _folded(layer_node, node, found)
        sites.append(Site(name_of(layer_node), what, folded is not None, reason))
        if folded is not None:
            replace_module(layer_node, folded)
            _bound(gm, layer_node, node, found)
    return reported(gm, "fold_scale_behind_relu", sites)


def _behind(gm: fx.GraphModule, node: fx.Node) -> _Affine | None:
    """The product with a number behind `node` and the sum with one; either may be missing."""
    product = with_number(gm, only_user(node), "mul")
    total = with_number(gm, only_user(product.node if product else node), "add")
    found = [one for one in (product, total) if one]
    if not found:
        return None
    like = found[0].number
    factor = product.number if product else torch.ones_like(like)
    shift = total.number if total else torch.zeros_like(like)
    promotes = any(one.number.ndim and not writes_first(one.node.target) for one in found)
    return _Affine(tuple(one.node for one in found), factor, shift, promotes)


def _folded(layer_node: fx.Node, relu: fx.Node, found: _Affine) -> tuple[nn.Module | None, str]:
    layer: Any = module_of(layer_node)
    dtypes = {found.factor.dtype, found.shift.dtype}
    reason = (
        layer_unfit(layer)
        or folded_before(layer)
        or weight_read_elsewhere(layer_node)
        or called_again(layer_node)
    )
    if only_user(layer_node) is not relu:
        reason = reason or "its result is also used without the ReLU"
    if dtypes != {layer.weight.dtype}:
        reason = reason or f"a number is not of the weights' type, {layer.weight.dtype}"
    numbers = [float(found.factor), float(found.shift)]
    if not all(map(math.isfinite, numbers)) or numbers[0] <= 0:
        reason = reason or f"the factor {numbers[0]:g} and the shift {numbers[1]:g} turn the bound"
    if reason is not None:
        return None, reason
    channels = layer.out_channels
    factor, shift = (one.double().expand(channels) for one in (found.factor, found.shift))
    folded = fold_after(layer, factor, shift)
    if folded is None:
        return None, f"the folded weights do not fit {layer.weight.dtype}"
    return promoted(folded) if found.promotes else folded, ""


def _bound(gm: fx.GraphModule, layer: fx.Node, relu: fx.Node, found: _Affine) -> None:
    """Put the bound in the place of the ReLU, and take out what was folded."""
    shift = float(found.shift)
    if shift:
        name = f"{layer.target}_bound".replace(".", "_")
        with gm.graph.inserting_before(relu):
            bound = add_module(gm.graph, name, nn.Hardtanh(shift, math.inf).eval(), (layer,))
        bound.meta = dict(relu.meta)
        erase(relu, bound)
        relu = bound
    for node in reversed(found.nodes):
        erase(node, relu)
