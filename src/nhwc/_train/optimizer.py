"""Optimizer, learning rate and weight average, as the recipe says."""

from __future__ import annotations

import math
from typing import Any

from torch import nn
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
    return SGD(parameters, recipe.lr, momentum=recipe.momentum, weight_decay=decay, fused=True)


_OF_THE_RECIPE = {"weight_decay", "momentum"}
"""Settings that a run has from its recipe, not from the checkpoint that it goes on from."""


def load_optimizer_(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load `state`, whose tensors are contiguous, and give them the strides of the parameters."""
    own = [dict(group) for group in optimizer.param_groups]
    for group, saved in zip(own, state["param_groups"], strict=True):
        if missing := group.keys() - saved.keys():
            raise ValueError(f"it is of an optimizer without {', '.join(sorted(missing))}.")
    optimizer.load_state_dict(state)
    for group, before in zip(optimizer.param_groups, own, strict=True):
        group |= {name: before[name] for name in _OF_THE_RECIPE & before.keys()}
    restride_state_(optimizer)


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
