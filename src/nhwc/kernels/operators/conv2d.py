"""The torch operators `nhwc::...`: what lets models with these kernels export, compile and save."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError
from ...operators.windows import places
from ..convolutions.conv import ConvKernel, compute, kernel_for
from ..convolutions.spec import ConvSpec
from ..language import isa as isas
from ..layers.activations import named

_SCHEMA = (
    "conv2d(Tensor x, Tensor packed, Tensor? residual, str kernel, str isa, int k, int r, int s, "
    "int[2] stride, int[2] padding, int[2] dilation, int groups, str activation, float slope) "
    "-> Tensor"
)


@cache
def register() -> Any:
    """Make the operators known to torch, once; returns what keeps them known."""
    library = torch.library.Library("nhwc", "DEF")
    library.define(_SCHEMA)
    library.impl("conv2d", _conv2d, "CPU")
    library.impl("conv2d", _conv2d_autograd, "AutogradCPU")
    torch.library.register_fake("nhwc::conv2d", _conv2d_fake, lib=library)
    return library


def conv2d(kernel: ConvKernel, x: Tensor, packed: Tensor, residual: Tensor | None = None) -> Tensor:
    """The result of `kernel`, channels last, by the operator `nhwc::conv2d`."""
    register()
    return torch.ops.nhwc.conv2d(x, packed, residual, *op_arguments(kernel))  # type: ignore[no-any-return]


def op_arguments(kernel: ConvKernel) -> tuple[Any, ...]:
    """The arguments of `nhwc::conv2d` after its tensors."""
    spec = kernel.spec
    return (
        *(kernel.name, isas.host().name, spec.k, spec.r, spec.s),
        *(list(spec.stride), list(spec.padding), list(spec.dilation)),
        *(spec.groups, spec.activation.name.lower(), spec.slope),
    )


def _conv2d(
    x: Tensor, packed: Tensor, residual: Tensor | None, kernel: str, isa: str, *settings: Any
) -> Tensor:
    if isa != isas.host().name:
        raise InputError(
            f"the weights were packed for {isa}; this process computes with {isas.host().name}. "
            "Pack them again here."
        )
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise InputError(f"the input is {x.dtype}; nhwc::conv2d computes in float32. Convert it.")
    plain = tuple(tuple(s) if isinstance(s, list) else s for s in settings)
    for name, pair in zip(("stride", "padding", "dilation"), plain[3:6], strict=True):
        if len(pair) != 2:
            raise InputError(f"nhwc::conv2d: {name} is {list(pair)}. Give two sizes.")
    return compute(
        _kernel(kernel, tuple(x.shape), plain, residual is not None), x, packed, residual
    )


@lru_cache(maxsize=4096)
def _kernel(
    name: str, shape: tuple[int, ...], settings: tuple[Any, ...], has_residual: bool
) -> ConvKernel:
    """The kernel that the arguments of the operator name; cached, as every call asks again."""
    k, r, s, stride, padding, dilation, groups, activation, slope = settings
    if len(shape) != 4:
        raise InputError(f"the input has {len(shape)} dimensions; nhwc::conv2d needs N, C, H, W.")
    n, c, h, w = shape
    spec = ConvSpec(
        *(n, c, h, w, k, r, s),
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        activation=named(activation),
        slope=slope,
        has_residual=has_residual,
    )
    if spec.out_h < 1 or spec.out_w < 1:
        raise InputError(f"an image of {spec.h}x{spec.w} is smaller than the {r}x{s} filter.")
    return kernel_for(name, spec)


def _conv2d_autograd(x: Tensor, packed: Tensor, residual: Tensor | None, *rest: Any) -> Tensor:
    tensors = (x, packed) if residual is None else (x, packed, residual)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise InputError(
            "nhwc::conv2d has no gradient. Call the model under torch.inference_mode(), "
            "or train the model it was made from."
        )
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.nhwc.conv2d(x, packed, residual, *rest)  # type: ignore[no-any-return]


def _conv2d_fake(
    x: Tensor, packed: Tensor, residual: Tensor | None, kernel: str, isa: str, *settings: Any
) -> Tensor:
    k, r, s, stride, padding, dilation, *_ = settings
    n, _, h, w = x.shape
    sides = zip((h, w), (r, s), stride, padding, dilation, strict=True)
    out_h, out_w = (places(n, k, stride=s, padding=p, dilation=d) for n, k, s, p, d in sides)
    y = x.new_empty((n, out_h, out_w, k), dtype=torch.float32)
    return y.permute(0, 3, 1, 2)
