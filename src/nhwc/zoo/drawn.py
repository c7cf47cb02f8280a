"""Random statistics and weights: folding the defaults of a fresh model is trivial."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy


def inputs_for(model: nn.Module, shapes: Iterable[Sequence[int]], seed: int) -> list[Tensor]:
    """Random inputs of the type that the model's weights begin with: half ones take no others.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).half()
    >>> [one.dtype for one in inputs_for(net, [(1, 3, 8, 8)], 0)]
    [torch.float16]
    """
    types = (weight.dtype for weight in model.parameters() if weight.is_floating_point())
    dtype = next(types, torch.float32)
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(tuple(shape), generator=generator).to(dtype) for shape in shapes]


def randomize_batchnorm_(
    model: nn.Module, seed: int = 0, *, inputs: Sequence[Any] = ()
) -> nn.Module:
    """Give every batch norm random statistics and weights: folding the defaults is trivial.

    With `inputs` the statistics are near those of a run on them, as training leaves them. Others
    let numbers grow from layer to layer, until gates are switches and every answer is chance.

    >>> net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).eval()
    >>> _ = nn.init.constant_(net[0].weight, 1e6)
    >>> image = torch.rand(1, 3, 8, 8)
    >>> bool((randomize_batchnorm_(net, inputs=[image])(image).abs() < 10).all())
    True
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(like: Tensor, low: float, high: float) -> Tensor:
        drawn = torch.empty(like.shape, device="cpu")
        return drawn.uniform_(low, high, generator=generator).to(like)

    with torch.no_grad():
        for module in model.modules():
            if not isinstance(module, _BatchNorm):
                continue
            if module.running_mean is not None and module.running_var is not None:
                module.running_mean.copy_(uniform(module.running_mean, -0.2, 0.2))
                module.running_var.copy_(uniform(module.running_var, 0.6, 1.4))
            if module.weight is not None:
                module.weight.copy_(uniform(module.weight, 0.6, 1.4))
            if module.bias is not None:
                module.bias.copy_(uniform(module.bias, -0.2, 0.2))
    if inputs:
        _bring_near(model, inputs)
    return model


def _bring_near(model: nn.Module, inputs: Sequence[Any]) -> None:
    """Take the statistics of batch norms as factors of those that a run on `inputs` has."""

    def measure(norm: Any, given: tuple[Any, ...]) -> None:
        hooks.pop(norm).remove()  # A norm that is called again stays as it was the first time.
        x = given[0].transpose(0, 1).flatten(1).float()
        if x.shape[1] > 1:
            variance, mean = torch.var_mean(x, 1, correction=0)
            # A channel that hardly varies in one run, divided by so little, would be all rounding.
            spread = torch.maximum(variance, (variance + mean.square()).mean())
            spread = torch.where(spread > 0, spread, 1.0)
            norm.running_mean.mul_(spread.sqrt()).add_(mean)
            norm.running_var.mul_(spread)

    hooks = {
        module: module.register_forward_pre_hook(measure)
        for module in model.modules()
        if isinstance(module, _BatchNorm) and module.running_mean is not None
    }
    try:
        with torch.no_grad():
            model(*inputs)
    finally:
        for hook in hooks.values():
            hook.remove()


def randomize_constants_(model: nn.Module, seed: int = 0) -> nn.Module:
    """Fill parameters that hold a single number with different ones, so that errors show.

    A head of zeros answers zero whatever precedes it, and a layer scale of a millionth hides its
    layer.

    >>> layer = nn.Linear(4, 4)
    >>> _ = nn.init.zeros_(layer.weight)
    >>> bool(randomize_constants_(layer).weight.any())
    True
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            lazy = is_lazy(parameter)
            if lazy or parameter.numel() < 2 or (parameter != parameter.flatten()[0]).any():
                continue
            drawn = torch.empty(parameter.shape, device="cpu")
            drawn.uniform_(-1.0, 1.0, generator=generator)
            if parameter.ndim > 1:
                drawn *= (len(parameter) / parameter.numel()) ** 0.5
            elif parameter[0].abs() > 0.5:
                drawn = parameter[0].cpu() * (1.0 + 0.4 * drawn)
            else:
                drawn *= 0.2
            parameter.copy_(drawn)
    return model
