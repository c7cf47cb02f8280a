"""How each rewrite ends."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from ..graph import clean
from ..graph.report import PassReport, Site


def reported(gm: fx.GraphModule, name: str, sites: Sequence[Site]) -> PassReport:
    """Report what the pass of this name looked at; clean the graph if it changed anything."""
    if any(site.applied for site in sites):
        clean(gm)
    return PassReport(name, tuple(sites))
