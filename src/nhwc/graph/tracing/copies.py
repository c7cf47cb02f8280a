"""Copies of models that share nothing with them."""

from __future__ import annotations

import copy
from typing import Any

from torch import fx, nn

from ...errors import InputError, is_out_of_memory
from ...machine.host_memory import apart
from ...models.preserve import copy_as_is
from ...models.trees import tensors_of


def check_copies(model: nn.Module) -> None:
    """Refuse a model with a part that returns itself as its copy: changes would reach the model."""
    for name, part in model.named_modules():
        if isinstance(part, fx.GraphModule) or not hasattr(type(part), "__deepcopy__"):
            continue
        try:
            same = copy.deepcopy(part) is part
        except Exception:  # `own_copy` reports this when it copies the whole model.
            continue
        if same:
            raise InputError(
                f"cannot copy {name or 'the model'}: the __deepcopy__ of {type(part).__name__} "
                "returns the module itself. Let it return a copy."
            )


def own_copy(model: nn.Module) -> nn.Module:
    """Make a deep copy that shares nothing with `model`, even if it holds results of autograd."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        if type(parameter) is nn.Parameter:
            copied = apart(parameter.detach())
            memo[id(parameter)] = nn.Parameter(copied, parameter.requires_grad)
    for module in model.modules():
        # Code may keep results in a list or a dict: a table of positions, say.
        for value in tensors_of(vars(module)):
            if value.requires_grad and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
    try:
        return copy_as_is(model, memo)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise InputError(
            f"cannot copy the {type(model).__name__}: {str(error).rstrip('.')}. "
            "Take what copy.deepcopy refuses off the model first."
        ) from error
