"""Show where an optimized model spends its time, by kind of layer.

    python -m benchmarks.where resnet50 mobilenet_v2

A layer's time is the one measured when the plan was made: alone, with warm caches. The whole model
is timed in turns with the original; what it takes beyond its layers is cold caches and barriers.
The share of the peak counts the multiply-adds of the direct sum, so Winograd may pass 100 %.
"""

from __future__ import annotations

import argparse
import math
import re
from collections import defaultdict
from collections.abc import Sequence

import torch

import nhwc
from nhwc._optimize.report import LayerReport, OptimizeReport
from nhwc.kernels.tape.fastest import peak_flops
from nhwc.machine.environment import Environment
from nhwc.operators.windows import places

_CONVOLUTION = re.compile(
    r"conv2d (\d+)x(\d+)x(\d+)x(\d+) w(\d+)x(\d+)x(\d+)x(\d+) "
    r"s(\d+)x(\d+) p(\d+)x(\d+) d(\d+)x(\d+) g(\d+)"
)


def kind_and_gflop(layer: LayerReport) -> tuple[str, float]:
    """Return the kind of a layer, and the GFLOP of its direct sum."""
    found = _CONVOLUTION.match(layer.what)
    if not found:
        return layer.what.split()[0], 0.0
    n, c, h, w, k, depth, r, s, *rest = map(int, found.groups())
    stride, padding, dilation, groups = rest[:2], rest[2:4], rest[4:6], rest[6]
    sides = zip((h, w), (r, s), stride, padding, dilation, strict=True)
    out = [places(n, k, stride=s, padding=p, dilation=d) for n, k, s, p, d in sides]
    gflop = 2e-9 * n * k * depth * r * s * math.prod(out)
    if c <= 4:
        return "first convolution", gflop
    if groups > 1:
        return ("depthwise" if depth == 1 else "grouped") + f" {r}x{s}", gflop
    return f"convolution {r}x{s}" + (f", stride {stride[0]}" if stride[0] > 1 else ""), gflop


def table(report: OptimizeReport, peak: float) -> str:
    seconds, gflop, count = defaultdict(float), defaultdict(float), defaultdict(int)
    kernels: dict[str, set[str]] = defaultdict(set)
    for layer in report.plans[0].layers:
        kind, work = kind_and_gflop(layer)
        seconds[kind] += layer.chosen.seconds
        gflop[kind] += work
        count[kind] += 1
        kernels[kind].add(layer.chosen.kernel.removeprefix("nhwc "))
    whole = report.times["plan"].median_s
    lines = ["| layers | | ms | share | of the peak | kernels |", "|---|---|---|---|---|---|"]
    for kind in sorted(seconds, key=seconds.__getitem__, reverse=True):
        if seconds[kind] < 0.005 * whole:
            continue
        share = f"{gflop[kind] / seconds[kind] / peak:.0%}" if gflop[kind] else ""
        lines.append(
            f"| {kind} | {count[kind]} | {seconds[kind] * 1e3:.2f} | {seconds[kind] / whole:.0%} "
            f"| {share} | {', '.join(sorted(kernels[kind]))} |"
        )
    total = sum(seconds.values())
    lines.append(
        f"| all layers | {sum(count.values())} | {total * 1e3:.2f} | {total / whole:.0%} "
        f"| {sum(gflop.values()) / total / peak:.0%} | |"
    )
    lines.append(f"| the model | | {whole * 1e3:.2f} | | | |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--batch", type=int, default=1)
    args = parser.parse_args(argv)
    peak = peak_flops() / 1e9
    print(f"{Environment.here()}, {peak:.0f} GFLOP/s at most, batch {args.batch}, 224x224")
    for name in args.models:
        model = nhwc.load_model(name)
        fast = nhwc.optimize(model, torch.randn(args.batch, 3, 224, 224))
        print(f"\n### {name}\n\n{table(fast.report, peak)}", flush=True)


if __name__ == "__main__":
    main()
