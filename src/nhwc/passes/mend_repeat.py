"""`Tensor.repeat` of images, which torch returns in NCHW whatever it is given."""

from __future__ import annotations

from torch import fx

from ..graph import add_module, erase
from ..graph.modules.ordered import Repeat
from ..graph.nodes.edit import numbers_given
from ..graph.report import PassReport, Site
from ._folding_sites import name_of
from ._reporting import reported


def mend_repeat(gm: fx.GraphModule) -> PassReport:
    """Replace every `repeat` along four or five dimensions."""
    sites = []
    for node in list(gm.graph.nodes):
        if node.op != "call_method" or node.target != "repeat" or node.kwargs:
            continue
        sizes = numbers_given(node)
        if not isinstance(sizes, list | tuple) or len(sizes) not in (4, 5):
            continue
        sites.append(Site(name_of(node), "repeat", True))
        with gm.graph.inserting_before(node):
            call = add_module(gm.graph, "repeat", Repeat(), (node.args[0], list(sizes)))
        erase(node, call)
    return reported(gm, "mend_repeat", sites)
