"""The report of `optimize` as one HTML page that works offline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._optimize.report import OptimizeReport
from .optimize_text import rounds
from .page import page


def optimize_html(
    report: OptimizeReport, name: str, audits: Mapping[str, Mapping[str, Any]] | None = None
) -> str:
    """Render the page; `audits` are the audits `before` and `after` as plain values, if made."""
    data = {
        **report.to_dict(),
        "name": name,
        "where": str(report.environment),
        "befores": {stage: one.before.median_s for stage, one in report.compared.items()},
        "medians": {stage: one.after.median_s for stage, one in report.compared.items()},
        "rounds": rounds(report),
        "quartiles": {stage: one.after.quartiles_s for stage, one in report.compared.items()},
        "audits": {stage: _strip(audit) for stage, audit in (audits or {}).items()},
    }
    return page("optimize", f"{name} {', '.join(report.inputs)}: optimized", data)


def _strip(audit: Mapping[str, Any]) -> dict[str, Any]:
    """Reduce an audit to what the strip of coloured operators needs."""
    calls = [
        {
            "operator": call["operator"],
            "module": call["site"]["module"],
            "effect": call["effect"],
            "seconds": call["seconds"],
        }
        for call in audit["calls"]
    ]
    return {"calls": calls, "counts": audit["counts"], "clean": audit["clean"]}
