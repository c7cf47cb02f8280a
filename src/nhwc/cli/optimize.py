"""`nhwc optimize MODEL`."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

from torch import Tensor, nn

from .._audit import audit
from .._optimize import optimize
from .._optimize.inner import unplanned
from .._optimize.report import OptimizeReport
from ..errors import InputError, NhwcError
from ..files import save
from ..optimized import Optimized
from ..render.optimize_html import optimize_html
from ..render.optimize_text import optimize_text
from ..shown import obeys, printable
from .common import add_model_arguments, aside, build, colors, parse_shapes
from .outputs import as_bytes, check_outputs, write_file, write_output
from .progress import note, say

FORMATS = ("text", "json", "html")
_REPORTS = {
    **dict.fromkeys((".html", ".htm"), "--report {}"),
    ".json": "--format json > {}",
    ".txt": "--format text > {}",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("-o", "--output", metavar="FILE.nhwc", type=Path, help="save the model")
    parser.add_argument("--report", metavar="FILE.html", type=Path, help="what was done, as a page")
    words = "plan this shape too; where --input is repeated, repeat it as often for each plan"
    parser.add_argument("--also", metavar="NxCxHxW", action="append", default=[], help=words)
    words = "none of Winograd's kernels, which round otherwise, nor others that spread infinity"
    parser.add_argument("--exact", action="store_true", help=words)
    parser.add_argument(
        "--remeasure", action="store_true", help="forget what earlier runs measured of this model"
    )
    parser.add_argument("--format", choices=FORMATS, default="text", help="default: text")


def run(args: argparse.Namespace) -> int:
    _check_names(args.output, args.report)
    check_outputs(args.output, args.report, reads=(args.model, args.weights))
    count = len(args.input or ("the default",))
    if len(args.also) % count:
        raise InputError(
            f"--input is given {count} times and --also {len(args.also)}. "
            "Give --also once for each input of a plan, in the order of --input."
        )
    starts = range(0, len(args.also), count)
    shapes = [parse_shapes(args.also[start : start + count]) for start in starts]
    model, inputs = build(args)
    also = [
        [given.new_empty(shape).normal_() for given, shape in zip(inputs, plan, strict=True)]
        for plan in shapes
    ]
    with _Line() as line, aside():
        fast = optimize(
            model,
            *inputs,
            exact=args.exact,
            also=also,
            remeasure=args.remeasure,
            progress=line.show,
        )
    # Save the model first, so that a report that cannot be written does not lose it.
    try:
        if args.output is not None:
            save(fast, args.output)
            note(f"wrote {args.output}")
    except NhwcError:
        # A model that cannot be saved is optimized all the same, so show its report.
        _report(args, model, fast, inputs)
        raise
    _report(args, model, fast, inputs)
    return 0


def _check_names(model: Path | None, page: Path | None) -> None:
    """Refuse to save the model or the page under the name of what other options ask for."""
    if model is not None and model.suffix.lower() in _REPORTS:
        instead = _REPORTS[model.suffix.lower()].format(model)
        raise InputError(
            f"-o {model} would save the model under the name of a report. "
            f"For the report use {instead}; for the model -o FILE.nhwc."
        )
    if page is not None and page.suffix.lower() in (".json", ".txt"):
        instead = _REPORTS[page.suffix.lower()].format(page)
        raise InputError(
            f"--report {page} would be a page of HTML. Name it .html, or use {instead}."
        )


def _report(
    args: argparse.Namespace, model: nn.Module, fast: Optimized, inputs: list[Tensor]
) -> None:
    report: OptimizeReport = fast.report
    audits = None
    if args.report is not None or args.format == "html":
        with _Line() as line, aside():
            audits = _audits(args.model, model, fast, inputs, line)
    if args.format == "html":
        write_output(optimize_html(report, args.model, audits), None)
    elif args.format == "json":
        write_output(json.dumps({**report.to_dict(), "model": args.model}, indent=1), None)
    else:
        write_output(optimize_text(report, args.model, color=colors()), None)
    if args.report is not None:
        write_file(args.report, as_bytes(optimize_html(report, args.model, audits)))
        note(f"wrote {args.report}")


def _audits(
    name: str, model: nn.Module, fast: Optimized, inputs: list[Tensor], line: _Line
) -> dict[str, dict[str, object]]:
    """Audit the model before and after the passes; return both audits as plain values."""
    line.show("auditing before and after")
    stages = {"before": model, "after": unplanned(fast)}
    return {
        stage: audit(module, *inputs, convert=True, name=name).to_dict()
        for stage, module in stages.items()
    }


class _Line:
    """One line on stderr that says what is being done; nothing where stderr is no terminal."""

    def __init__(self) -> None:
        self._live = obeys(sys.stderr)

    def __enter__(self) -> _Line:
        return self

    def show(self, text: str) -> None:
        if self._live:
            wide = shutil.get_terminal_size().columns - 1
            say(f"\r\033[K{printable(text, keep='')[:wide]}")

    def __exit__(self, *_: object) -> None:
        self.show("")
