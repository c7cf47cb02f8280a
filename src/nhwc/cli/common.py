"""Parts that the verbs' command lines share: models, inputs, devices, colours."""

from __future__ import annotations

import argparse
import contextlib
import math
import re
import sys
from typing import Any

from torch import Tensor, nn

from ..errors import InputError
from ..machine.environment import memory_bytes, usable_device
from ..render.text import plural
from ..shown import is_coloured
from ..zoo import inputs_for, load_model
from .values import SEEDS, whole

MODEL = (
    "resnet50, torchvision:NAME, timm:NAME, monai:NAME, package.module:callable, "
    "file.py:callable, or a saved file"
)


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, --input, --weights, --device and --seed."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help=MODEL,
    )
    add_input(parser, "shape of the input", "1x3x224x224")
    words = "a state dict, of torch.save or safetensors; random weights otherwise"
    parser.add_argument("--weights", metavar="FILE", help=words)
    parser.add_argument("--device", default="cpu", help="cpu (default), cuda, cuda:1, ...")
    add_seed(parser)


def add_input(parser: argparse.ArgumentParser, what: str, default: str) -> None:
    parser.add_argument(
        "--input",
        metavar="NxCxHxW",
        action="append",
        help=f"{what} (default {default}); repeat it for the inputs after the first, which may "
        "have any number of dimensions",
    )


def add_seed(parser: argparse.ArgumentParser) -> None:
    words = "of weights and inputs (default 0)"
    parser.add_argument("--seed", metavar="N", type=whole(0, SEEDS), default=0, help=words)


def build(args: argparse.Namespace) -> tuple[nn.Module, list[Tensor]]:
    """Build the model and random inputs that the command line names, on its device."""
    device = usable_device(args.device)
    shapes = parse_shapes(args.input or ["1x3x224x224"])
    model = load_model(args.model, weights=args.weights, seed=args.seed).to(device)
    return model, [x.to(device) for x in inputs_for(model, shapes, args.seed)]


def aside() -> contextlib.redirect_stdout[Any]:
    """What a model's code prints while it runs goes to stderr: stdout is for our data."""
    return contextlib.redirect_stdout(sys.stderr)


def parse_shapes(texts: list[str]) -> list[tuple[int, ...]]:
    """Read the shape of an image, and those of the inputs after it.

    >>> parse_shapes(["8x3x224x224", "8x16"])
    [(8, 3, 224, 224), (8, 16)]
    """
    first, *others = texts
    return [parse_shape(first), *map(parse_sizes, others)]


def parse_shape(text: str) -> tuple[int, ...]:
    """Read the shape of an image, or of a clip.

    >>> parse_shape("8x3x224x224")
    (8, 3, 224, 224)
    """
    shape = parse_sizes(text)
    if len(shape) not in (4, 5):
        raise InputError(
            f"input {text} has {plural(len(shape), 'dimension')}; a vision model needs 4 "
            "(N, C, H, W), or 5 (N, C, D, H, W). Try --input 1x3x224x224."
        )
    return shape


def parse_sizes(text: str) -> tuple[int, ...]:
    """Read the shape of any tensor.

    >>> parse_sizes("16")
    (16,)
    """
    if not re.fullmatch(r"\d{1,30}([x,]\d{1,30}){0,30}", text):
        raise InputError(f"input {text[:60]!r} is no shape. Try --input 1x3x224x224.")
    sizes = tuple(int(part) for part in re.split("[x,]", text))
    if 0 in sizes:
        raise InputError(f"input {text} is empty: a dimension is 0. Try --input 1x3x224x224.")
    check_fits(sizes, "input")
    return sizes


def check_fits(shape: tuple[int, ...], what: str) -> None:
    """Refuse a shape whose floats this machine could never hold, before anything is tried."""
    size, most = 4 * math.prod(shape), memory_bytes()
    if size > most:
        raise InputError(
            f"{what} {'x'.join(map(str, shape))} takes {size / 1e9:.3g} GB, and this machine has "
            f"{most / 1e9:.3g} GB of memory. Use a smaller one."
        )


def check_alone(args: argparse.Namespace, option: str, *others: str) -> None:
    """Refuse what means nothing beside `option`: words of the command line, and options."""
    for other in others:
        given = getattr(args, other)
        if given:
            said = " ".join(given) if other in ("names", "models") else f"--{other}"
            raise InputError(f"{said} does not go with {option}. Leave one of them out.")


def colors() -> bool:
    """Whether to colour what is printed."""
    return is_coloured(sys.stdout)
