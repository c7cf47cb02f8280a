"""Our kernels for layers with weights: convolutions, batch norms, linear layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ...formats import Format
from ...kernels.convolutions.conv import ConvKernel, conv2d_candidates
from ...kernels.convolutions.depthwise import depthwise_step
from ...kernels.convolutions.spec import IMAGE, ConvSpec, Frames
from ...kernels.layers.activations import Activation as Code
from ...kernels.layers.activations import code_of
from ...kernels.layers.copies import interleave_steps
from ...kernels.layers.elementwise import affine_step
from ...kernels.layers.linear import ROWS, linear_step
from ...kernels.programs.builder import Buffer, Builder, four
from ...kernels.programs.moved import rows_of
from ...kernels.tape.steps import Step, View
from ...operators.activations import NamedActivation
from ..implementation import Emit, Implementation
from ..specs import Affine, Convolution, Linear, Weighted
from .rows import in_one_row, over_rows

Constants = tuple[Tensor, "Tensor | None"]


def weighted(spec: Weighted) -> tuple[Implementation, ...]:
    """Our kernels for a layer with weights."""
    code = in_ours(spec.activation)
    if code is None:
        return ()
    if len(spec.input) == 3 and not isinstance(spec, Linear):
        found = weighted(spec.as_image())
        return tuple(replace(in_one_row(one, spec.output), prepare=_of_row(one)) for one in found)
    if isinstance(spec, Convolution):
        return _convolutions(spec, *code)
    settings: dict[str, Any] = {"activation": code[0], "slope": code[1]}
    if isinstance(spec, Affine):
        return (ours("nhwc", one_step(spec.output, affine_step, **settings)),)
    many = math.prod(spec.input[:-1]) > ROWS
    rows = (_rows(spec, *code),) if many else ()
    if len(spec.input) != 2:
        return rows or (_few_rows(spec, settings),)
    step = one_step(spec.output, linear_step, **settings)

    def emit(builder: Builder, constants: Constants, x: Buffer, *residual: Buffer) -> Any:
        return step(builder, constants, builder.dense(x), *residual)

    return (ours("nhwc", emit, copies=0.0), *rows)


def _of_row(one: Implementation) -> Callable[..., Any]:
    """What `one` prepares, of filters that have no rows of their own."""
    return lambda weight, bias: one.prepare(
        weight.unsqueeze(2) if weight.ndim == 3 else weight, bias
    )


def in_ours(activation: NamedActivation | None) -> tuple[Code, float] | None:
    """Our kernels' code for an activation, and its slope; None for one that they lack."""
    return (Code.NONE, 0.0) if activation is None else code_of(activation.name, activation.numbers)


def ours(name: str, emit: Emit, **more: Any) -> Implementation:
    """A kernel of ours, as programs have them: channels last in and out."""
    return Implementation(name, Format.CHANNELS_LAST, Format.CHANNELS_LAST, emit=emit, **more)


def one_step(shape: Sequence[int], step: Callable[..., Any], **settings: Any) -> Emit:
    """Add `step(x, y, *constants, residual=..., **settings)`."""

    def emit(builder: Builder, constants: Any, x: Buffer, *residual: Buffer) -> Buffer:
        y = builder.buffer(shape)

        def make(x: Any, y: Any, *more: Any) -> Any:
            return step(x, y, *constants, residual=more[0] if more else None, **settings)

        builder.add(make, x, y, *residual)
        return y

    return emit


def _rows(spec: Linear, code: Code, slope: float) -> Implementation:
    """A linear layer on many rows, as a 1x1 convolution with one pixel for each row."""
    shape = spec.input if len(spec.input) in (2, 3) else rows_of(spec.input)
    n, c, h, w = four(shape)
    k = spec.weight[0]
    more: dict[str, Any] = {"has_residual": spec.residual, "has_bias": spec.bias}
    kernel = ConvKernel(
        "pointwise", True, ConvSpec(n, c, h, w, k, 1, 1, activation=code, slope=slope, **more)
    )
    found = _packed(kernel, spec.output)
    if len(spec.input) == 2:
        return found
    writes = Format.CHANNELS_LAST if len(spec.input) == 3 else Format.CONTIGUOUS
    reads = writes if len(spec.input) == 3 else None
    step = lambda x, y, packed, *more: kernel.steps(x, y, packed, *more)
    emit = over_rows(spec.output, step)
    return replace(found, reads=reads, writes=writes, emit=emit, moved=True)


def _few_rows(spec: Linear, settings: dict[str, Any]) -> Implementation:
    """A linear layer on a class token, say, in whatever dimensions: it waits for its weights."""

    def step(x: View, y: View, constants: Constants, *residual: View) -> Step:
        rows = x.as_images(x.pixels, 1, 1)
        return linear_step(rows, y, *constants, residual=next(iter(residual), None), **settings)

    writes = Format.CHANNELS_LAST if len(spec.input) == 3 else Format.CONTIGUOUS
    reads = writes if len(spec.input) == 3 else None
    emit = over_rows(spec.output, step)
    return Implementation("nhwc", reads, writes, emit=emit, copies=0.0, moved=True)


def _convolutions(spec: Convolution, code: Code, slope: float) -> tuple[Implementation, ...]:
    n, c, *deep, h, w = spec.input
    k, depth, *taps, r, s = spec.weight
    window: dict[str, Any] = {
        name: tuple(getattr(spec, name)[-2:]) for name in ("stride", "padding", "dilation")
    }
    frames = seen = IMAGE
    behind, out = spec.behind or spec.padding, spec.output[2:]
    if behind[-2:] != spec.padding[-2:]:
        window["wanted"] = out[-2:]
    if deep:
        along = (spec.stride[0], spec.padding[0], spec.dilation[0])
        wanted = out[0] if behind[0] != spec.padding[0] else None
        frames = Frames(deep[0], taps[0], *along, wanted, spec.held)
        seen = frames.without_unseen()
    one = ConvSpec(
        *(n, c, h, w, k, r, s),
        **window,
        groups=spec.groups,
        activation=code,
        slope=slope,
        has_residual=spec.residual,
        has_bias=spec.bias,
        frames=seen,
    )
    of_frames = frames.seen() if seen != frames else slice(None)
    if spec.groups == c and depth == 1 and c > 1:
        return _depthwise(one.folded(), spec.output, of_frames)
    part = (*[of_frames] * len(deep), *one.seen())
    cut = one.without_unseen().folded()
    found = tuple(_packed(kernel, spec.output, part) for kernel in conv2d_candidates(cut))
    pixels = (cut.h, cut.w, cut.r, cut.s, cut.out_h, cut.out_w)
    single = {*pixels, cut.groups} == {1} and cut.frames == IMAGE
    return (*found, _of_one_pixel(cut.n, spec.output, part, code, slope)) if single else found


def _of_one_pixel(
    n: int, shape: tuple[int, ...], part: tuple[slice, ...], code: Code, slope: float
) -> Implementation:
    """A convolution of images of one pixel, which waits for its weights as a linear layer does.

    Frames of a volume that it takes alone are images, too: there are `n` of both together.
    """

    def make(x: View, y: View, *constants: Any, residual: View | None, **given: Any) -> Step:
        x, y = (one.as_images(n, 1, 1) for one in (x, y))
        if residual is not None:
            residual = residual.as_images(n, 1, 1)
        return linear_step(x, y, *constants, residual=residual, **given)

    step = one_step(shape, make, activation=code, slope=slope)

    def prepare(weight: Tensor, bias: Tensor | None) -> Constants:
        return _of_filters(weight, part).flatten(1), bias

    return ours("nhwc linear", step, prepare=prepare, copies=0.0)


def _depthwise(one: ConvSpec, shape: tuple[int, ...], part: slice) -> tuple[Implementation, ...]:
    """Our kernel for one filter, or some, of each channel; of volumes some frames, `part`."""
    deep = one.frames
    window: dict[str, Any] = {
        "stride": one.stride,
        "padding": one.padding,
        "dilation": one.dilation,
        "frames": deep,
    }
    filters = (-1, 1, *[deep.t] * (deep != IMAGE), one.r, one.s)

    def make(x: View, y: View, weight: Tensor, *bias: Any, **given: Any) -> Step:
        return depthwise_step(
            x.as_images(one.n, deep.d * one.h, one.w),
            y.as_images(one.n, deep.out_d * one.out_h, one.out_w),
            (weight[:, :, part] if weight.ndim == 5 else weight).reshape(filters),
            *bias,
            **given,
        )

    settings: dict[str, Any] = {"activation": one.activation, "slope": one.slope}
    step = one_step(shape, make, **window, **settings)
    copies = one.k // one.c
    return (ours("nhwc depthwise", _of_copies(copies, step), copies=0.0),)


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


def _packed(
    kernel: ConvKernel, shape: tuple[int, ...], part: tuple[slice, ...] = ()
) -> Implementation:
    """`kernel` as an implementation, which packs its weights first, of filters only a `part`."""

    def emit(builder: Builder, packed: Tensor, x: Buffer, *residual: Buffer) -> Buffer:
        y = builder.buffer(shape)
        if kernel.dense:
            y, residual = builder.dense(y), tuple(map(builder.dense, residual))
        x = builder.dense(x) if kernel.reads_dense else x
        builder.add(lambda x, y, *more: kernel.steps(x, y, packed, *more), x, y, *residual)
        return y

    def pack(weight: Tensor, bias: Tensor | None) -> Tensor:
        return kernel.pack(_of_filters(weight, part).reshape(kernel.filters), bias)

    name, exact, copies = f"nhwc {kernel.name}", kernel.exact, kernel.copies
    return ours(name, emit, prepare=pack, exact=exact, copies=copies)


def _of_filters(weight: Tensor, part: tuple[slice, ...]) -> Tensor:
    """A part of each filter, as slices of its last sides."""
    index: Any = (..., *part)
    return weight[index]
