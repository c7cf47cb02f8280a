"""Measure how the time changes with the batch, the image and the threads.

    python benchmarks/curve.py -o benchmarks/results/curve.json

One run of `nhwc bench` over every case; what the file already holds is kept.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from nhwc._bench import Benchmark, Case, Task, load_benchmark
from nhwc._bench.runner import run
from nhwc.machine.environment import available_cores

MODELS = ("resnet50", "mobilenet_v2")
VARIANTS = ("eager", "optimized", "onnxruntime", "openvino")


def cases() -> list[Case]:
    """Each curve changes one thing about the common case: one image of 224x224, all cores."""
    most = available_cores()
    points = [(1, 224, most), *((batch, 224, most) for batch in (2, 4, 8))]
    points += [(1, side, most) for side in (128, 320, 448)]
    points += [(1, 224, count) for count in range(1, most)]
    return [Case(m, ((n, 3, side, side),), threads) for m in MODELS for n, side, threads in points]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4.0, help="of turns in a case")
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()

    def keep(result: Benchmark) -> None:
        args.output.write_text(json.dumps(result.to_dict(), separators=(",", ":")) + "\n")
        print(table(result).splitlines()[-1], flush=True)

    run(
        [Task(case, VARIANTS) for case in cases()],
        title="time against batch, image and threads",
        seconds=args.seconds,
        done=load_benchmark(args.output) if args.output.exists() else None,
        checkpoint=keep,
    )


def table(result: Benchmark) -> str:
    """Tabulate the times; those per million pixels are constant where time grows in proportion."""
    lines = [
        "| model | batch | image | threads | " + " | ".join(f"{v} ms" for v in VARIANTS) + " | "
        "optimized, ms per megapixel |",
        "|---" * (len(VARIANTS) + 5) + "|",
    ]
    for row in result.rows:
        batch, _, height, width = row.case.shapes[0]
        found = [row.measurement(variant) for variant in VARIANTS]
        cells = [f"{m.median_s * 1e3:.1f}" if m else "-" for m in found]
        own = row.measurement("optimized")
        pixels = batch * height * width / 1e6
        cells.append(f"{own.median_s * 1e3 / pixels:.0f}" if own else "-")
        where = f"{row.case.model} | {batch} | {height}x{width} | {row.case.threads}"
        lines.append(f"| {where} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
