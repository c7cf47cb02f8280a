"""`nhwc demo`: the main job on a default model, in half a minute."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from .._audit import audit
from ..render.audit_html import audit_html
from ..render.audit_text import audit_text
from ..zoo import load_model
from .common import colors, note, write_file

MODEL = "shufflenet_v2_x1_0"
PAGE = Path("nhwc-demo.html")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, default=PAGE)


def run(args: argparse.Namespace) -> int:
    note(f"auditing {MODEL}, which torchvision lists as fully supporting channels last ...")
    model = load_model(MODEL)
    report = audit(model, torch.rand(2, 3, 224, 224), convert=True, name=MODEL)
    print(audit_text(report, color=colors()))
    write_file(args.output, audit_html(report).encode())
    note(f"The same as a page: {args.output.resolve()}")
    return 0
