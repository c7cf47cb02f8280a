"""Our kernels for layers with weights: convolutions, batch norms, linear layers."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from ...kernels.convolutions.conv import ConvKernel, conv2d_candidates
from ...kernels.convolutions.depthwise import depthwise_step
from ...kernels.convolutions.spec import ConvSpec
from ...kernels.layers.activations import Activation as Code
from ...kernels.layers.copies import interleave_steps
from ...kernels.layers.elementwise import affine_step
from ...kernels.layers.linear import ROWS, linear_step
from ...kernels.programs.builder import Buffer, Builder, four
from ..specs import Affine, Convolution, Linear, Weighted
from .kernel import Constants, Emit, Native, code_of, one_step


def weighted(spec: Weighted, shape: tuple[int, ...]) -> tuple[Native, ...]:
    """Our kernels for a layer whose output has this shape."""
    code = code_of(spec.activation)
    if code is None:
        return ()
    if isinstance(spec, Convolution):
        return _convolutions(spec, *code) if len(spec.input) == 4 else ()
    settings: dict[str, Any] = {"activation": code[0], "slope": code[1]}
    if isinstance(spec, Affine):
        return (Native("nhwc", True, one_step(shape, affine_step, **settings)),)
    if len(spec.input) == 4:
        return ()
    rows = (_rows(spec, *code),) if math.prod(spec.input[:-1]) > ROWS else ()
    if len(spec.input) == 3:
        return rows
    step = one_step(shape, linear_step, **settings)

    def emit(builder: Builder, constants: Constants, x: Buffer, *residual: Buffer) -> Any:
        return step(builder, constants, builder.dense(x), *residual)

    return (Native("nhwc", True, emit), *rows)


def _rows(spec: Linear, code: Code, slope: float) -> Native:
    """A linear layer on many rows: as a 1x1 convolution, of one pixel for each."""
    n, c, h, w = four(spec.input)
    k = spec.weight[0]
    more: dict[str, Any] = {"has_residual": spec.residual, "has_bias": spec.bias}
    ours = ConvSpec(n, c, h, w, k, 1, 1, activation=code, slope=slope, **more)
    return _packed(ConvKernel("pointwise", True, ours), spec.output)


def _convolutions(spec: Convolution, code: Code, slope: float) -> tuple[Native, ...]:
    n, c, h, w = spec.input
    k, depth, r, s = spec.weight
    # Torch allows every spec that it ran; ours are written for these pairs.
    ours = ConvSpec(
        *(n, c, h, w, k, r, s),
        stride=(spec.stride[0], spec.stride[1]),
        padding=(spec.padding[0], spec.padding[1]),
        dilation=(spec.dilation[0], spec.dilation[1]),
        groups=spec.groups,
        activation=code,
        slope=slope,
        has_residual=spec.residual,
        has_bias=spec.bias,
    )
    shape = (n, k, ours.out_h, ours.out_w)
    if spec.groups == c and depth == 1 and c > 1:
        window: dict[str, Any] = {
            "stride": ours.stride,
            "padding": ours.padding,
            "dilation": ours.dilation,
        }
        step = one_step(shape, depthwise_step, **window, activation=code, slope=slope)
        return (Native("nhwc depthwise", True, _of_copies(k // c, step)),)
    return tuple(_packed(kernel, shape) for kernel in conv2d_candidates(ours))


def _of_copies(count: int, step: Emit) -> Emit:
    """`step` on an image that has each channel `count` times, one after the other."""
    if count == 1:
        return step

    def emit(builder: Builder, constants: Any, x: Buffer, *residual: Buffer) -> Any:
        n, c, h, w = x.shape
        copies = builder.buffer((n, count * c, h, w))
        builder.add(lambda *views: interleave_steps(views[:-1], views[-1]), *[x] * count, copies)
        return step(builder, constants, copies, *residual)

    return emit


def _packed(kernel: ConvKernel, shape: tuple[int, ...]) -> Native:
    def emit(builder: Builder, packed: Tensor, x: Buffer, *residual: Buffer) -> Buffer:
        y = builder.buffer(shape)
        builder.add(lambda x, y, *more: kernel.steps(x, y, packed, *more), x, y, *residual)
        return y

    def pack(constants: Any) -> Tensor:
        weight, bias = constants
        return kernel.pack(weight.reshape(len(weight), -1, kernel.spec.r, kernel.spec.s), bias)

    return Native(f"nhwc {kernel.name}", kernel.exact, emit, pack=pack)
