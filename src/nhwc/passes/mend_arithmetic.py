"""Sums and products of images whose first operand was made of tokens.

The first operand decides the format of the result. What a matrix product gave is NCHW once it is
viewed as an image; what a convolution gave is not, and the order does not matter to the numbers.
"""

from __future__ import annotations

from torch import fx

from ..graph import written_into
from ..graph.report import PassReport, Site
from ._folding_sites import name_of
from ._matching import arithmetic, is_made_of_pixels, is_reshaped
from ._reporting import reported


def mend_arithmetic(gm: fx.GraphModule) -> PassReport:
    """Put what convolutions made before what was reshaped, in each `a + b` and `a * b`."""
    sites = []
    for node in gm.graph.nodes:
        kind = arithmetic(node)
        if kind not in ("add", "mul") or written_into(node) is not None:
            continue
        if len(node.args) != 2 or node.kwargs:
            continue
        first, second = node.args
        if not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
            continue
        if is_reshaped(first) and is_made_of_pixels(second):
            node.args = (second, first)
            sites.append(Site(name_of(node), kind, True))
    return reported(gm, "mend_arithmetic", sites)
