"""The arithmetic of folding: a batch norm in eval mode is a scale and a shift per channel.

Everything is computed in float64 and rounded once, to the type of the weights it goes into.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd


def scale_and_shift(norm: nn.Module) -> tuple[Tensor, Tensor]:
    """The `scale` and `shift`, in float64, with which `norm(x) == x * scale + shift`.

    >>> scale, shift = scale_and_shift(nn.BatchNorm2d(4, eps=0))
    >>> scale.tolist(), shift.tolist()
    ([1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 0.0])
    """
    fields: Any = norm
    scale = 1 / torch.sqrt(fields.running_var.detach().double() + fields.eps)
    if fields.weight is not None:
        scale = scale * fields.weight.detach().double()
    shift = -fields.running_mean.detach().double() * scale
    if fields.bias is not None:
        shift = shift + fields.bias.detach().double()
    return scale, shift


def fold_after(layer: nn.Module, scale: Tensor, shift: Tensor) -> nn.Module:
    """A copy of a convolution or linear layer that also does the scale and shift after it."""
    fields: Any = layer
    weight = fields.weight.detach()
    scale, shift = scale.to(weight.device), shift.to(weight.device)
    if isinstance(layer, _ConvTransposeNd):
        # The weight is (in, out / groups, ...): each group of inputs has its own outputs.
        grouped = weight.double().unflatten(0, (layer.groups, -1))
        by_group = scale.reshape(layer.groups, 1, -1, *[1] * (weight.ndim - 2))
        folded = (grouped * by_group).flatten(0, 1)
    else:
        folded = weight.double() * scale.reshape(-1, *[1] * (weight.ndim - 1))
    bias = shift if fields.bias is None else fields.bias.detach().double() * scale + shift
    return with_weights(layer, folded, bias)


def fold_before(layer: nn.Module, scale: Tensor, shift: Tensor) -> nn.Module:
    """A copy of a convolution or linear layer that also does the scale and shift before it.

    Exact where every weight meets a value of the input: no zero padding, or no shift.
    """
    fields: Any = layer
    weight = fields.weight.detach().double()
    scale, shift = scale.to(weight.device), shift.to(weight.device)
    groups = fields.groups if isinstance(layer, _ConvNd) else 1
    # The weight is (out, in / groups, ...): each group of outputs sees its own inputs.
    grouped = weight.unflatten(0, (groups, -1))
    rest = [1] * (weight.ndim - 2)
    folded = (grouped * scale.reshape(groups, 1, -1, *rest)).flatten(0, 1)
    moved = (grouped * shift.reshape(groups, 1, -1, *rest)).flatten(0, 1).flatten(1).sum(1)
    bias = moved if fields.bias is None else fields.bias.detach().double() + moved
    return with_weights(layer, folded, bias)


def with_weights(layer: nn.Module, weight: Tensor, bias: Tensor) -> nn.Module:
    """A copy of `layer` with these weights, in the type and memory format of its own."""
    old: Any = layer
    copied: nn.Module = twin(layer)
    # A tensor that is dense keeps the order of its strides through `empty_like`.
    new = torch.empty_like(old.weight.detach()).copy_(weight)
    copied.weight = nn.Parameter(new, old.weight.requires_grad)
    copied.bias = nn.Parameter(bias.to(new), old.weight.requires_grad)
    return copied


def twin(layer: nn.Module) -> Any:
    """A module like `layer`, of its class, holding the same tensors in slots of its own."""
    copied = layer.__new__(type(layer))
    vars(copied).update(vars(layer))
    for slots in ("_parameters", "_buffers", "_modules"):
        vars(copied)[slots] = dict(vars(layer)[slots])
    return copied


def overflows(layer: nn.Module) -> bool:
    """Whether folding left numbers that the type of the weights cannot hold."""
    fields: Any = layer
    return not fields.weight.is_meta and not all(
        bool(torch.isfinite(tensor.detach()).all()) for tensor in (fields.weight, fields.bias)
    )
