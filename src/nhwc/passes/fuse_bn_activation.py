"""Join a batch norm that was not folded and the activation after it into one call."""

from __future__ import annotations

from torch import fx

from ..graph import erase, module_of, replace_module
from ..graph.modules.layers import Fused
from ..graph.report import PassReport, Site
from ._folding_sites import is_batch_norm, name_of, norm_unfit
from ._matching import activation_of, only_user
from ._reporting import reported


def fuse_bn_activation(gm: fx.GraphModule) -> PassReport:
    """Turn each remaining batch norm and the activation after it into a `Fused` layer."""
    sites = []
    for node in list(gm.graph.nodes):
        norm, after = module_of(node), only_user(node)
        if norm is None or not is_batch_norm(norm) or after is None:
            continue
        activation = activation_of(after)
        if activation is None:
            continue
        what = f"{name_of(node)} + {type(activation).__name__}"
        reason = norm_unfit(norm)
        sites.append(Site(name_of(node), what, reason is None, reason or ""))
        if reason is None:
            erase(after, node)
            replace_module(node, Fused(norm, activation).eval())
    return reported(gm, "fuse_bn_activation", sites)
