"""`nhwc audit MODEL`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from .._audit import Audit, audit
from ..render.audit_html import audit_html
from ..render.audit_text import audit_text
from .common import add_model_arguments, build, colors
from .outputs import add_output_arguments, check_outputs, chosen_format, write_output

FORMATS = ("text", "json", "html")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--backward", action="store_true", help="audit the backward pass too")
    parser.add_argument("--compare", action="store_true", help="time both formats in turns")
    parser.add_argument(
        "--fail-on",
        choices=("lost", "copies", "slower"),
        action="append",
        default=[],
        help="exit 1 if the format is lost, if data is copied between formats, or if channels "
        "last is slower than contiguous",
    )
    add_output_arguments(parser, FORMATS)


def run(args: argparse.Namespace) -> int:
    check_outputs(args.output, reads=(args.model, args.weights))
    model, inputs = build(args)
    result = audit(
        model,
        *inputs,
        backward=args.backward,
        convert=True,
        reorders=True,
        compare=args.compare or "slower" in args.fail_on,
        name=args.model,
    )
    write_output(render(result, chosen_format(args, FORMATS), args.output), args.output)
    return 1 if any(failed(result, what) for what in args.fail_on) else 0


def render(result: Audit, format: str, path: Path | None) -> str:
    if format == "json":
        return json.dumps(result.to_dict(), indent=1) + "\n"
    if format == "html":
        return audit_html(result)
    return audit_text(result, color=path is None and colors())


def failed(result: Audit, what: str) -> bool:
    if what == "lost":
        return bool(result.lost)
    if what == "copies":
        return bool(result.copies)
    return result.comparison is not None and result.comparison.verdict == "slower"
