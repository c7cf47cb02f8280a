"""Replace bilinear grid_sample, whose result torch returns in NCHW, by a module that keeps NHWC."""

from __future__ import annotations

from torch import fx
from torch.nn import functional as F

from ..graph import add_module, bound, erase
from ..graph.modules.mended import GridSample
from ..graph.report import PassReport, Site
from ._folding_sites import name_of
from ._reporting import reported

_NAMES = ("input", "grid", "mode", "padding_mode", "align_corners")


def mend_grid_sample(gm: fx.GraphModule) -> PassReport:
    """Replace F.grid_sample if it interpolates bilinearly and pads with zeros or the border."""
    sites = []
    for node in list(gm.graph.nodes):
        if node.target is not F.grid_sample:
            continue
        arguments = bound(node, _NAMES)
        mode = arguments.get("mode", "bilinear")
        padding = arguments.get("padding_mode", "zeros")
        corners = arguments.get("align_corners")
        reason = ""
        if mode != "bilinear" or padding not in ("zeros", "border"):
            reason = f"there is no NHWC form for mode={mode!r}, padding_mode={padding!r}"
        sites.append(Site(name_of(node), "grid_sample", not reason, reason))
        if not reason:
            layer = GridSample(str(padding), bool(corners))
            values = (arguments["input"], arguments["grid"])
            with gm.graph.inserting_before(node):
                call = add_module(gm.graph, "grid_sample", layer, values)
            erase(node, call)
    return reported(gm, "mend_grid_sample", sites)
