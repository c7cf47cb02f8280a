"""Replace circular padding of images, whose result torch always returns in NCHW.

A convolution that pads so itself calls the same operator. It becomes the pad and a convolution that
does not pad; so does one that reflects or replicates, since kernels pad with zeros alone.
"""

from __future__ import annotations

from typing import Any

from torch import fx, nn
from torch.nn import functional as F

from ..graph import add_module, bound, erase, module_of, replace_module
from ..graph.modules.leaves import is_leaf, opaque_by_nature
from ..graph.modules.mended import CircularPad
from ..graph.report import PassReport, Site
from ._arithmetic import twin
from ._folding_sites import input_of, layer_unfit, name_of
from ._reporting import reported

_PADS: dict[str, tuple[type[nn.Module], ...]] = {
    "reflect": (nn.ReflectionPad2d, nn.ReflectionPad3d),
    "replicate": (nn.ReplicationPad2d, nn.ReplicationPad3d),
}


def mend_pad(gm: fx.GraphModule) -> PassReport:
    """Replace F.pad(mode="circular"), nn.CircularPad2d and 3d, and padding in convolutions."""
    sites = []
    for node in list(gm.graph.nodes):
        site = _mend_conv(node) if _pads_itself(module_of(node)) else _mend_pad(node)
        if site is not None:
            sites.append(site)
    return reported(gm, "mend_pad", sites)


def _mend_pad(node: fx.Node) -> Site | None:
    padding = _circular_padding(node)
    value = input_of(node)
    if padding is None or value is None:
        return None
    plain = isinstance(padding, list | tuple) and all(isinstance(p, int) for p in padding)
    reason = "" if plain and len(padding) in (4, 6) else "its padding is no 4 or 6 numbers"
    module = module_of(node)
    if module is not None and opaque_by_nature(module):
        reason = "it has hooks"
    if not reason:
        with node.graph.inserting_before(node):
            call = add_module(node.graph, "pad", CircularPad(tuple(padding)), (value,))
        erase(node, call)
    return Site(name_of(node), "circular pad", not reason, reason)


def _circular_padding(node: fx.Node) -> Any:
    module = module_of(node)
    if isinstance(module, nn.CircularPad2d | nn.CircularPad3d) and is_leaf(module):
        return module.padding
    if node.target is not F.pad:
        return None
    arguments = bound(node, ("input", "pad", "mode"))
    return arguments.get("pad") if arguments.get("mode") == "circular" else None


def _pads_itself(module: nn.Module | None) -> bool:
    image = isinstance(module, nn.Conv2d | nn.Conv3d)
    return image and getattr(module, "padding_mode", "zeros") != "zeros"


def _mend_conv(node: fx.Node) -> Site:
    conv: Any = module_of(node)
    reason = layer_unfit(conv) or ""
    value = input_of(node)
    if value is None or len(node.args) + len(node.kwargs) != 1:
        reason = "it is called with more than its input"
    if not reason:
        pad = _pad_of(conv)
        with node.graph.inserting_before(node):
            padded = add_module(node.graph, f"{node.target}_pad".replace(".", "_"), pad, (value,))
        replace_module(node, _unpadded(conv))
        node.args, node.kwargs = (padded,), {}
    return Site(name_of(node), f"{conv.padding_mode} padding", not reason, reason)


def _pad_of(conv: Any) -> nn.Module:
    padding = tuple(conv._reversed_padding_repeated_twice)
    if conv.padding_mode == "circular":
        return CircularPad(padding)
    return _PADS[conv.padding_mode][len(conv.kernel_size) - 2](padding)


def _unpadded(conv: Any) -> nn.Module:
    """A convolution with the weights of `conv` that leaves the padding to others."""
    layer = twin(conv)
    layer.padding_mode, layer.padding = "zeros", (0,) * len(conv.kernel_size)
    layer._reversed_padding_repeated_twice = (0,) * (2 * len(conv.kernel_size))
    return layer  # type: ignore[no-any-return]
