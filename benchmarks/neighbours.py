"""Measure what other programs on the same cores cost each engine.

    python -m benchmarks.neighbours -o benchmarks/results/neighbours.json

Runs `nhwc bench` beside none, one, and more programs that do nothing but compute.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from nhwc._bench import Benchmark, Case, Task
from nhwc._bench.runner import run
from nhwc.machine.environment import available_cores
from nhwc.render.bench_words import label

MODELS = ("resnet18", "squeezenet1_1")
VARIANTS = ("channels_last", "optimized", "onnxruntime", "openvino")
BUSY = (0, 1, 2, 4)


@contextlib.contextmanager
def neighbours(count: int) -> Iterator[None]:
    """As many programs that compute without end."""
    endless = [sys.executable, "-c", "while True: pass"]
    running = [subprocess.Popen(endless) for _ in range(count)]
    try:
        yield
    finally:
        for program in running:
            program.kill()
            program.wait()


def table(found: dict[str, Benchmark]) -> str:
    """The milliseconds of each engine, by model and number of other programs."""
    head = ["model", "busy programs", *(f"{label(variant)} ms" for variant in VARIANTS)]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for number in range(len(MODELS)):
        for busy, result in found.items():
            row = result.rows[number]
            times = [row.measurement(variant) for variant in VARIANTS]
            cells = [f"{one.median_s * 1e3:.1f}" if one else "-" for one in times]
            lines.append(f"| {' | '.join([row.case.model, busy, *cells])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0, help="of turns in a case")
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    tasks = [Task(Case(m, ((1, 3, 224, 224),), available_cores()), VARIANTS) for m in MODELS]
    # Once undisturbed, so that no engine prepares itself beside others.
    run(tasks, title="preparation", seconds=0.1)
    found = {}
    for busy in BUSY:
        with neighbours(busy):
            found[str(busy)] = run(tasks, title=f"beside {busy}", seconds=args.seconds)
    print(table(found))
    args.output.write_text(json.dumps({busy: one.to_dict() for busy, one in found.items()}) + "\n")


if __name__ == "__main__":
    main()
