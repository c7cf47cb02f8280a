"""`nhwc audit MODEL`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

from .. import __version__
from .._audit import audit
from .._audit.baseline import Baseline, known_by, load_baseline
from .._audit.locations import named_from, repository_root
from .._audit.review import Review, review
from ..errors import InputError
from ..render.audit_github import audit_github
from ..render.audit_html import audit_html
from ..render.audit_junit import audit_junit
from ..render.audit_review import baseline_text, counted
from ..render.audit_sarif import audit_sarif
from ..render.audit_text import audit_text
from ..zoo.definitions import definition_of
from .common import add_model_arguments, aside, build, colors
from .outputs import (
    add_output_arguments,
    as_bytes,
    check_outputs,
    chosen_format,
    write_file,
    write_output,
)
from .progress import note

_RENDERED: dict[str, Callable[[Review], str]] = {
    "json": lambda reviewed: json.dumps(reviewed.to_dict(), indent=1) + "\n",
    "html": lambda reviewed: audit_html(reviewed.audit),
    "github": audit_github,
    "sarif": lambda reviewed: audit_sarif(reviewed, __version__),
    "junit": audit_junit,
}
FORMATS = ("text", *_RENDERED)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--backward", action="store_true", help="audit the backward pass too")
    parser.add_argument(
        "--compare",
        action="store_true",
        help="time both formats in turns, and find the first operator whose values differ",
    )
    parser.add_argument(
        "--fail-on",
        choices=("lost", "copies", "slower"),
        action="append",
        default=[],
        help="exit 1 if the format is lost, if data is copied between formats, or if channels "
        "last is slower than contiguous",
    )
    parser.add_argument(
        "--baseline",
        metavar="FILE",
        type=Path,
        help="findings that are known, which do not fail: only new ones do",
    )
    parser.add_argument(
        "--update-baseline",
        action="store_true",
        help="write what is found now into --baseline FILE, which then knows it",
    )
    add_output_arguments(parser, FORMATS)


def run(args: argparse.Namespace) -> int:
    format = chosen_format(args, FORMATS)
    before = _baseline(args)
    model, inputs = build(args)
    with aside():
        result = audit(
            model,
            *inputs,
            backward=args.backward,
            convert=True,
            reorders=True,
            compare=args.compare or "slower" in args.fail_on,
            name=args.model,
        )
    root = repository_root(Path.cwd())
    baseline = before
    if before is not None and args.update_baseline:
        found = (known_by(finding, result.model, root) for finding in result.findings)
        baseline = before.updated(named_from(root, result.model), found)
    reviewed = review(
        result,
        root,
        fail_on=args.fail_on,
        baseline=baseline,
        baseline_name=str(args.baseline or ""),
        definition=definition_of(args.model),
    )
    write_output(render(reviewed, format, args.output), args.output)
    if baseline is not None and args.update_baseline:
        write_file(args.baseline, as_bytes(baseline.to_json()))
        note(f"wrote {args.baseline}")
    elif baseline is not None and format in ("html", "sarif", "junit"):
        note(f"baseline {args.baseline}: {counted(reviewed)}")
    return 1 if reviewed.failed else 0


def _baseline(args: argparse.Namespace) -> Baseline | None:
    """The baseline that the command line names, after a look at all files that it names."""
    reads = (args.model, args.weights)
    if args.baseline is None:
        if args.update_baseline:
            raise InputError("--update-baseline needs the file to write. Add --baseline FILE.")
        check_outputs(args.output, reads=reads)
        return None
    if args.update_baseline:
        check_outputs(args.output, args.baseline, reads=reads)
        return load_baseline(args.baseline) if args.baseline.exists() else Baseline()
    check_outputs(args.output, reads=(*reads, args.baseline))
    return load_baseline(args.baseline)


def render(reviewed: Review, format: str, path: Path | None) -> str:
    if format in _RENDERED:
        return _RENDERED[format](reviewed)
    color = path is None and colors()
    text = audit_text(reviewed.audit, color=color)
    return f"{text}\n{baseline_text(reviewed, color=color)}" if reviewed.baseline else text
