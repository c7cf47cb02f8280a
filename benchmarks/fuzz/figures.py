"""The process that watches the one that loads, and counts."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .cases import PATIENCE_S


@dataclass
class Figures:
    """Counts of the outcomes, and the failures in words."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, said: dict[str, Any]) -> None:
        outcome = said["outcome"] if not said["seen"] else f"did {said['seen']}"
        known = outcome in ("refused", "loaded")
        self.counts[said["kind"], outcome if known else "failed"] += 1
        if not known:
            self.failures.append(f"case {said['case']} ({said['kind']}): {outcome}")

    @property
    def cases(self) -> int:
        return sum(self.counts.values())


def run(
    seed: int,
    *,
    seconds: float = 1e9,
    cases: int = 1 << 60,
    first: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> Figures:
    """Run `cases` cases, for `seconds` at most, and count their outcomes."""
    figures = Figures()
    with tempfile.TemporaryDirectory(prefix="nhwc-fuzz-") as name:
        folder = Path(name)
        environment = os.environ | {"NHWC_CACHE": str(folder / "cache")}
        command = [sys.executable, "-m", "benchmarks.fuzz"]
        subprocess.run([*command, "--make", name], env=environment, check=True)
        began = time.monotonic()
        start = [*command, "--worker", name, "--seed", str(seed), "--case"]
        number = first
        while number < first + cases and time.monotonic() - began < seconds:
            number = _watch(
                [*start, str(number)], environment, figures, first + cases, began + seconds
            )
            say(f"{figures.cases} cases, {len(figures.failures)} failures")
    figures.seconds = time.monotonic() - began
    return figures


def _watch(
    command: list[str], environment: dict[str, str], figures: Figures, last: int, until: float
) -> int:
    """Start a worker and count its cases until it fails or time is up; the number of the next."""
    worker = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    lines: queue.Queue[str | None] = queue.Queue()
    assert worker.stdout is not None
    reader = threading.Thread(target=_read, args=(worker.stdout, lines), daemon=True)
    reader.start()
    number, kind = int(command[-1]), "start"
    try:
        while number < last and (kind == "start" or time.monotonic() < until):
            try:
                line = lines.get(timeout=PATIENCE_S * (3 if kind == "start" else 1))
            except queue.Empty:
                line = ""
            if not line:
                died = f"takes more than {PATIENCE_S} s"
                if line is None:
                    died = f"died with status {worker.wait()}"
                figures.add({"case": number, "kind": kind, "outcome": died, "seen": []})
                return number + 1
            said = json.loads(line)
            number, kind = said["case"], said.get("begins", kind)
            if "outcome" in said:
                figures.add(said)
                number += 1
        return number
    finally:
        worker.kill()
        worker.wait()
        reader.join()
        worker.stdout.close()


def _read(stream: Any, lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def page(figures: Figures, seed: int) -> str:
    """The figures as a page of documentation."""
    rows = []
    for kind, what in (
        ("file_case", "saved files"),
        ("document_case", "results, tables of operators, baselines"),
        ("memory_case", "memory of measurements"),
        ("kernel_case", "compiled kernels"),
    ):
        counts = [figures.counts[kind, outcome] for outcome in ("refused", "loaded", "failed")]
        rows.append(f"| {what} | {sum(counts)} | {' | '.join(map(str, counts))} |")
    failures = "\n".join(f"- {one}" for one in figures.failures) or "None."
    return f"""# Files changed by structure

Written by `python -m benchmarks.fuzz --seconds {figures.seconds:.0f} --seed {seed} -o FILE`: valid
files, of which a few places were changed (types, names, numbers; parts deleted, doubled, moved,
taken from other files; planted code in every text and key), every checksum right again. A saved
file is *refused* in one line, or *loaded*, having run nothing; so is what a report is made of,
which can then be shown in every form; what the cache holds is *loaded* with the right answers,
since it is believed only if it fits. Planted code that ran, a traceback, a process that died, 8 GB
of memory or two minutes would be *failed*. The suite runs a few hundred of these cases.

| files | cases | refused | loaded | failed |
|---|---|---|---|---|
{chr(10).join(rows)}

Failures: {failures}
"""
