"""Replace instance norm, which copies to NCHW inside, by a module that keeps channels last."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.nn.modules.instancenorm import _InstanceNorm

from ..graph import module_of, replace_module
from ..graph.modules.layers import PlainInstanceNorm, StatisticsNorm
from ..graph.modules.leaves import computes_as, unlike_class
from ..graph.modules.mended import InstanceNorm
from ..graph.report import PassReport, Site
from ._folding_sites import name_of
from ._reporting import reported


def mend_instance_norm(gm: fx.GraphModule) -> PassReport:
    """Wrap every instance norm so that channels-last input gives channels-last output.

    An instance norm with running statistics becomes a batch norm: in eval mode they are the same.
    """
    sites = []
    for node in list(gm.graph.nodes):
        norm: Any = module_of(node)
        if not (computes_as(norm, _InstanceNorm) or computes_as(norm, PlainInstanceNorm)):
            continue
        reason = ""
        if unlike_class(norm):
            reason = "it has hooks or a forward of its own"
        elif norm.track_running_stats and norm.training:
            reason = "it is in training mode and keeps running statistics"
        sites.append(Site(name_of(node), type(norm).__name__, not reason, reason))
        if not reason:
            tracked = norm.track_running_stats and norm.running_mean is not None
            made = _as_batch_norm(norm) if tracked else InstanceNorm(norm).train(norm.training)
            replace_module(node, made)
    return reported(gm, "mend_instance_norm", sites)


def _as_batch_norm(norm: Any) -> StatisticsNorm:
    affine = norm.weight is not None
    single = norm._get_no_batch_dim()
    module: Any = StatisticsNorm(
        norm.num_features, norm.eps, norm.momentum, affine, device="meta", single=single
    )
    module.weight, module.bias = norm.weight, norm.bias
    module.running_mean, module.running_var = norm.running_mean, norm.running_var
    module.num_batches_tracked = norm.num_batches_tracked
    return module.eval()  # type: ignore[no-any-return]
