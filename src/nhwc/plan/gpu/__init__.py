"""Kernels for layers on a GPU: cuDNN's fused convolutions and, where there is Triton, ours."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from ...formats import CHANNELS_LAST_OF, Format, to_format
from ...machine.whole import rounds_convolutions, rounds_products
from ..implementation import Implementation, Run
from ..recording import laid_out
from ..specs import Affine, Convolution, Linear, Weighted
from . import launch
from .graphs import searching

_LAST, _PLAIN = Format.CHANNELS_LAST, Format.CONTIGUOUS

_TYPES = (torch.float32, torch.float16, torch.bfloat16)

_FEWEST = 8
"""With fewer channels or filters in a group, most products of a block would be for nothing."""

_FEW_ROWS = 64
"""A linear layer of so few rows waits for its weights, however they are multiplied."""


def kernels_for_gpu(spec: Weighted) -> tuple[Implementation, ...]:
    """The kernels for `spec` on a GPU, beside torch's own."""
    if not spec.device.startswith("cuda") or spec.dtype not in _TYPES:
        return ()
    ours = launch.unavailable(torch.device(spec.device)) is None
    if isinstance(spec, Convolution):
        if len(spec.input) != 4 or spec.held:
            return ()
        return (*_fused_by_cudnn(spec), *(_convolutions(spec) if ours else ()))
    if not ours or not launch.fits(spec.input, spec.output):
        return ()
    return _affine(spec) if isinstance(spec, Affine) else _products(spec, None)


def _fused_by_cudnn(spec: Convolution) -> tuple[Implementation, ...]:
    """cuDNN's convolution + bias (+ residual) + ReLU, in either layout."""
    relu = spec.activation is not None and spec.activation.name == "relu"
    if not relu or spec.behind is not None or not torch.backends.cudnn.is_available():
        return ()
    prepare = partial(_in_cudnn, spec)
    return tuple(
        Implementation("cudnn", one, one, partial(prepare, one)) for one in (_PLAIN, _LAST)
    )


def _in_cudnn(spec: Convolution, layout: Format, weight: Tensor, bias: Tensor | None) -> Run:
    geometry = (spec.stride, spec.padding, spec.dilation, spec.groups)
    own = to_format(weight, layout)

    def fused(x: Tensor, residual: Tensor | None = None) -> Tensor:
        if residual is None:
            return torch.cudnn_convolution_relu(x, own, bias, *geometry)
        return torch.cudnn_convolution_add_relu(x, own, residual, 1.0, bias, *geometry)

    def apart(x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = torch.conv2d(x, own, bias, *geometry)
        return (y if residual is None else y.add_(residual)).relu_()

    def convolve(*given: Tensor) -> Tensor:
        with searching():
            return run(*given)

    # Some of cuDNN's kernels make zero of NaN, and which one it takes is not said.
    run = fused
    nothing = torch.full(spec.input, math.nan, dtype=spec.dtype, device=spec.device)
    zeros = [weight.new_zeros(spec.output)] * spec.residual
    keeps = convolve(*(to_format(one, layout) for one in (nothing, *zeros))).isnan().all()
    run = fused if keeps else apart
    return convolve


def _convolutions(spec: Convolution) -> tuple[Implementation, ...]:
    """Ours, with everything behind the convolution in one kernel, or in the second of two."""
    if not launch.fits(spec.input, spec.output):
        return ()
    found = _finished(spec) if spec.behind is None else ()
    if spec.groups == spec.input[1] == spec.weight[0]:
        lone = lambda weight, bias: _settled(launch.depthwise(spec, weight, bias), _LAST)
        return (*found, Implementation("triton", _LAST, _LAST, lone, compiles=True))
    if spec.weight[1] < _FEWEST or spec.weight[0] // spec.groups < _FEWEST:
        return found
    return (*found, *_products(spec, _LAST))


def _finished(spec: Convolution) -> tuple[Implementation, ...]:
    """Torch's convolution, and one kernel for all that torch does behind it in several."""
    if not (spec.bias or spec.residual or spec.activation):
        return ()
    geometry = (spec.stride, spec.padding, spec.dilation, spec.groups)

    def prepare(layout: Format, weight: Tensor, bias: Tensor | None) -> Run:
        own = to_format(weight, layout)
        inner = 1 if layout is _LAST else math.prod(spec.output[2:])
        finish = _settled(launch.finishing(spec, None, bias, inner), layout)
        return lambda x, *more: finish(torch.conv2d(x, own, None, *geometry), *more)

    return tuple(
        Implementation("torch + triton", one, one, partial(prepare, one), compiles=True)
        for one in (_PLAIN, _LAST)
    )


def _products(spec: Convolution | Linear, layout: Format | None) -> tuple[Implementation, ...]:
    """One of ours for each block worth trying, and for each way to multiply float32 numbers."""
    found = []
    for precision, exact in _precisions(spec):
        for block in launch.blocks(spec, precision):

            def prepare(
                weight: Tensor,
                bias: Tensor | None,
                block: launch.Block = block,
                precision: str = precision,
            ) -> Run:
                return _settled(launch.product(spec, block, precision, weight, bias), layout)

            words = ["triton", block.name] + [precision] * (spec.dtype is torch.float32)
            name = " ".join(words)
            found.append(Implementation(name, layout, layout, prepare, exact=exact, compiles=True))
    return tuple(found)


def _precisions(spec: Convolution | Linear) -> tuple[tuple[str, bool], ...]:
    """How the user lets numbers be multiplied, with whether infinity stays what it is."""
    if spec.dtype is not torch.float32:
        return (("ieee", True),)
    if rounds_convolutions() if isinstance(spec, Convolution) else rounds_products():
        return (("tf32", True),)
    # Three products of rounded numbers, whose sum has all digits: infinity less itself is NaN.
    found = (("tf32x3", False),)
    few = isinstance(spec, Linear) and math.prod(spec.input[:-1]) <= _FEW_ROWS
    return (*found, ("ieee", True)) if few else found


def _affine(spec: Affine) -> tuple[Implementation, ...]:
    """A multiplication and an addition of each channel, and what follows, in one kernel."""
    rank = len(spec.input)

    def prepare(layout: Format | None, scale: Tensor, shift: Tensor) -> Run:
        inner = 1 if layout is _LAST else math.prod(spec.input[2:])
        return _settled(launch.finishing(spec, scale, shift, inner), layout)

    layouts = (_PLAIN, _LAST) if rank in CHANNELS_LAST_OF else (None,)
    return tuple(
        Implementation("triton", one, one, partial(prepare, one), compiles=True) for one in layouts
    )


def _settled(run: Run, layout: Format | None) -> Run:
    """`run` on tensors without gaps: slices of others have some."""
    settle = partial(laid_out, layout=layout) if layout else Tensor.contiguous
    return lambda *given: run(*map(settle, given))
