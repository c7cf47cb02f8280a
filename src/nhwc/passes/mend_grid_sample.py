"""Replace bilinear grid_sample, whose result torch returns in NCHW, by a module that keeps NHWC."""

from __future__ import annotations

from torch import fx
from torch.nn import functional as F

from ..graph import add_module, erase
from ..graph.modules.mended import GridSample
from ..graph.report import PassReport, Site
from ._folding_sites import name_of
from ._matching import sampling_of
from ._reporting import reported


def mend_grid_sample(gm: fx.GraphModule) -> PassReport:
    """Replace F.grid_sample if it interpolates bilinearly and pads with zeros or the border."""
    sites = []
    for node in list(gm.graph.nodes):
        if node.target is not F.grid_sample:
            continue
        found = sampling_of(node)
        reason = found if isinstance(found, str) else ""
        sites.append(Site(name_of(node), "grid_sample", not reason, reason))
        if not isinstance(found, str):
            layer = GridSample(found.padding_mode, found.align_corners)
            with gm.graph.inserting_before(node):
                call = add_module(gm.graph, "grid_sample", layer, (found.image, found.grid))
            erase(node, call)
    return reported(gm, "mend_grid_sample", sites)
