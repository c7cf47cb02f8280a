"""State dicts from files into models."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from ..errors import InputError, MissingPackage, is_out_of_memory, missing
from ..files.container import is_saved
from ..machine.disk import open_file
from ..shown import misfit, shown
from .archives import is_safetensors, kind_of


def load_weights_(model: nn.Module, path: str | Path) -> nn.Module:
    """Load a state dict from a file into the model."""
    state = read_weights(path)
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if isinstance(state, dict):
        _check_names(state, path)
        _unwrap_(state, model)
        _check_types(state, model, path)
    try:
        model.load_state_dict(state)
    except (RuntimeError, TypeError, AttributeError) as error:
        if is_out_of_memory(error):
            raise
        raise InputError(
            f"{path} does not fit the model: {misfit(error)} Give weights of this very model."
        ) from error
    return model


def read_weights(path: str | Path) -> Any:
    """Read what a file of weights holds: only tensors and plain containers, never code.

    The file is one that `torch.save` wrote, or one of safetensors.
    """
    try:
        return _read_weights(path)
    except FileNotFoundError:
        raise InputError(f"no such weights file: {path}") from None
    except MissingPackage:
        raise
    except Exception as error:  # a damaged file makes the unpickler raise anything
        if is_out_of_memory(error):
            raise
        raise InputError(_why_no_weights(Path(path))) from error


def _check_names(state: dict[Any, Any], path: str | Path) -> None:
    for name in state:
        if not isinstance(name, str):
            raise InputError(
                f"{path} does not fit the model: it has {shown(repr(name))} where a weight has its "
                "name. Give what model.state_dict() returns."
            )


def _check_types(state: dict[str, Any], model: nn.Module, path: str | Path) -> None:
    """Refuse what a cast would spoil: torch takes the real part, and the codes of 8 bits."""
    for name, own in model.state_dict().items():
        given = state.get(name)
        if not isinstance(given, Tensor) or not isinstance(own, Tensor):
            continue
        coded = given.itemsize == 1 and not given.is_floating_point()
        if own.is_floating_point() and (coded or given.is_complex()):
            raise InputError(
                f"{path} does not fit the model: {shown(name)} is {given.dtype} there and "
                f"{own.dtype} in the model. Give weights of this very model, cast as you mean it."
            )


def _unwrap_(state: dict[str, Any], model: nn.Module) -> None:
    """Drop what DistributedDataParallel and torch.compile write before the names of weights."""
    for wrapper in ("module", "_orig_mod", "module"):  # Either may wrap the other.
        all_wrapped = all(str(name).startswith(f"{wrapper}.") for name in state)
        if all_wrapped and not hasattr(model, wrapper):
            consume_prefix_in_state_dict_if_present(state, f"{wrapper}.")


def _read_weights(path: str | Path) -> Any:
    open_file(path).close()  # Whoever opens a pipe waits for its writer.
    if not is_safetensors(path):
        with warnings.catch_warnings():
            # Torch warns of a TorchScript archive, which it then refuses.
            warnings.simplefilter("ignore")
            return torch.load(path, map_location="cpu", weights_only=True)
    try:
        from safetensors.torch import load_file
    except ModuleNotFoundError:
        raise missing("safetensors", "zoo") from None
    return load_file(path)


def _why_no_weights(path: Path) -> str:
    if path.is_dir():
        return f"{path} is a folder. Name the file of weights in it."
    if is_saved(path):
        return f"{path} is a model with its weights, saved by nhwc. Name it in place of the model."
    kind = kind_of(path)
    if is_safetensors(path) or path.suffix == ".safetensors":
        return f"{path} is a damaged file of safetensors. Copy it again."
    what = f" ({kind.what})" if kind.is_known else ""
    return (
        f"{path} is no file of plain tensors{what}. "
        "Save it with torch.save(model.state_dict(), ...)."
    )
