"""What `fuse` folded, and why the rest was left, for a terminal."""

from __future__ import annotations

from ..graph.report import FuseReport, PassReport
from .optimize_text import pass_lines
from .text import wrap


def fuse_text(report: FuseReport) -> str:
    """Render what each pass did, and the parts that could not be traced."""
    lines = [line for one in report if one.sites for line in pass_lines(one)]
    lines += [
        wrap(f"{part.path or 'the model'} ({part.kind}) stays: {part.reason}", "  ")
        for part in report.opaque
    ]
    lines += [wrap(note, "  ") for note in report.notes]
    return "\n".join([*(lines or ["  there was nothing to fold"]), ""])


def pass_text(report: PassReport) -> str:
    """Render one pass: each place that it changed, and why it left the others."""
    changed = [
        wrap(f"{site.where}: {site.what}" + (f" ({site.reason})" if site.reason else ""), "      ")
        for site in report.applied
    ]
    first, *left = pass_lines(report)
    return "\n".join([first, *changed, *left, ""])
