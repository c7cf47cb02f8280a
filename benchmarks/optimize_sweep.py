"""Every classification model of torchvision through `fuse` and `optimize`: right, and how fast?

    python benchmarks/optimize_sweep.py [--only PATTERN] [--size 64] [--output FILE.csv]

Batch norms get random statistics, so that folding is no trivial matter. The smallest of a few
image sizes that a model accepts keeps the sweep short: the table is about outcomes; `nhwc bench`
is about times. Rows of models that are in the file already are kept, so it can be run in parts.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
import time
from pathlib import Path

import torch

import nhwc
from nhwc.verify import observe, random_inputs, verify
from nhwc.zoo import import_torchvision, load_model, randomize_batchnorm_

FIELDS = (
    "model", "input", "fused", "left", "fuse_error", "fuse_right", "fuse_s", "outcome", "error",
    "eager_error", "right", "layers", "ours", "ratio", "low", "high", "verdict",
    "optimize_s", "why",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="a regular expression")
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument(
        "--seconds", type=float, default=170, help="stop after the model that ends past this"
    )
    parser.add_argument(
        "--output", type=Path, default=Path(__file__).parent / "results/optimize_sweep.csv"
    )
    args = parser.parse_args()
    models = import_torchvision().models
    rows = {row["model"]: row for row in read(args.output)}
    start = time.perf_counter()
    for name in models.list_models(module=models):
        if name in rows or not re.search(args.only, name):
            continue
        rows[name] = row = outcome(name, args.size)
        print(name, row["outcome"], row["ratio"], row["right"], row["why"][:60], flush=True)
        write(args.output, rows)
        if time.perf_counter() - start > args.seconds:
            sys.exit("more to do: run again")


def outcome(name: str, size: int) -> dict[str, object]:
    """One row; a model that fails says why."""
    row: dict[str, object] = dict.fromkeys(FIELDS, "") | {"model": name}
    try:
        model = randomize_batchnorm_(load_model(name))
        x = smallest_input(model, size)
        row["input"] = "x".join(map(str, x.shape))
        begin = time.perf_counter()
        fused = nhwc.fuse(model)
        row["fuse_s"] = f"{time.perf_counter() - begin:.2f}"
        row["fused"], row["left"] = len(fused.report.applied), len(fused.report.skipped)
        with torch.no_grad():
            checked = verify(observe(model, random_inputs((x,), 2)), fused)
        row["fuse_error"] = f"{checked.worst.error:.1e}"
        row["fuse_right"] = checked.passed
        report = nhwc.optimize(model, x).report
        worst, plan = report.verification.worst, report.plans[0]
        low, high = report.comparison.interval
        row |= {
            "outcome": report.chosen,
            "error": f"{worst.error:.1e}",
            "eager_error": f"{worst.eager_error:.1e}",
            "right": report.verification.passed,
            "layers": len(plan.layers),
            "ours": sum(layer.chosen.kernel.startswith("nhwc") for layer in plan.layers),
            "ratio": f"{report.comparison.ratio:.2f}",
            "low": f"{low:.2f}",
            "high": f"{high:.2f}",
            "verdict": report.comparison.verdict,
            "optimize_s": f"{report.setup_s:.1f}",
            "why": report.reason,
        }
    except Exception as error:
        row |= {"outcome": "failed", "why": f"{type(error).__name__}: {error}"[:300]}
    return row


def smallest_input(model: torch.nn.Module, size: int) -> torch.Tensor:
    for side in (size, 96, 128, 224, 299):
        x = torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(0))
        try:
            with torch.no_grad():
                model(x)
        except (RuntimeError, AssertionError, ValueError):
            continue
        return x
    raise ValueError("no input size is accepted")


def read(path: Path) -> list[dict[str, object]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write(path: Path, rows: dict[str, dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        writer.writerows(rows[name] for name in sorted(rows))


if __name__ == "__main__":
    main()
