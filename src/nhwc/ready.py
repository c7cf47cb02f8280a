"""Whether a model can be run at all: its parameters have shapes, values and one device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from .errors import InputError


def check_initialized(model: nn.Module) -> None:
    """Refuse a lazy model that has not been run yet: running it would change it."""
    lazy = [name for name, p in (*model.named_parameters(), *model.named_buffers()) if is_lazy(p)]
    if lazy:
        raise InputError(
            f"{some(lazy)} of {type(model).__name__} has no shape yet: the module is lazy. "
            "Run the model once on an example input first."
        )


def check_devices(model: nn.Module, tensors: Sequence[Tensor]) -> None:
    """Refuse what is on the meta device, and inputs that are elsewhere than the model."""
    own = {t.device for t in (*model.parameters(), *model.buffers())}
    if torch.device("meta") in own or any(t.is_meta for t in tensors):
        raise InputError(
            "the model or its input is on the meta device, where nothing is computed. "
            "Materialise it: model.to_empty(device='cpu')."
        )
    if len(own) == 1 and not all(t.device in own for t in tensors):
        where, other = next(iter(own)), tensors[0].device
        raise InputError(
            f"the model is on {where}, the input on {other}. Move one: input.to({str(where)!r})."
        )


def tensors_of(tree: object) -> list[Tensor]:
    """Every tensor in nested lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def versions_of(tree: object) -> list[int]:
    """How often each tensor in it was written to, where torch counts that."""
    return [tensor._version for tensor in tensors_of(tree) if not tensor.is_inference()]


def some(names: list[str]) -> str:
    """The first two of many names, and how many more there are."""
    shown = ", ".join(name or "the model" for name in names[:2])
    return shown + (f" and {len(names) - 2} more" if len(names) > 2 else "")
