"""Remove nn.Identity, which returns its input."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from ..graph import erase, module_of
from ..graph.modules.leaves import computes_as, unlike_class
from ..graph.report import PassReport, Site
from ._folding_sites import input_of, name_of
from ._reporting import reported


def eliminate_identity(gm: fx.GraphModule) -> PassReport:
    """Remove every nn.Identity without hooks, and layers that inherit its `forward`."""
    sites = []
    for node in list(gm.graph.nodes):
        module: Any = module_of(node)
        value = input_of(node)
        if not computes_as(module, nn.Identity):
            continue
        reason = unlike_class(module) or (
            "" if value is not None else "it is given no value of the graph alone"
        )
        if not reason and value is not None:
            erase(node, value)
        sites.append(Site(name_of(node), "Identity", not reason, reason))
    return reported(gm, "eliminate_identity", sites)
