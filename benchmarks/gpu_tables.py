"""The GPU section of docs/performance.md, from the files that benchmarks.gpu left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nhwc.machine.timing import Samples

from .gpu_rows import WHOLE, Rows, comparison

Row = Mapping[str, Any]


def section(folder: Path) -> str:
    """Every step that has a file, as a paragraph and a table."""
    parts = []
    for name, (title, shown) in SHOWN.items():
        path = folder / f"{name}.json"
        if path.exists():
            rows = Rows.read(path)
            cut = "" if rows.ended == WHOLE else f" Cut short: {rows.ended}."
            parts.append(f"### {title}\n\n{_where(rows)}{cut}\n\n{shown(rows.rows)}")
    return "\n\n".join(parts) or "Nothing has been recorded yet."


def _where(rows: Rows) -> str:
    here = rows.environment
    return f"{here['device']}, torch {here['torch']}." if here else "It did not begin."


def _tests(rows: list[dict[str, Any]]) -> str:
    counts = Counter(row["outcome"] for row in rows if "outcome" in row)
    told = ", ".join(f"{count} {outcome}" for outcome, count in counts.items()) or "none ran"
    bad = [row["test"] for row in rows if row.get("outcome") in ("failed", "error")]
    return f"{told}." + f" Not passed: {', '.join(bad)}." * bool(bad)


def _layouts(published: str) -> Callable[[list[dict[str, Any]]], str]:
    """A table of NCHW against NHWC, with the published gain beside."""

    def shown(rows: list[dict[str, Any]]) -> str:
        lines = [
            "| model | batch | | NCHW ms | NHWC ms | gain (99 % interval) | published |",
            "|---|---|---|---|---|---|---|",
        ]
        for row in rows:
            cells = (
                row.get("failure")
                or f"{_ms(row, 'nchw')} | {_ms(row, 'nhwc')} | {_gain(row, 'nchw', 'nhwc')} "
                f"| {published}"
            )
            lines.append(f"| {row['model']} | {row['batch']} | {row['how']} | {cells} |")
        return "\n".join(lines)

    return shown


def _optimize(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| model | torch.compile mode | eager ms | torch.compile ms | nhwc optimize ms "
        "| against eager | against torch.compile |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = row.get("failure") or " | ".join(
            [
                *(_ms(row, way) for way in ("eager", "compile", "optimize")),
                _gain(row, "eager", "optimize"),
                _gain(row, "compile", "optimize"),
            ]
        )
        lines.append(f"| {row['model']} | {row['how']} | {cells} |")
    return "\n".join(lines)


def _operators(rows: list[dict[str, Any]]) -> str:
    counts = Counter(row["outcome"] for row in rows)
    told = ", ".join(f"{count} {outcome}" for outcome, count in counts.most_common())
    lost = ", ".join(row["operator"] for row in rows if row["outcome"] == "loses")
    return f"Forward, float32: {told or 'none measured'}. Lose it: {lost or 'none'}."


def _ms(row: Row, way: str) -> str:
    seconds = row.get("seconds", {}).get(way)
    return f"{Samples(tuple(seconds)).median_s * 1e3:.2f}" if seconds else "-"


def _gain(row: Row, before: str, after: str) -> str:
    found = comparison(row, before, after)
    if found is None:
        return "-"
    return f"{found.ratio:.2f} ({found.interval[0]:.2f}-{found.interval[1]:.2f})"


SHOWN = {
    "tests": ("Tests marked gpu", _tests),
    "volta": ("The volta suite, mixed precision", _layouts("1.08-1.35")),
    "train": ("Training ResNet-50, mixed precision", _layouts("1.22")),
    "mobilenet": ("Training MobileNetV3, mixed precision", _layouts("1.58 (84.9 to 53.6 ms)")),
    "optimize": ("nhwc optimize against torch.compile, float32", _optimize),
    "operators": ("Operators", _operators),
}
"""Each step's title and table, in the order of the page."""
