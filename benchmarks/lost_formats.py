"""Which models still lose channels last after the passes, at which operators, and why.

    python -m benchmarks.lost_formats                     # those without a row, small ones first
    python -m benchmarks.lost_formats --only 'xcit|cait' --again
    python -m benchmarks.lost_formats --table             # write the table from the rows there are

It asks the models that lost the format in the sweep, on the inputs that the sweep gave them: runs
the passes, without a plan, and audits the graph. A model has a process of its own, with a limit of
time. Rows are kept in benchmarks/results/lost_formats.json; docs/lost-formats.md is the table.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from .zoo_names import sizes_known
from .zoo_sweep import RESULTS as SWEEP

RESULTS = SWEEP.with_name("lost_formats.json")
TABLE = Path(__file__).parents[1] / "docs" / "lost-formats.md"

Row = dict[str, Any]


@dataclass(frozen=True)
class Cause:
    """Why some models lost the format in the sweep, and what became of it."""

    models: str
    """A regular expression for the models that the sweep found it in."""
    operator: str
    why: str
    now: str


CAUSES = (
    Cause(
        "xcit_",
        "repeat",
        "the position of each pixel, repeated for the batch: `Tensor.repeat` fills NCHW",
        "`mend_repeat` repeats in the order in which the input lies",
    ),
    Cause(
        "resnest|skresn",
        "sum over dim 1 of 5",
        "branches are stacked, weighed and added: a reduction fills NCHW",
        "`mend_reduction` adds in the order in which the stack lies; a softmax over the weights of "
        "the branches, one pixel each, stays where these are in groups",
    ),
    Cause(
        "cait_|efficientformerv2",
        "softmax",
        "a softmax between the 1x1 convolutions that mix the heads of an attention fills NCHW",
        "`mend_softmax` takes it in the order in which its input lies",
    ),
    Cause(
        "efficientvim",
        "sub",
        "`x - before` where x is what a matrix product gave: the first operand decides",
        "left: no call pays for it, since the sum that follows begins with `before`; written "
        "otherwise it would be one more pass over the image",
    ),
    Cause(
        "mobilevitv2",
        "sum over one side, group_norm",
        "reductions over the pixels of a patch fill NCHW",
        "`mend_reduction` adds in the order in which the patches lie",
    ),
    Cause(
        "^(?!lam).*halo",
        "reshape",
        "blocks of pixels are put together: the reshape has to copy, marked or not",
        "the audit says that it converts on request, and no more that it misread",
    ),
    Cause(
        "efficientvit_m|csp|cs3|shvit",
        "add, cat",
        "one of two inputs was made NCHW by a matrix product, or by `.contiguous()` from habit",
        "`mend_arithmetic` puts the other first, `mend_cat_format` takes the format of the larger "
        "part, `mend_contiguous` drops the copy",
    ),
    Cause(
        "ghostnet",
        "interpolate",
        "a gate of one pixel is resized: such an image tells no format",
        "left: no pooling layer made it; the sweep's image of 64 is that small in the last stages",
    ),
    Cause(
        "nest_|bat_|evos",
        "layer_norm, sigmoid, reshape",
        "a view of pixels or vectors went through an operator that keeps whatever it is given",
        "the audit calls no operator a loss whose result lies as its input does; the products of "
        "`bat` spread pixels to matrices and are no images",
    ),
    Cause(
        "coat_|pvt_v2|_cc_",
        "interpolate, pool, conv2d",
        "one image that views made of tokens has the batch stride of tokens: torch reads NCHW",
        "`mend_tokens` gives it the strides of an image; one conditional convolution of "
        "efficientnet_cc stays",
    ),
    Cause(
        "rcnn",
        "roi_align",
        "torchvision's kernel writes NCHW; it is called by code that loops over data",
        "left: no call pays for it",
    ),
    Cause(
        "^(mc3|r2plus1d|r3d|s3d)|lambda|lamhalo",
        "conv3d",
        "torch's kernel for a single clip this small writes NCHW",
        "left outside of a plan, which takes oneDNN's kernel; lambda layers see one channel",
    ),
    Cause(
        "deeplabv3",
        "interpolate, cat",
        "the branch that pools to one pixel: such an image tells no format",
        "`mend_interpolate` makes it a view in which every pixel is that one",
    ),
    Cause(
        "raft",
        "cat, add",
        "features are joined with a flow of two channels that is NCHW",
        "`mend_cat_format`; the sum of coordinates stands in code that branches on data",
    ),
    Cause(
        "csatv2",
        "cat",
        "two maps of one channel are joined: such a map tells no format",
        "`mend_reduction` makes maps whose strides say it; left: pools of such maps to one pixel",
    ),
    Cause(
        "maxvit|coatnet|convit|naflex",
        "reshape, add",
        "windows, or positions in N, H, W, C order, which are no images of channels",
        "the audit takes them for no images, and nothing is lost today",
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Make the rows that are missing, then the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="models that this regular expression finds")
    parser.add_argument("--again", action="store_true", help="also those that have a row")
    parser.add_argument("--seconds", type=float, default=600, help="the limit for one model")
    parser.add_argument("--stop-after", type=float, default=1e9, help="start no model after this")
    parser.add_argument("--table", action="store_true", help="make no rows")
    args = parser.parse_args(argv)
    rows: dict[str, Row] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    lost = lost_in_sweep()
    end = time.monotonic() + args.stop_after
    for name in () if args.table else sorted(lost, key=lambda name: sizes_known().get(name, 0)):
        if time.monotonic() > end or not re.search(args.only, name):
            continue
        if args.again or name not in rows:
            rows[name] = one_row(name, lost[name], args.seconds)
            print(f"{name}: {lost[name]['lost_after']} -> {rows[name]}"[:160], flush=True)
            RESULTS.write_text(json.dumps(dict(sorted(rows.items())), indent=1) + "\n")
    TABLE.write_text(markdown(lost, rows))
    return 0


def lost_in_sweep() -> dict[str, Row]:
    """The rows of the sweep that are right and still lose the format."""
    rows: dict[str, Row] = json.loads(SWEEP.read_text())
    return {n: r for n, r in rows.items() if r["outcome"] == "right" and r.get("lost_after")}


def one_row(name: str, swept: Row, seconds: float) -> Row:
    """Make the row of one model in a process of its own."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["benchmarks.zoo_row"])
    ours, theirs = server.Pipe()
    process = server.Process(target=_send, args=(theirs, name, swept))
    process.start()
    theirs.close()
    try:
        row: Row = ours.recv() if ours.poll(seconds) else {"failed": f"more than {seconds:.0f} s"}
    except EOFError:
        row = {"failed": "its process ended"}
    process.kill()
    process.join()
    return row


def _send(to: Connection, name: str, swept: Row) -> None:
    try:
        to.send({"left": left_of(name, swept)})
    except Exception as error:
        to.send({"failed": f"{type(error).__name__}: {error}"[:200]})


def left_of(name: str, swept: Row) -> list[dict[str, Any]]:
    """The calls that lose the format after the passes: operator, how many, shape, who pays."""
    import torch

    import nhwc
    from nhwc.graph import capture
    from nhwc.passes import PASSES, run_passes
    from nhwc.passes.sizes import for_sizes

    from .zoo_row import shrink_, small_model, wake_

    model = nhwc.zoo.randomize_constants_(nhwc.zoo.randomize_batchnorm_(small_model(name)))
    wake_(model)
    shrink_(model)
    torch.manual_seed(0)
    inputs: tuple[Any, ...] = tuple(torch.randn(shape) for shape in swept["input"])
    if swept["family"] == "detection":
        inputs = ([image.sigmoid() for image in inputs],)
    try:
        with torch.no_grad():
            model(*inputs)
    except Exception:  # Its windows are of another size than that image.
        model = nhwc.zoo.randomize_batchnorm_(nhwc.load_model(name))
    with torch.no_grad():
        captured = capture(model, layers=True)
        run_passes(captured.module)
        sized, _ = for_sizes(captured.module, inputs, captured.opaque, PASSES)
    found = nhwc.audit(sized.graph if sized else captured.module, *inputs)
    return [
        {
            "operator": finding.operator,
            "calls": len(finding.calls),
            "paid": len(finding.payers),
            "shape": list(found.calls[finding.calls[0]].inputs[0].shape),
        }
        for finding in found.lost
    ]


def markdown(lost: Mapping[str, Row], rows: Mapping[str, Row]) -> str:
    """The table of causes, and one of the models that are left."""
    known = {name: rows[name] for name in lost if "left" in rows.get(name, {})}
    left = {name: row["left"] for name, row in known.items() if row["left"]}
    lines = [
        "# Formats that were lost after the passes",
        "",
        "Written by `python -m benchmarks.lost_formats`. In the last sweep of torchvision and timm",
        f"{len(lost)} models lost channels last at some call after the passes of `nhwc.optimize`;",
        f"{len(known)} of them were run again with today's passes, on the same inputs, and",
        f"{len(left)} still do. A plan has kernels of its own: what is counted is the graph below.",
        "",
        "| models | run again | left | at | why | now |",
        "|---|---|---|---|---|---|",
    ]
    told: set[str] = set()
    for cause in CAUSES:
        names = [n for n in lost if re.search(cause.models, n.removeprefix("timm:"))]
        names = [n for n in names if n not in told]
        told.update(names)
        counts = len(names), sum(n in known for n in names), sum(n in left for n in names)
        cells = (*map(str, counts), cause.operator, cause.why, cause.now)
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "What is left:", "", "| model | input | calls that lose it | paid for by |"]
    lines.append("|---|---|---|---|")
    for name, calls in sorted(left.items()):
        size = ", ".join("x".join(map(str, shape)) for shape in lost[name]["input"])
        shown = ", ".join(
            f"{one['calls']} {one['operator'].rpartition('.')[2]} of "
            f"{'x'.join(map(str, one['shape']))}"
            for one in calls
        )
        lines.append(f"| {name} | {size} | {shown} | {sum(one['paid'] for one in calls)} |")
    failed = {name: rows[name]["failed"] for name in lost if "failed" in rows.get(name, {})}
    for name, reason in sorted(failed.items()):
        lines.append(f"\nNot known: {name}: {reason}.")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
