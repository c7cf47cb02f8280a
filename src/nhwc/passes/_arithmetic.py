"""The arithmetic of folding: a batch norm in eval mode is a scale and a shift per channel.

Everything is computed in float64 and rounded once, to the type of the weights it goes into.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from ..graph.modules.folded import FOLDED, PROMOTED, FrozenConv2d, PromotedFrozenConv2d
from ..machine.host_memory import apart, trim

_LARGE = 1 << 22
_ROUNDINGS = 4


def scale_and_shift(norm: nn.Module) -> tuple[Tensor, Tensor]:
    """Return the float64 `scale` and `shift` for which `norm(x) == x * scale + shift`.

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


def fold_after(layer: nn.Module, scale: Tensor, shift: Tensor) -> Any | None:
    """Copy a convolution or linear layer so that it also does the scale and shift after it.

    None if its weights would not fit their type.
    """
    fields: Any = layer
    weight = fields.weight.detach()
    scale, shift = scale.to(weight.device), shift.to(weight.device)
    folded = apart(weight, torch.float64).mul_(_along_outputs(layer, scale))
    bias = shift if fields.bias is None else fields.bias.detach().double() * scale + shift
    return with_weights(layer, folded, bias)


def undoable(folded: nn.Module, layer: nn.Module, scale: Tensor, shift: Tensor) -> Any | None:
    """Turn `fold_after(layer, scale, shift)` into a layer that can undo the fold, or return None.

    The original weights cannot be recovered if a scale is zero or rounding changed them too much.
    """
    fields, given = twin(folded), cast(Any, layer)
    old = given.weight.detach()
    fields.__class__ = next(k for k in FOLDED if isinstance(layer, k.__bases__[-1]))
    restored = fields.weight.detach().double() / _along_outputs(layer, scale.to(old).double())
    off = (restored - old).abs()
    if not bool((off <= _ROUNDINGS * torch.finfo(old.dtype).eps * old.abs()).all()):
        return None
    bias = torch.zeros_like(shift) if given.bias is None else given.bias.detach()
    for name, value in (("scale", scale), ("shift", shift), ("bias_before", bias)):
        fields.register_buffer(name, value.to(old))
    return fields


def frozen(folded: nn.Module) -> Any | None:
    """Make `folded` treat a single image as a FrozenBatchNorm2d does; None unless it is 2-D."""
    if not isinstance(folded, nn.Conv2d):
        return None
    layer = twin(folded)
    layer.__class__ = PromotedFrozenConv2d if isinstance(folded, PROMOTED) else FrozenConv2d
    return layer


def promoted(folded: nn.Module) -> Any:
    """Make `folded` return what its sum or product with a tensor of its weights' type has as type.

    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     promoted(nn.Linear(4, 4))(torch.ones(2, 4)).dtype
    torch.float32
    """
    if isinstance(folded, PROMOTED):
        return folded
    layer = twin(folded)
    frozen = isinstance(folded, FrozenConv2d)
    kinds = (PromotedFrozenConv2d,) if frozen else PROMOTED
    layer.__class__ = next(k for k in kinds if isinstance(folded, k.__bases__[-1]))
    return layer


def _along_outputs(layer: nn.Module, scale: Tensor) -> Tensor:
    """Reshape `scale`, one number per output, so that it multiplies the weights of `layer`."""
    fields: Any = layer
    if not isinstance(layer, _ConvTransposeNd):
        return scale.reshape(-1, *[1] * (fields.weight.ndim - 1))
    # The weight is (in, out / groups, ...): each group of inputs has its own outputs.
    inputs, outputs = fields.weight.shape[:2]
    by_group = scale.reshape(layer.groups, 1, -1).expand(-1, inputs // layer.groups, -1)
    return by_group.reshape(inputs, outputs, *[1] * (fields.weight.ndim - 2))


def fold_before(layer: nn.Module, scale: Tensor, shift: Tensor) -> Any | None:
    """Copy a convolution or linear layer so that it also does the scale and shift before it.

    This is exact if the layer does not pad with zeros, or if the shift is zero. None if its weights
    would not fit their type.
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


def with_weights(layer: nn.Module, weight: Tensor, bias: Tensor) -> Any | None:
    """Copy `layer` with these float64 weights, cast to the type and memory format of the old ones.

    None if they do not fit that type. Uses up `weight`.
    """
    old: Any = layer
    copied = twin(layer)
    # `empty_like` keeps the order of the strides of a dense tensor.
    new = apart(old.weight.detach()).copy_(weight)
    copied.weight = nn.Parameter(new, old.weight.requires_grad)
    copied.bias = nn.Parameter(bias.to(new), old.weight.requires_grad)
    fits = new.is_meta or (_rounds_well(weight, new) and bool(copied.bias.isfinite().all()))
    if new.nbytes >= _LARGE:
        # Without this malloc keeps half of the memory that folding one layer after another frees.
        trim()
    return copied if fits else None


def twin(layer: nn.Module) -> Any:
    """Copy `layer` shallowly: the copy has its own dictionaries, which hold the same tensors."""
    copied = layer.__new__(type(layer))
    vars(copied).update(vars(layer))
    for slots in ("_parameters", "_buffers", "_modules"):
        vars(copied)[slots] = dict(vars(layer)[slots])
    return copied


def _rounds_well(weight: Tensor, new: Tensor) -> bool:
    """Whether `new` is the float64 `weight` up to a few roundings; uses up `weight`.

    What is much smaller than the rest may vanish, but small numbers of half precision lose digits,
    and large ones become infinite.
    """
    allowed = _ROUNDINGS * torch.finfo(new.dtype).eps * torch.linalg.vector_norm(weight)
    return bool(torch.linalg.vector_norm(weight.sub_(new)) <= allowed)
