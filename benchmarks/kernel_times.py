"""Convolution kernels, layer by layer: ours beside oneDNN's with prepacked weights.

    python -m benchmarks.kernel_times resnet50 vgg16 --threads 2
    python -m benchmarks.kernel_times typical --json kernels.json --markdown kernels.md

Both in one process, in turns, on channels-last data, checked against float64 first; oneDNN may take
the first layer's image in either format. The share is of
the multiply-adds that this machine was measured to do at most; Winograd can pass 100 %, because
only the operations of the direct sum are counted.
"""

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from nhwc.formats import Format, strides_of
from nhwc.kernels import conv2d_candidates, prepare
from nhwc.kernels.tape.fastest import peak_flops
from nhwc.kernels.tape.invoke import Invocation
from nhwc.kernels.tape.steps import View
from nhwc.machine.environment import Environment
from nhwc.machine.timing import interleave

from .layers import MODELS, layers


@dataclass(frozen=True)
class Row:
    """One layer: the least seconds and the error of every kernel that can compute it."""

    layer: str
    times: int
    gflop: float
    seconds: dict[str, float]
    errors: dict[str, float]

    @property
    def theirs_s(self) -> float:
        return min(s for name, s in self.seconds.items() if name.startswith("onednn"))

    @property
    def ours(self) -> str:
        own = [name for name in self.seconds if not name.startswith("onednn")]
        return min(own, key=self.seconds.__getitem__)

    @property
    def ours_s(self) -> float:
        return self.seconds[self.ours]

    def share(self, peak: float) -> float:
        return self.gflop / self.ours_s / peak

    def text(self, peak: float) -> str:
        ignored = ("onednn", self.ours)
        rest = {n: s for n, s in self.seconds.items() if not n.startswith(ignored)}
        others = " ".join(f"{n} {s * 1e3:.3f}" for n, s in rest.items())
        return (
            f"{self.times:2} x {self.layer:36} {self.theirs_s * 1e3:8.3f} {self.ours_s * 1e3:8.3f} "
            f"ms {self.theirs_s / self.ours_s:5.2f}x {self.share(peak):5.0%} "
            f"{self.ours} {self.errors[self.ours]:.0e}  {others}"
        )

    def markdown(self, peak: float) -> str:
        return (
            f"| {self.layer} | {self.theirs_s * 1e3:.3f} | {self.ours_s * 1e3:.3f} | "
            f"{self.theirs_s / self.ours_s:.2f} | {self.share(peak):.0%} | {self.ours} | "
            f"{self.errors[self.ours]:.0e} |"
        )


def candidates(spec, x, weight, bias):
    """Return functions of no argument, by name: oneDNN's, then ours."""
    settings = (list(spec.padding), list(spec.stride), list(spec.dilation), spec.groups)
    packed = torch.ops.mkldnn._reorder_convolution_weight(weight, *settings, list(x.shape))
    pointwise = torch.ops.mkldnn._convolution_pointwise
    found = {"onednn": lambda: pointwise(x, packed, bias, *settings, "none", [], "")}
    if spec.c <= 4:
        plain = x.contiguous()
        theirs = lambda: pointwise(plain, packed, bias, *settings, "none", [], "")
        found["onednn from nchw"] = theirs
    image, result = (spec.n, spec.c, spec.h, spec.w), (spec.n, spec.k, spec.out_h, spec.out_w)
    for kernel in conv2d_candidates(spec):
        views = View("x", image, spec.c), View("y", result, spec.k)
        call = Invocation.of(
            kernel.steps(*views, kernel.pack(weight, bias)), torch.get_num_threads()
        )
        found[kernel.name] = lambda call=call: run(call, x, result)
    return found


def run(call, x, shape):
    """Call a kernel as the operator does, without the checks, which a tape makes once."""
    y = torch.empty_strided(shape, strides_of(shape, Format.CHANNELS_LAST))
    call({"x": x, "y": y})
    return y


def measure(spec, rounds):
    """Return the least seconds and the error of each kernel; other programs only add to times."""
    x = torch.randn(spec.n, spec.h, spec.w, spec.c).permute(0, 3, 1, 2)
    weight = torch.randn(spec.k, spec.c // spec.groups, spec.r, spec.s) / spec.depth**0.5
    bias = torch.randn(spec.k)
    tensors = [t.double() for t in (x, weight, bias)]
    truth = F.conv2d(*tensors, spec.stride, spec.padding, spec.dilation, spec.groups)
    functions, errors = candidates(spec, x, weight, bias), {}
    for name, function in functions.items():
        errors[name] = float((function().double() - truth).norm() / truth.norm())
        assert errors[name] < 1e-5, (name, spec, errors[name])
    times = interleave(functions, rounds=rounds)
    return {name: min(samples.seconds) for name, samples in times.items()}, errors


def name_of(spec):
    name = f"{spec.n},{spec.c},{spec.h},{spec.w} -> {spec.k} {spec.r}x{spec.s}/{spec.stride[0]}"
    name += f" d{spec.dilation[0]}" if spec.dilation != (1, 1) else ""
    return name + (f" g{spec.groups}" if spec.groups > 1 else "")


def markdown(rows, where, peak):
    """A page with one table."""
    lines = [
        "# Convolution kernels, layer by layer",
        "",
        f"{where}, {peak:.0f} GFLOP/s at most, float32; the least of many rounds in "
        "turns. Written by `python -m benchmarks.kernel_times`.",
        "",
        "| layer | oneDNN ms | nhwc ms | times as fast | share of peak | kernel | error |",
        "|---|---|---|---|---|---|---|",
        *(row.markdown(peak) for row in rows),
        "",
        "A layer is N,C,H,W -> K, filter/stride, dilation, groups. The share counts operations of "
        "the direct sum, so that Winograd passes 100 %. The error is relative, against float64.",
    ]
    return "\n".join(lines) + "\n"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=MODELS, metavar="MODEL", help=" ".join(MODELS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write all times to FILE")
    parser.add_argument("--markdown", metavar="FILE", type=Path, help="also write a table to FILE")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    prepare()
    peak = peak_flops() / 1e9
    where = str(Environment.here())
    print(f"{where}, {peak:.0f} GFLOP/s at most")
    rows = []
    with torch.inference_mode():
        for model in args.models:
            print(
                f"\n{model}, batch {args.batch}: times x layer, oneDNN, ours, ratio, share, kernel"
            )
            theirs = ours = 0.0
            for times, spec in layers(model, args.batch):
                row = Row(name_of(spec), times, spec.gflop, *measure(spec, args.rounds))
                peak = max(peak, peak_flops() / 1e9)
                print(row.text(peak), flush=True)
                theirs, ours = theirs + times * row.theirs_s, ours + times * row.ours_s
                rows.append(row)
            print(f"{model}: {theirs * 1e3:.2f} {ours * 1e3:.2f} ms {theirs / ours:.2f}x")
    if args.json:
        found = {
            "schema": 2,
            "where": where,
            "peak_gflops": peak,
            "rows": [asdict(row) for row in rows],
        }
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    if args.markdown:
        args.markdown.write_text(markdown(rows, where, peak))


if __name__ == "__main__":
    sys.exit(main())
