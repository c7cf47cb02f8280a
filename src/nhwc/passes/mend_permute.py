"""Layer norms and linear layers between two permutes become layers for images.

ConvNeXt and its kin permute to N, H, W, C to normalize and mix the channels of each pixel, and
back. In channels last that moves no data, but it hides from whoever chooses kernels that these are
1x1 convolutions among others.
"""

from __future__ import annotations

from typing import Any

from torch import fx, nn
from torch.nn.utils.parametrize import is_parametrized

from ..graph import clean, erase, module_of, replace_module
from ..graph.mended import ChannelNorm
from ..graph.report import PassReport, Site
from ..graph.tracer import opaque_by_nature
from ._arithmetic import twin
from ._folding_sites import calls_of, layer_unfit, name_of
from ._matching import TO_IMAGE, TO_LAST, activation_of, only_user, permutation


def mend_permute(gm: fx.GraphModule) -> PassReport:
    """Let what runs over the last dimension between two permutes run over the channels."""
    sites = []
    for start in list(gm.graph.nodes):
        if permutation(start) != TO_LAST:
            continue
        between, end = _between(start)
        layers = [n for n in between if isinstance(module_of(n), nn.Linear | nn.LayerNorm)]
        if end is None or not layers:
            continue
        sites.append(Site(name_of(layers[0]), " + ".join(map(name_of, between)), True))
        for node in layers:
            _mend(node)
        for permute in (end, start):
            erase(permute, permute.all_input_nodes[0])
    if sites:
        clean(gm)
    return PassReport("mend_permute", tuple(sites))


def _between(start: fx.Node) -> tuple[list[fx.Node], fx.Node | None]:
    """The chain of nodes that may be mended, up to the permute back; None if it breaks off."""
    found: list[fx.Node] = []
    node = only_user(start)
    while node is not None and permutation(node) != TO_IMAGE:
        if not _mendable(node):
            return found, None
        found.append(node)
        node = only_user(node)
    return found, node


def _mendable(node: fx.Node) -> bool:
    if activation_of(node) is not None:
        return True
    layer: Any = module_of(node)
    if len(node.args) != 1 or node.kwargs or len(calls_of(node)) > 1:
        return False
    if type(layer) is nn.LayerNorm:
        own = opaque_by_nature(layer) or "forward" in vars(layer) or is_parametrized(layer)
        return len(layer.normalized_shape) == 1 and not own
    return type(layer) is nn.Linear and layer_unfit(layer) is None


def _mend(node: fx.Node) -> None:
    layer = module_of(node)
    if isinstance(layer, nn.Linear):
        replace_module(node, _as_convolution(layer))
    elif isinstance(layer, nn.LayerNorm):
        norm = twin(layer)
        norm.__class__ = ChannelNorm
        replace_module(node, norm)


def _as_convolution(linear: nn.Linear) -> nn.Conv2d:
    biased = linear.bias is not None
    conv = nn.Conv2d(linear.in_features, linear.out_features, 1, bias=biased, device="meta")
    conv.weight = nn.Parameter(linear.weight.detach()[..., None, None], requires_grad=False)
    if biased:
        conv.bias = nn.Parameter(linear.bias.detach(), requires_grad=False)
    return conv.train(linear.training)
