"""`nhwc ops [NAME...]`."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._ops import DTYPES, OperatorTable, check_operator, check_rules, difference, load_table, ops
from ..errors import InputError
from ..machine.environment import Environment, usable_device
from ..render.ops_html import ops_html
from ..render.ops_markdown import ops_markdown
from ..render.ops_rules_html import rules_html
from ..render.ops_rules_text import rules_markdown, rules_text
from ..render.ops_text import difference_text, ops_text
from ..zoo.sources import find_object
from .common import add_input, aside, check_alone, colors, parse_shapes
from .outputs import add_output_arguments, check_outputs, chosen_format, write_output
from .progress import ProgressLine

FORMATS = ("text", "json", "html", "markdown")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "names",
        metavar="NAME",
        nargs="*",
        help="an operator: grid_sample, nn.functional.pad, or your own as file.py:function; "
        "all of torch's where none is named",
    )
    words = "operators with such a name, as '*pool*'"
    parser.add_argument("--only", metavar="PATTERN", action="append", default=[], help=words)
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda, cuda:1, ...")
    parser.add_argument(
        "--dtype", action="append", help=f"repeat for several (default: {', '.join(DTYPES)})"
    )
    parser.add_argument("--no-timing", action="store_true", help="check formats and values alone")
    add_input(parser, "shape of an input of your own operator", "2x16x32x32")
    parser.add_argument(
        "--diff", metavar=("OLD", "NEW"), nargs=2, type=Path, help="compare two JSON tables"
    )
    parser.add_argument(
        "--rules",
        action="store_true",
        help="check the rules of memory formats, drawn by -o rules.html; exit 1 if one fails",
    )
    add_output_arguments(parser, FORMATS)


def run(args: argparse.Namespace) -> int:
    check_outputs(args.output, reads=(*args.names, *(args.diff or ())))
    chosen_format(args, FORMATS)  # An ending that asks for another is refused before the work.
    if args.rules:
        check_alone(args, "--rules", "names", "only", "dtype", "input", "diff")
        return _rules(args)
    if args.diff:
        check_alone(args, "--diff", "names", "only", "dtype", "input")
        return _diff(args)
    device = usable_device(args.device)
    own = [name for name in args.names if ":" in name]
    if own and (len(own) < len(args.names) or args.only):
        raise InputError(
            f"{own[0]} is your own operator; torch's are checked in another way. Name one kind."
        )
    if args.input and not own:
        raise InputError(
            "--input goes with an operator of your own, as file.py:function; torch's have their "
            "own samples."
        )
    table = _own(args, own, device) if own else _torchs(args, device)
    write_output(_render(table, args), args.output)
    return 0


def _torchs(args: argparse.Namespace, device: torch.device) -> OperatorTable:
    line, start = ProgressLine(), time.monotonic()

    def show(done: int, total: int, title: str) -> None:
        left = (time.monotonic() - start) / done * (total - done)
        line.update(title, done / total, left)

    try:
        return ops(
            *args.names,
            *args.only,
            device=device,
            dtypes=tuple(dict.fromkeys(args.dtype or DTYPES)),
            timed=not args.no_timing,
            progress=show,
        )
    finally:
        line.clear()


def _own(args: argparse.Namespace, names: list[str], device: torch.device) -> OperatorTable:
    dtypes = tuple(dict.fromkeys(args.dtype or ("float32",)))
    shapes = parse_shapes(args.input or ["2x16x32x32"])
    found = []
    kinds: list[Any] = [getattr(torch, dtype, None) for dtype in dtypes]
    for kind, dtype in zip(kinds, dtypes, strict=True):
        if not isinstance(kind, torch.dtype):
            raise InputError(f"torch has no dtype {dtype!r}. Try float32 or bfloat16.")
    for name in names:
        function, checked = find_object(name), []
        for kind in kinds:
            inputs = [_numbers(shape, kind).to(device) for shape in shapes]
            with aside():
                timed = not args.no_timing
                checked.append(check_operator(function, *inputs, name=name, timed=timed))
        rows = tuple(row for one in checked for row in one.rows)
        speeds = tuple(speed for one in checked for speed in one.speeds)
        found.append(replace(checked[0], rows=rows, speeds=speeds))
    environment = Environment.here(device).to_dict()
    return OperatorTable(environment, str(device), dtypes, tuple(found))


def _numbers(shape: tuple[int, ...], kind: torch.dtype) -> Tensor:
    """Numbers from 0 to 1, or whole ones: made of the former they would all be 0."""
    if kind.is_floating_point or kind.is_complex:
        return torch.rand(shape).to(kind)
    return torch.randint(0, 10, shape).to(kind)


def _render(table: OperatorTable, args: argparse.Namespace) -> str:
    format = chosen_format(args, FORMATS)
    if format == "json":
        return table.to_json()
    if format == "html":
        return ops_html(table)
    if format == "markdown":
        return ops_markdown(table)
    return ops_text(table, color=args.output is None and colors())


def _diff(args: argparse.Namespace) -> int:
    old, new = (load_table(path) for path in args.diff)
    found = difference(old, new)
    format = chosen_format(args, FORMATS)
    if format == "json":
        data = {"schema": 1, "changes": [change.to_dict() for change in found]}
        text = json.dumps(data, indent=1) + "\n"
    elif format == "text":
        text = difference_text(found, color=args.output is None and colors())
    else:
        raise InputError(f"--diff has no format {format}. Use text or json.")
    write_output(text, args.output)
    return 0


def _rules(args: argparse.Namespace) -> int:
    device = usable_device(args.device)
    found = check_rules(device)
    format = chosen_format(args, FORMATS)
    if format == "json":
        data = {"schema": 1, "rules": [rule.to_dict() for rule in found]}
        text = json.dumps(data, indent=1) + "\n"
    elif format == "html":
        text = rules_html(found, Environment.here(device))
    elif format == "markdown":
        text = rules_markdown(found)
    else:
        text = rules_text(found, color=args.output is None and colors())
    write_output(text, args.output)
    return 0 if all(rule.passed is not False for rule in found) else 1
