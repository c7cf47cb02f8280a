"""The rewrites, one per file, and the order they run in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import fx

from ..graph import graphs
from ..report import PassReport, Site
from .eliminate_dropout import eliminate_dropout
from .eliminate_identity import eliminate_identity
from .fold_bn_into_conv import fold_bn_into_conv
from .fold_bn_into_linear import fold_bn_into_linear
from .fold_constants import fold_constants
from .lift_functional import lift_functional

Pass = Callable[[fx.GraphModule], PassReport]

FOLDING: tuple[Pass, ...] = (
    eliminate_dropout,
    eliminate_identity,
    fold_constants,
    lift_functional,
    fold_bn_into_conv,
    fold_bn_into_linear,
)
"""What `fuse` runs: batch norms go, and what stands between them and their convolutions."""

PASSES: tuple[Pass, ...] = FOLDING
"""Everything, in the order `optimize` runs it."""


def run_passes(gm: fx.GraphModule, passes: Sequence[Pass] = PASSES) -> tuple[PassReport, ...]:
    """Run `passes` in their order on `gm`, and on the graphs inside its opaque parts, in place."""
    reports = []
    for rewrite in passes:
        sites: list[Site] = []
        for path, graph in list(graphs(gm)):
            report = rewrite(graph)
            sites += (_below(path, site) for site in report.sites)
        reports.append(PassReport(rewrite.__name__, tuple(sites)))
    return tuple(reports)


def _below(path: str, site: Site) -> Site:
    return replace(site, where=f"{path}.{site.where}") if path else site
