"""Turn layer norms and linear layers between two permutes into layers for images.

ConvNeXt and similar models permute to N, H, W, C, normalize and mix the channels of each pixel, and
permute back. In channels last the permutes move no data, but they hide from the planner that the
linear layers are 1x1 convolutions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from ..errors import of_kind
from ..graph import erase, module_of, replace_module
from ..graph.modules.mended import ChannelNorm, GlobalResponse
from ..graph.report import PassReport, Site
from ..machine.whole import rounds_convolutions, rounds_products
from ._arithmetic import twin
from ._folding_sites import calls_of, layer_unfit, name_of
from ._matching import TO_IMAGE, TO_LAST, activation_of, only_user, permutation
from ._reporting import reported


def mend_permute(gm: fx.GraphModule) -> PassReport:
    """Drop both permutes and let the layers between them work on the channels instead."""
    sites = []
    for start in list(gm.graph.nodes):
        if permutation(start) != TO_LAST:
            continue
        between, end, reason = _between(start)
        layers = [node for node in between if _is_layer(node)]
        if not layers:
            continue
        what = " + ".join(map(name_of, between))
        sites.append(Site(name_of(layers[0]), what, not reason, reason))
        if end is None:
            continue
        for node in layers:
            _mend(node)
        for permute in (end, start):
            erase(permute, permute.all_input_nodes[0])
    return reported(gm, "mend_permute", sites)


def _between(start: fx.Node) -> tuple[list[fx.Node], fx.Node | None, str]:
    """Follow the chain from `start` to the permute back; None and a reason if there is none."""
    found: list[fx.Node] = []
    last = start
    while (node := only_user(last)) is not None:
        if permutation(node) == TO_IMAGE:
            return found, node, ""
        found.append(node)
        reason = _unfit(node)
        if reason:
            return found, None, f"{name_of(node)}: {reason}"
        last = node
    return found, None, f"{name_of(last)} has {len(last.users)} readers, and no permute back"


def _is_layer(node: fx.Node) -> bool:
    return isinstance(module_of(node), nn.Linear | nn.LayerNorm | GlobalResponse)


def _unfit(node: fx.Node) -> str:
    """Say why `node` cannot work on the channels instead of the last dimension; "" if it can."""
    if activation_of(node) is not None:
        return ""
    layer: Any = module_of(node)
    if not _is_layer(node):
        return "it is neither a layer nor an activation that could run over the channels"
    if len(node.args) != 1 or node.kwargs:
        return "it is called with more than its input"
    if len(calls_of(node)) > 1:
        return f"it is called {len(calls_of(node))} times"
    if isinstance(layer, GlobalResponse):
        return "" if layer.last else "its channels are not the last dimension"
    unfit = layer_unfit(layer)
    if unfit is not None:
        return unfit
    if type(layer) not in (nn.LayerNorm, nn.Linear):
        return f"it is {of_kind(layer)}, a class of its own"
    if isinstance(layer, nn.Linear) and _would_round(layer.weight):
        return "as a convolution it would be rounded to TF32, which torch does not do to products"
    if isinstance(layer, nn.LayerNorm) and len(layer.normalized_shape) != 1:
        return f"it normalizes over {len(layer.normalized_shape)} dimensions"
    return ""


def _would_round(weight: Tensor) -> bool:
    """Whether cuDNN rounds what cuBLAS would not."""
    exact = weight.is_cuda and weight.dtype is torch.float32 and not rounds_products()
    return exact and rounds_convolutions()


def _mend(node: fx.Node) -> None:
    layer = module_of(node)
    if isinstance(layer, nn.Linear):
        replace_module(node, _as_convolution(layer))
    elif isinstance(layer, nn.LayerNorm):
        norm = twin(layer)
        norm.__class__ = ChannelNorm
        replace_module(node, norm)
    elif isinstance(layer, GlobalResponse):
        response = twin(layer)
        response.last, response.dims = False, [2, 3, 1]
        replace_module(node, response)


def _as_convolution(linear: nn.Linear) -> nn.Conv2d:
    biased = linear.bias is not None
    conv = nn.Conv2d(linear.in_features, linear.out_features, 1, bias=biased, device="meta")
    conv.weight = nn.Parameter(linear.weight.detach()[..., None, None], requires_grad=False)
    if biased:
        conv.bias = nn.Parameter(linear.bias.detach(), requires_grad=False)
    return conv.train(linear.training)
