"""Replace circular padding of images, whose result torch always returns in NCHW."""

from __future__ import annotations

from typing import Any

from torch import fx, nn
from torch.nn import functional as F

from ..graph import add_module, clean, erase, module_of
from ..graph.leaves import opaque_by_nature
from ..graph.mended import CircularPad
from ..graph.report import PassReport, Site
from ._folding_sites import input_of, name_of
from ._matching import named_arguments


def mend_pad(gm: fx.GraphModule) -> PassReport:
    """Replace F.pad(mode="circular") and nn.CircularPad2d; the other modes keep the format."""
    sites = []
    for node in list(gm.graph.nodes):
        padding = _circular_padding(node)
        value = input_of(node)
        if padding is None or value is None:
            continue
        plain = isinstance(padding, list | tuple) and all(isinstance(p, int) for p in padding)
        reason = "" if plain and len(padding) == 4 else "its padding is no 4 numbers"
        module = module_of(node)
        if module is not None and opaque_by_nature(module):
            reason = "it has hooks"
        sites.append(Site(name_of(node), "circular pad", not reason, reason))
        if not reason:
            with gm.graph.inserting_before(node):
                call = add_module(gm.graph, "pad", CircularPad(tuple(padding)), (value,))
            erase(node, call)
    if any(site.applied for site in sites):
        clean(gm)
    return PassReport("mend_pad", tuple(sites))


def _circular_padding(node: fx.Node) -> Any:
    module = module_of(node)
    if isinstance(module, nn.CircularPad2d):
        return module.padding
    if node.target is not F.pad:
        return None
    arguments = named_arguments(node, ("input", "pad", "mode"))
    return arguments.get("pad") if arguments.get("mode") == "circular" else None
