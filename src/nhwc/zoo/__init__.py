"""From a name to a model: torchvision, timm, MONAI, `package:callable`, `file.py:callable`."""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import nn
from torch.export import ExportedProgram

from ..errors import InputError, NhwcError, is_out_of_memory
from ..models.kinds import module_of
from ..models.preserve import seed_generators, undrawn
from ..models.vision import import_torchvision as import_torchvision
from .drawn import inputs_for as inputs_for
from .drawn import randomize_batchnorm_ as randomize_batchnorm_
from .drawn import randomize_constants_ as randomize_constants_
from .sources import find_builder, said
from .weights import load_weights_ as load_weights_


def load_model(
    name: str | Path,
    *,
    weights: str | Path | None = None,
    seed: int = 0,
    classes: int | None = None,
) -> nn.Module:
    """Build the model called `name`, in eval mode, with random weights unless `weights` is a file.

    The name is `resnet50` or `torchvision:resnet50`, `timm:NAME`, `monai:UNet`,
    `package.module:callable` or `file.py:callable`, whose callable takes no arguments and returns
    the model, or a file that `nhwc.save` wrote. `classes` is for a callable that takes
    `num_classes`, as torchvision's and timm's do.

    >>> sum(p.numel() for p in load_model("squeezenet1_1").parameters())
    1235496
    """
    if not isinstance(name, (str, os.PathLike)):
        raise InputError(
            f"{name!r:.80} is no name of a model. Give one: nhwc.load_model('resnet18')."
        )
    return _loaded(os.fspath(name), weights, seed, classes, asked=classes is not None)


def load_model_for(
    name: str, classes: int, *, weights: str | Path | None = None, seed: int = 0
) -> nn.Module:
    """As `load_model`; a callable that takes no `num_classes` is left to know its outputs."""
    return _loaded(name, weights, seed, classes, asked=False)


def _loaded(
    name: str, weights: str | Path | None, seed: int, classes: int | None, *, asked: bool
) -> nn.Module:
    # stdout is for our data, so what packages, files and models print goes to stderr.
    with contextlib.redirect_stdout(sys.stderr):
        builder = find_builder(name)
    if _takes(builder, "num_classes"):
        builder = partial(builder, num_classes=classes) if classes is not None else builder
    elif asked:
        raise InputError(
            f"{name} takes no num_classes: it decides itself how many outputs it has, and "
            f"{classes} classes cannot be asked of it. Leave them out, or let it take num_classes."
        )
    with undrawn():
        seed_generators(seed)
        made = _built(name, builder)
    if not isinstance(made, (nn.Module, ExportedProgram)):
        if inspect.iscoroutine(made):
            made.close()  # else Python adds, in lines of its own, that nobody awaited it
        raise InputError(
            f"{name} returned {type(made).__name__}, not a torch.nn.Module. "
            "Name a callable that takes no arguments and returns the model."
        )
    model = module_of(made, "load")
    if weights is not None:
        load_weights_(model, weights)
    return model.eval()


def _built(name: str, builder: Callable[..., object]) -> object:
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return builder()
    except NhwcError:
        raise
    except (Exception, SystemExit) as error:  # whatever a user's code raises
        if is_out_of_memory(error):
            raise
        raise InputError(
            f"{name} raised {said(error, name.rpartition(':')[0])}. "
            "Name a callable that takes no arguments and returns the model."
        ) from error


def _takes(builder: Callable[..., object], name: str) -> bool:
    try:
        parameters = inspect.signature(builder).parameters
    except ValueError:  # Some that are written in C have none.
        return False
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
