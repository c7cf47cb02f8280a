"""Checkpoints: written whole or not at all, readable anywhere, enough to resume exactly."""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import FileError, InputError, is_out_of_memory
from ..formats import Format, to_format
from ..machine.disk import open_file, put_file, why_not
from ..machine.documents import misfits
from ..shown import shown
from .progress import Point

SCHEMA = 1

NEEDED = {
    **dict.fromkeys(("state_dict", "optimizer", "scaler", "meter"), dict[str, Any]),
    "order": dict[str, int],
    "average": dict[str, Any] | None,
    "epoch": int,
    "batch": int,
    "points": list,
}


def save_checkpoint(path: str | Path, content: dict[str, Any]) -> None:
    """Write `content` with contiguous tensors on the CPU, whole or not at all."""
    path = Path(path)
    buffer = io.BytesIO()
    torch.save(portable({"schema": SCHEMA, **content}), buffer)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        put_file(path, [buffer.getvalue()])
    except (OSError, ValueError) as error:
        raise InputError(f"cannot write {path}: {why_not(error)}") from error


def load_checkpoint(path: str | Path) -> dict[str, Any]:
    """Read what `save_checkpoint` wrote: only tensors and plain containers, never code."""
    try:
        with open_file(path) as file:
            data = io.BytesIO(file.read())
    except (OSError, ValueError) as error:
        raise InputError(f"cannot read checkpoint {path}: {why_not(error)}") from None
    try:
        content = torch.load(data, map_location="cpu", weights_only=True)
    except Exception as error:  # A damaged pickle may raise anything.
        if is_out_of_memory(error):
            raise
        raise FileError(
            f"{path} is no checkpoint: damaged, or not written by nhwc train. Use another one."
        ) from error
    if not isinstance(content, dict) or not set(NEEDED) <= set(content):
        raise FileError(
            f"{path} is no checkpoint of nhwc train. If it holds weights alone, pass them as "
            "--weights."
        )
    schema = content.get("schema")
    if type(schema) is not int or schema != SCHEMA:
        raise FileError(
            f"{path} is a checkpoint of schema {shown(repr(schema)[:60])}, where this nhwc reads "
            f"{SCHEMA}. Install the nhwc that wrote it."
        )
    for wrong in _misfits(content):
        raise FileError(f"{path} is a damaged checkpoint: {wrong}. Use another one.")
    return content


def _misfits(content: dict[str, Any]) -> Iterator[str]:
    """Say what in a checkpoint is of another type than training wrote."""
    for name, kind in NEEDED.items():
        yield from misfits(content[name], kind, name)
    for name in ("epoch", "batch"):
        if not isinstance(content[name], int) or content[name] < 0:
            yield f"{name} is {shown(repr(content[name])[:60])}, no count"
    try:
        [Point(**point) for point in content["points"]]
    except TypeError as error:
        yield shown(error)


def portable(value: Any) -> Any:
    """Copy nested containers, each tensor contiguous and on the CPU.

    The strides of size-1 dimensions are reset, too: a 1x1 weight must not look channels last to
    the program that reads it.

    >>> weight = torch.empty(8, 4, 1, 1).to(memory_format=torch.channels_last)
    >>> weight.stride(), portable({"weight": weight})["weight"].stride()
    ((4, 1, 4, 4), (4, 1, 1, 1))
    """
    if isinstance(value, Tensor):
        return to_format(value.detach().cpu(), Format.CONTIGUOUS)
    if isinstance(value, OrderedDict):
        return _with_versions(((key, portable(item)) for key, item in value.items()), value)
    if isinstance(value, dict):
        return {key: portable(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(portable(item) for item in value)
    if isinstance(value, np.generic):
        return value.item()
    if type(value) not in _PLAIN:
        raise InputError(
            f"a checkpoint cannot hold the {type(value).__name__} in the state of the model: to "
            "load it takes its own code. Let get_extra_state return tensors, numbers and text."
        )
    return value


_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device)


def evaluation_weights(content: dict[str, Any]) -> dict[str, Tensor]:
    """The weights that training itself evaluates: the running average where there is one."""
    average = content["average"]
    weights: dict[str, Tensor] = content["state_dict"]
    if average is None:
        return weights
    prefix = "module."
    own = ((name, value) for name, value in average.items() if name.startswith(prefix))
    return _with_versions(((name.removeprefix(prefix), value) for name, value in own), weights)


def _with_versions(items: Iterable[tuple[str, Any]], like: dict[str, Any]) -> dict[str, Any]:
    """A state dict of these items, whose modules are of the versions that `like` has."""
    made: Any = OrderedDict(items)
    if hasattr(like, "_metadata"):
        made._metadata = like._metadata
    return made  # type: ignore[no-any-return]
