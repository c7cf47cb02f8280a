"""What the verbs' command lines share: models, inputs, output files, progress."""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from ..disk import replace_file
from ..errors import InputError
from ..render.text import to_show
from ..zoo import load_model


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL, --input, --weights, --device, --seed."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="resnet50, timm:NAME, package.module:callable, file.py:callable, or a saved file",
    )
    parser.add_argument(
        "--input",
        metavar="NxCxHxW",
        action="append",
        help="shape of the input (default 1x3x224x224); repeat it for the inputs after the first, "
        "which may have any number of dimensions",
    )
    parser.add_argument("--weights", metavar="FILE", help="a state dict; random weights otherwise")
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda, cuda:1, ...")
    parser.add_argument("--seed", type=int, default=0, help="of weights and inputs (default 0)")


def add_output_arguments(parser: argparse.ArgumentParser, formats: tuple[str, ...]) -> None:
    """--format and -o; the format follows the file's ending where it is not said."""
    parser.add_argument("--format", choices=formats, help=f"default: {formats[0]}")
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="write here, not stdout")


def chosen_format(args: argparse.Namespace, formats: tuple[str, ...]) -> str:
    if args.format:
        return str(args.format)
    ending = args.output.suffix.lstrip(".") if args.output else ""
    ending = {"htm": "html", "txt": "text", "md": "markdown"}.get(ending, ending)
    return ending if ending in formats else formats[0]


def build(args: argparse.Namespace) -> tuple[nn.Module, list[Tensor]]:
    """Build the model and random inputs that the command line names, on its device."""
    device = parse_device(args.device)
    first, *others = args.input or ["1x3x224x224"]
    shapes = [parse_shape(first), *map(parse_sizes, others)]
    model = load_model(args.model, weights=args.weights, seed=args.seed).to(device)
    generator = torch.Generator().manual_seed(args.seed)
    return model, [torch.randn(shape, generator=generator).to(device) for shape in shapes]


def parse_shape(text: str) -> tuple[int, ...]:
    """Read the shape of an image, or of a clip.

    >>> parse_shape("8x3x224x224")
    (8, 3, 224, 224)
    """
    shape = parse_sizes(text)
    if len(shape) not in (4, 5):
        raise InputError(
            f"input {text} has {len(shape)} dimensions; a vision model needs 4 (N, C, H, W), "
            "or 5 (N, C, D, H, W). Try --input 1x3x224x224."
        )
    return shape


def parse_sizes(text: str) -> tuple[int, ...]:
    """Read the shape of any tensor.

    >>> parse_sizes("16")
    (16,)
    """
    if not re.fullmatch(r"\d+([x,]\d+)*", text):
        raise InputError(f"input {text!r} is no shape. Try --input 1x3x224x224.")
    sizes = tuple(int(part) for part in re.split("[x,]", text))
    if 0 in sizes:
        raise InputError(f"input {text} is empty: a dimension is 0. Try --input 1x3x224x224.")
    return sizes


def parse_device(text: str) -> torch.device:
    try:
        device = torch.device(text)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"device {text!r} is not usable here: {reason}") from error
    return device


def write_output(text: str, path: Path | None) -> None:
    """Print `text`, or write it to `path` at once and whole."""
    text = to_show(text)
    if path is None:
        print(text, end="" if text.endswith("\n") else "\n")
        return
    write_file(path, text.encode())
    note(f"wrote {path}")


def write_file(path: Path, data: bytes) -> None:
    """Write to a neighbour and rename it: whoever looks sees the old file or the new one."""
    try:
        replace_file(path, [data])
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error


def note(text: str) -> None:
    """Say something about the work on stderr; stdout is for data."""
    print(to_show(text), file=sys.stderr)


def colors(stream: object = None) -> bool:
    """Whether to colour what goes to `stream` (stdout): a terminal, and NO_COLOR not set."""
    stream = sys.stdout if stream is None else stream
    return not os.environ.get("NO_COLOR") and bool(getattr(stream, "isatty", lambda: False)())
