"""Whole models, nhwc against every other engine: the table in milliseconds and the ratios.

    python benchmarks/engines.py -o benchmarks/results/engines.json --batch 1   # both suites
    python benchmarks/engines.py resnet50 vgg16 --batch 1,4 --threads 1,2 -o some.json

The same code as `nhwc bench`; this only chooses models and prints the ratio that the targets are
written in: the best other engine's median over nhwc's. What the file already holds is kept.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from nhwc._bench import SUITES, Benchmark, Row, load_benchmark
from nhwc._bench.results import geometric_mean
from nhwc.cli import main as nhwc
from nhwc.machine.timing import Comparison

VARIANTS = "eager,channels_last,optimized,onnxruntime,openvino,opencv,ncnn,mnn,executorch,zentorch"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help="default: every model of volta and icelake")
    parser.add_argument("--variants", default=VARIANTS)
    parser.add_argument("--batch", default="1,4")
    parser.add_argument("--threads")
    parser.add_argument("--seconds", default="15")
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    rest = ["--variants", args.variants, "--batch", args.batch, "--seconds", args.seconds]
    rest += ["--threads", args.threads] if args.threads else []
    rest += ["--resume", "-o", str(args.output), "--format", "json"]
    # The suite knows the image size of each of its models. Volta, whole, is in mixed precision.
    models = {suite.name: suite.models for suite in SUITES}
    others = [model for model in models["volta"] if model not in models["icelake"]]
    whole = [args.models] if args.models else [["--suite", "icelake"], others]
    status = 0
    for what in whole:
        status = max(status, nhwc(["bench", *what, *rest]))
    if args.output.exists():
        print(table(load_benchmark(args.output)))
    return status


def table(result: Benchmark) -> str:
    """Tabulate milliseconds per engine, and the best other engine's time over nhwc's."""
    variants = [v for v in result.variants if v != "optimized"]
    lines = ["| model | " + " | ".join([*variants, "optimized", "ahead", "error"]) + " |"]
    lines.append("|---" * (len(variants) + 4) + "|")
    ratios = []
    for row in result.rows:
        cells = [_ms(row, variant) for variant in (*variants, "optimized")]
        ahead = _ahead(row)
        ratios += [ahead.ratio] if ahead else []
        own = row.measurement("optimized")
        lines.append(
            f"| {row.case.model}, batch {row.case.batch}, {row.case.threads} threads | "
            + " | ".join([*cells, f"{ahead.ratio:.2f}" if ahead else "-"])
            + (f" | {own.error:.0e} |" if own else " | - |")
        )
    if ratios:
        worst = min(ratios)
        mean = geometric_mean(ratios)
        lines += ["", f"ahead of the best: geometric mean {mean:.2f}x, at worst {worst:.2f}x"]
    return "\n".join(lines)


def _ms(row: Row, variant: str) -> str:
    found = row.measurement(variant)
    return f"{found.median_s * 1e3:.1f}" if found else "-"


def _ahead(row: Row) -> Comparison | None:
    peer = row.best(ours=False)
    return row.comparison("optimized", peer.variant) if peer else None


if __name__ == "__main__":
    raise SystemExit(main())
