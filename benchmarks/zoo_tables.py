"""What the sweep found, as a table in Markdown and as a page to filter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nhwc.render.page import page

Row = dict[str, Any]

COLUMNS = {
    "model": "model",
    "input": "input",
    "outcome": "outcome",
    "folded": "batch norms folded",
    "lost": "lost before, after",
    "chosen": "chosen",
    "faster": "ratio",
    "error": "error (eager's)",
    "notes": "notes",
}


def summary(rows: Mapping[str, Row]) -> str:
    counts = Counter(row["outcome"] for row in rows.values())
    return f"{len(rows)} models: " + ", ".join(f"{n} {what}" for what, n in counts.most_common())


def markdown(rows: Mapping[str, Row]) -> str:
    lines = [
        "Written by `python -m benchmarks.zoo_sweep`. Errors are the largest difference from a",
        "float64 run, relative to its largest output. Ratios are those of a tiny input on a busy",
        "machine: above 1 is faster than the model as it was given.",
        "",
        summary(rows),
        "",
        f"| {' | '.join(COLUMNS.values())} |",
        "|---" * len(COLUMNS) + "|",
    ]
    for shown in map(told, *zip(*sorted(rows.items()), strict=True)) if rows else ():
        cells = (shown[column].replace("|", "\\|") for column in COLUMNS)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def html(rows: Mapping[str, Row]) -> str:
    """One file that loads nothing."""
    data = [told(name, row) for name, row in sorted(rows.items())]
    return page("zoo", "nhwc: the zoo", data, folder=Path(__file__).parent / "templates")


def told(name: str, row: Row) -> dict[str, str]:
    """A row in words."""
    lost = [row.get("lost_before"), row.get("lost_after")]
    return {
        "model": name,
        "input": ", ".join("x".join(map(str, shape)) for shape in row.get("input", ())),
        "outcome": row["outcome"],
        "folded": str(row.get("folded", "")),
        "lost": ", ".join(str(n) for n in lost if isinstance(n, int)),
        "chosen": row.get("chosen", ""),
        "faster": f"{row['ratio']:.2f}" if "ratio" in row else "",
        "error": row.get("optimized", ""),
        "notes": "; ".join(_notes(row)),
    }


def _notes(row: Row) -> list[str]:
    """Whatever is not as one would wish, with its reason, cut short."""
    notes = [row.get("reason", ""), row.get("why", "")]
    notes += [n for n in (row.get("lost_before"), row.get("lost_after")) if isinstance(n, str)]
    if row.get("left_count"):
        notes.append(f"{row['left_count']} not folded: {row['left'][0]}")
    notes += [f"not traced: {part}" for part in row.get("opaque", ())[:2]]
    if str(row.get("loaded", "")).startswith("not saved"):
        notes.append(row["loaded"].partition(". A saved file")[0])
    return [" ".join(note.split())[:160] for note in dict.fromkeys(notes) if note]
