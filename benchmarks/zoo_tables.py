"""The findings of the sweep, as a table in Markdown and as a page to filter."""

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
    "lost": "losses",
    "chosen": "chosen",
    "faster": "times as fast",
    "error": "error (eager's)",
    "notes": "notes",
}


def summary(rows: Mapping[str, Row]) -> str:
    counts = Counter(row["outcome"] for row in rows.values())
    return f"{len(rows)} models: " + ", ".join(f"{n} {what}" for what, n in counts.most_common())


def remarked(rows: Mapping[str, Row]) -> str:
    """Count the remarks on models that are right."""
    right = [row for row in rows.values() if row["outcome"] == "right"]
    counts = Counter(remark for row in right for remark in remarks(row))
    parts = [f"{n} {remark}" for remark, n in counts.most_common()]
    return f"Of {len(right)} that are right: {', '.join(parts) or 'nothing to remark'}"


def days(rows: Mapping[str, Row]) -> str:
    """Say on which days the rows were asked."""
    counts = sorted(Counter(row["day"] for row in rows.values()).items())
    return "Asked on " + ", ".join(f"{day}: {n}" for day, n in counts)


def markdown(rows: Mapping[str, Row]) -> str:
    lines = [
        "Written by `python -m benchmarks.zoo_sweep`. Losses are calls that lose channels last,",
        "as the model was given -> after the passes. Errors are the largest difference from a",
        "float64 run, relative to its largest output. Speeds are those of a tiny input on a busy",
        "machine, against the model as it was given.",
        "",
        summary(rows) + ".",
        remarked(rows) + ".",
        days(rows) + ".",
        "",
        f"| {' | '.join(COLUMNS.values())} |",
        "|---" * len(COLUMNS) + "|",
    ]
    for shown in map(told, *zip(*sorted(rows.items()), strict=True)) if rows else ():
        cells = (shown[column].replace("|", "\\|") for column in COLUMNS)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def html(rows: Mapping[str, Row]) -> str:
    """Render the page, as one file that loads no other."""
    data = [told(name, row) for name, row in sorted(rows.items())]
    return page("zoo", "nhwc: the zoo", data, folder=Path(__file__).parent / "templates")


def told(name: str, row: Row) -> dict[str, Any]:
    """Put a row into words."""
    lost = [row.get("lost_before"), row.get("lost_after")]
    shapes = Counter("x".join(map(str, shape)) for shape in row.get("input", ()))
    return {
        "model": name,
        "input": ", ".join(f"{n} of {one}" if n > 1 else one for one, n in shapes.items()),
        "outcome": row["outcome"],
        "remarks": remarks(row),
        "folded": str(row.get("folded", "")),
        "lost": " -> ".join(str(n) for n in lost if isinstance(n, int)),
        "chosen": row.get("chosen", ""),
        "faster": f"{row['ratio']:.2f}" if "ratio" in row else "",
        "error": row.get("optimized", ""),
        "notes": "; ".join(_notes(row)),
    }


def remarks(row: Row) -> list[str]:
    """List the shortcomings of a row, in the words that the page filters by."""
    found = {
        "still lose the format": isinstance(row.get("lost_after"), int) and row["lost_after"] > 0,
        "not traced whole": bool(row.get("opaque")),
        "not saved": str(row.get("loaded", "")).startswith("not saved"),
        "without a plan": row.get("chosen") == "graph",
        "returned as given": row.get("chosen") == "input",
    }
    return [remark for remark, holds in found.items() if holds]


def _notes(row: Row) -> list[str]:
    """List the reasons for the shortcomings of a row, cut short."""
    notes = [row.get("reason", ""), row.get("why", "")]
    notes += [n for n in (row.get("lost_before"), row.get("lost_after")) if isinstance(n, str)]
    if row.get("left_count"):
        notes.append(f"{row['left_count']} not folded: {row['left'][0]}")
    notes += [f"not traced: {part}" for part in row.get("opaque", ())[:2]]
    if str(row.get("loaded", "")).startswith("not saved"):
        why = row["loaded"].partition(". A saved file")[0]
        notes.append(why.replace("the model cannot be saved: ", ""))
    return [" ".join(note.split())[:160] for note in dict.fromkeys(notes) if note]
