"""`nhwc demo`: the main job on a default model, in half a minute."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from .._audit import audit
from .._optimize import optimize
from ..render.audit_html import audit_html
from ..render.audit_text import audit_text
from ..render.optimize_text import optimize_text
from ..zoo import load_model, randomize_batchnorm_
from .common import colors
from .outputs import check_outputs, write_file
from .progress import note, put

MODEL = "shufflenet_v2_x1_0"
PAGE = Path("nhwc-demo.html")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    words = f"the page (default {PAGE})"
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, default=PAGE, help=words)


def run(args: argparse.Namespace) -> int:
    check_outputs(args.output)
    note(f"1. auditing {MODEL}, which torchvision's users believe to support channels last ...")
    model = randomize_batchnorm_(load_model(MODEL))
    x = torch.rand(1, 3, 224, 224)
    before = audit(model, x, convert=True, name=MODEL)
    put(audit_text(before, color=colors()) + "\n")

    note("2. optimizing it for this machine (the first time, kernels are compiled and kept) ...")
    fast = optimize(model, x)
    put(optimize_text(fast.report, MODEL, color=colors()) + "\n")

    note("3. auditing the graph it became ...")
    after = audit(fast.portable, x, convert=True, name=f"{MODEL}, optimized")
    put(audit_text(after, color=colors()) + "\n")

    write_file(args.output, audit_html(before).encode())
    note(f"The first audit as a page: {args.output.resolve()}")
    return 0
