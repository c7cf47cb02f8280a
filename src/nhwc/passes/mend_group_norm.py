"""Replace group norm, which torch rounds badly in channels last, by a module that does not."""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from ..graph import module_of, replace_module
from ..graph.modules.leaves import computes_as, unlike_class
from ..graph.modules.mended import GroupNorm
from ..graph.report import PassReport, Site
from ._folding_sites import name_of
from ._reporting import reported


def mend_group_norm(gm: fx.GraphModule) -> PassReport:
    """Wrap every group norm so that it is as exact in channels last as in NCHW."""
    sites = []
    for node in list(gm.graph.nodes):
        norm: Any = module_of(node)
        if not computes_as(norm, nn.GroupNorm):
            continue
        own = unlike_class(norm)
        reason = "it has hooks or a forward of its own" if own else ""
        sites.append(Site(name_of(node), "GroupNorm", not reason, reason))
        if not reason:
            replace_module(node, GroupNorm(norm).train(norm.training))
    return reported(gm, "mend_group_norm", sites)
