"""Optimizer, learning rate and weight average, as the recipe says."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ..errors import InputError
from ..formats.optimizers import restride_state_
from .recipe import Recipe


def build_optimizer(model: nn.Module, recipe: Recipe) -> Optimizer:
    """SGD with momentum or AdamW, fused: one kernel walks over all parameters."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise InputError("the model has no parameters to train. Set requires_grad on some.")
    decay = recipe.weight_decay
    if recipe.optimizer == "adamw":
        return AdamW(parameters, recipe.lr, weight_decay=decay, fused=True)
    sgd = SGD(parameters, recipe.lr, momentum=recipe.momentum, weight_decay=decay, fused=True)
    _begin_momentum_(sgd)
    return sgd


def _begin_momentum_(optimizer: Optimizer) -> None:
    """Begin each momentum at zero, which is no other than torch's beginning at the first gradient.

    Torch's fused kernel takes momenta of all weights or of none; in a mixture of experts some get
    their first gradient in a later step.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("momentum") else ():
            if optimizer.state[parameter].get("momentum_buffer") is None:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def load_optimizer_(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load what `state` remembers of each parameter, with the strides of that parameter.

    All settings are those of the recipe. What does not fit a parameter is refused: torch's fused
    kernels would read and write past its end.
    """
    own = [dict(group) for group in optimizer.param_groups]
    for group, saved in zip(own, state["param_groups"], strict=True):
        if missing := group.keys() - saved.keys():
            raise ValueError(f"it is of an optimizer without {', '.join(sorted(missing))}.")
    optimizer.load_state_dict(state)
    for group, before in zip(optimizer.param_groups, own, strict=True):
        group |= {name: value for name, value in before.items() if name != "params"}
    names = _OF_ADAMW if isinstance(optimizer, AdamW) else {"momentum_buffer"}
    for weight, remembered in optimizer.state.items():
        if misfit := _misfit(weight, remembered, names):
            raise ValueError(f"what it remembers of a weight does not fit: {misfit}.")
    restride_state_(optimizer)
    _begin_momentum_(optimizer)


_OF_ADAMW = {"step", "exp_avg", "exp_avg_sq"}


def _misfit(weight: Any, remembered: Any, names: set[str]) -> str:
    """Say what the kernels of an optimizer, which keeps tensors of these names, could not use."""
    if not isinstance(weight, Tensor):
        return "the model has no such weight"
    if not isinstance(remembered, dict) or remembered.keys() not in (set(), names):
        return f"it is no {', '.join(sorted(names))}"
    for name, value in remembered.items():
        if value is None and name == "momentum_buffer":
            continue
        # Loading has given all but the count of steps the type of the weight.
        like = torch.zeros(()) if name == "step" else weight
        dense = isinstance(value, Tensor) and value.layout is torch.strided
        if not dense or (value.shape, value.dtype) != (like.shape, like.dtype):
            return str(name)
    return ""


def learning_rate(update: int, updates: int, recipe: Recipe) -> float:
    """The rate of one update out of `updates`: a straight climb, then a cosine to zero.

    >>> [round(learning_rate(n, 4, Recipe(epochs=2, lr=1.0, warmup_epochs=1)), 2) for n in range(4)]
    [0.5, 1.0, 1.0, 0.5]
    """
    warmup = round(updates * recipe.warmup_epochs / recipe.epochs)
    if update < warmup:
        return recipe.lr * (update + 1) / warmup
    if update >= updates:
        return 0.0
    return recipe.lr * (1 + math.cos(math.pi * (update - warmup) / (updates - warmup))) / 2


def running_average(model: nn.Module, recipe: Recipe) -> AveragedModel | None:
    """A copy of `model` that follows its weights slowly, if the recipe has `ema`."""
    if recipe.ema is None:
        return None
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(recipe.ema))
