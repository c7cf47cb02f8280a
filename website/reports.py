"""The pages that the five verbs write, made by running each on a small model."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from nhwc._ops import load_table
from nhwc.render.ops_html import ops_html

from .navigation import DOCS


@dataclass(frozen=True)
class Report:
    """A file that a command of nhwc writes: the command's words, the last of them the file."""

    name: str
    command: tuple[str, ...]
    title: str


RESNET = ("resnet18", "--input", "1x3x64x64")
SHORT = ("-b", "16", "--size", "32", "--classes", "10", "--max-batches", "40")

REPORTS = (
    Report(
        "audit.html",
        ("audit", "shufflenet_v2_x1_0", "-o", "audit.html"),
        "The audit of shufflenet_v2_x1_0",
    ),
    Report(
        "optimize.html",
        ("optimize", *RESNET, "--report", "optimize.html"),
        "What nhwc optimize did with resnet18",
    ),
    Report(
        "bench.html",
        (
            *("bench", *RESNET, "--variants", "eager,channels_last,fused,optimized"),
            *("--seconds", "2", "-o", "bench.html"),
        ),
        "Four ways to run resnet18, side by side",
    ),
    Report("rules.html", ("ops", "--rules", "-o", "rules.html"), "The rules of memory formats"),
    Report(
        "train.svg",
        (
            *("train", "--synthetic", "-a", "shufflenet_v2_x0_5", *SHORT),
            *("--channels-last", "-o", "run", "--plot", "train.svg"),
        ),
        "The losses, rates and speed of a run of nhwc train",
    ),
)

TABLE = Report("operators.html", (), "The table of operators: search, filter, sort")
"""Measuring all operators takes minutes: this page is drawn from the table in docs."""

FRAME = """<script>
"use strict";
/* In a frame of the site: take over its light or dark, and tell it how tall this page is. */
if (parent !== window) {
  const tell = () => parent.postMessage({ nhwcHeight: document.body.offsetHeight }, "*");
  addEventListener("message", (event) => {
    const theme = event.source === parent && event.data.nhwcTheme;
    if (theme) document.documentElement.dataset.theme = theme;
  });
  new ResizeObserver(tell).observe(document.body);
  tell();
}
</script>
</body>"""


def make_reports(folder: Path) -> None:
    """Write all reports into `folder`; those that are there already stay."""
    folder.mkdir(parents=True, exist_ok=True)
    for report in REPORTS:
        if not (folder / report.name).exists():
            print(f"nhwc {' '.join(report.command)}", file=sys.stderr)
            _run(report, folder)
    (folder / TABLE.name).write_text(_framed(ops_html(load_table(_table()))))


def _run(report: Report, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m", "nhwc", *report.command, "-q"]
        subprocess.run(command, cwd=place, check=True, stdout=subprocess.DEVNULL)
        text = Path(place, report.name).read_text()
    (folder / report.name).write_text(_framed(text) if report.name.endswith(".html") else text)


def _framed(page: str) -> str:
    return FRAME.join(page.rsplit("</body>", 1))


def _table() -> Path:
    """The newest table of operators on a CPU that docs holds."""
    tables = DOCS.glob("operators-torch-*-cpu.json")
    return max(tables, key=lambda file: [int(part) for part in file.stem.split("-")[2].split(".")])
