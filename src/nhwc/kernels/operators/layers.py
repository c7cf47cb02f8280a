"""The torch operators `nhwc::...` other than dense convolutions: a table, and their functions.

Each call packs its weights anew, which is cheap except for a large `linear`: a model that runs
often is better recorded as a program, which packs once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from ...errors import InputError
from ...formats import Format, to_format
from ...operators.windows import places
from ..convolutions.depthwise import depthwise_step
from ..layers import copies, elementwise, linear, normalize, pooling, resize
from ..layers.activations import named
from ..tape.invoke import Invocation
from ..tape.steps import Step, View, view_of
from .conv2d import register as register_convolution

Shape = tuple[Any, ...]

_IMAGES = {"x", "other", "factor", "residual", "parts"}
"""The arguments that are images: they become views, in channels last."""


@dataclass(frozen=True)
class LayerOperator:
    """`make(y, *arguments)` returns the steps, given views for images; `shape` is the result's."""

    name: str
    signature: str
    shape: Callable[..., Shape]
    make: Callable[..., Step | Sequence[Step]]

    @property
    def arguments(self) -> tuple[str, ...]:
        return tuple(part.split()[-1] for part in self.signature.split(", "))


def _same(x: Tensor, *_: Any) -> Shape:
    return tuple(x.shape)


def _resized(x: Tensor, size: Sequence[int], *_: Any) -> Shape:
    return (x.shape[0], x.shape[1], *size)


def _windows(x: Tensor, size: Any, stride: Any, padding: Any, ceil_mode: bool, *_: Any) -> Shape:
    given = zip(x.shape[2:], size, stride, padding, strict=True)
    sides = [places(n, k, stride=s, padding=p, ceil_mode=ceil_mode) for n, k, s, p in given]
    return (x.shape[0], x.shape[1], *sides)


def _convolved(
    x: Tensor,
    weight: Tensor,
    bias: Any,
    residual: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    *_: Any,
) -> Shape:
    given = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    sides = [places(n, k, stride=s, padding=p, dilation=d) for n, k, s, p, d in given]
    return (x.shape[0], x.shape[1], *sides)


def _depthwise(y: View, x: View, weight: Tensor, bias: Any, residual: Any, *settings: Any) -> Step:
    stride, padding, dilation, activation = settings
    return depthwise_step(
        x,
        y,
        weight,
        bias,
        stride=tuple(stride),
        padding=tuple(padding),
        dilation=tuple(dilation),
        activation=named(activation),
        residual=residual,
    )


def _max_pool(y: View, x: View, size: Any, stride: Any, padding: Any, ceil_mode: bool) -> Step:
    del ceil_mode  # it has decided the shape of y
    return pooling.maxpool_step(
        x, y, size=tuple(size), stride=tuple(stride), padding=tuple(padding)
    )


def _avg_pool(
    y: View, x: View, size: Any, stride: Any, padding: Any, ceil_mode: bool, count: bool
) -> Step:
    del ceil_mode
    where = {"size": tuple(size), "stride": tuple(stride), "padding": tuple(padding)}
    counting: dict[str, Any] = {**where, "count_include_pad": count}
    return pooling.avgpool_step(x, y, **counting)


def _affine(y: View, x: View, scale: Tensor, shift: Any, residual: Any, activation: str) -> Step:
    kind = named(activation)
    return elementwise.affine_step(x, y, scale, shift, activation=kind, residual=residual)


def _linear(y: View, x: View, weight: Tensor, bias: Any, activation: str) -> Step:
    return linear.linear_step(x, y, weight, bias, activation=named(activation))


def _interleaved(parts: Sequence[Tensor]) -> Shape:
    n, c, h, w = parts[0].shape
    return (n, len(parts) * c, h, w)


_WINDOW = "Tensor x, int[2] size, int[2] stride, int[2] padding, bool ceil_mode"

OPERATORS = (
    LayerOperator(
        "depthwise",
        "Tensor x, Tensor weight, Tensor? bias, Tensor? residual, "
        "int[2] stride, int[2] padding, int[2] dilation, str activation",
        _convolved,
        _depthwise,
    ),
    LayerOperator("max_pool", _WINDOW, _windows, _max_pool),
    LayerOperator("avg_pool", f"{_WINDOW}, bool count_include_pad", _windows, _avg_pool),
    LayerOperator(
        "adaptive_avg_pool",
        "Tensor x, int[2] size",
        _resized,
        lambda y, x, size: pooling.adaptive_avgpool_step(x, y),
    ),
    LayerOperator(
        "affine",
        "Tensor x, Tensor scale, Tensor? shift, Tensor? residual, str activation",
        _same,
        _affine,
    ),
    LayerOperator(
        "activation",
        "Tensor x, str activation, float slope",
        _same,
        lambda y, x, name, slope: elementwise.activation_step(x, y, named(name), slope=slope),
    ),
    LayerOperator(
        "add",
        "Tensor x, Tensor other, str activation",
        _same,
        lambda y, x, other, name: elementwise.add_step(x, other, y, activation=named(name)),
    ),
    LayerOperator(
        "multiply",
        "Tensor x, Tensor factor",
        _same,
        lambda y, x, factor: elementwise.multiply_step(x, factor, y),
    ),
    LayerOperator(
        "linear",
        "Tensor x, Tensor weight, Tensor? bias, str activation",
        lambda x, weight, *_: (x.shape[0], weight.shape[0]),
        _linear,
    ),
    LayerOperator(
        "interleave",
        "Tensor[] parts",
        _interleaved,
        lambda y, parts: copies.interleave_steps(parts, y),
    ),
    LayerOperator("softmax", "Tensor x", _same, lambda y, x: normalize.softmax_step(x, y)),
    LayerOperator(
        "layer_norm",
        "Tensor x, Tensor? weight, Tensor? bias, float eps",
        _same,
        lambda y, x, weight, bias, eps: normalize.layer_norm_step(x, y, weight, bias, eps=eps),
    ),
    LayerOperator(
        "nearest", "Tensor x, int[2] size", _resized, lambda y, x, _: resize.nearest_step(x, y)
    ),
    LayerOperator(
        "bilinear",
        "Tensor x, int[2] size, bool align_corners",
        _resized,
        lambda y, x, _, align: resize.bilinear_step(x, y, align_corners=align),
    ),
)


@cache
def register() -> Any:
    """Make the operators known to torch, once; returns what keeps them known."""
    register_convolution()
    library = torch.library.Library("nhwc", "FRAGMENT")
    for operator in OPERATORS:
        library.define(f"{operator.name}({operator.signature}) -> Tensor")
        library.impl(operator.name, partial(_run, operator), "CPU")
        library.impl(operator.name, partial(_refuse_gradients, operator), "AutogradCPU")
        fake = partial(_fake, operator)
        torch.library.register_fake(f"nhwc::{operator.name}", fake, lib=library)
    return library


def _run(operator: LayerOperator, *arguments: Any) -> Tensor:
    named = zip(operator.arguments, arguments, strict=True)
    given = [_as_views(operator, value) if name in _IMAGES else value for name, value in named]
    shape = operator.shape(*arguments)
    if any(size < 0 for size in shape[2:]) or 0 in shape[2:]:
        raise InputError(f"nhwc::{operator.name}: the image is smaller than the window.")
    result = _empty(arguments, shape)
    if result.numel() == 0:
        return result
    y = view_of(result)
    assert y is not None
    made = operator.make(y, *given)
    steps = [made] if isinstance(made, Step) else list(made)
    _run_steps(steps)
    return result


def _run_steps(steps: list[Step]) -> None:
    """Run steps whose views lie in tensors already."""
    buffers: dict[str, Tensor] = {}
    renamed = []
    for step in steps:
        args = []
        for value in step.args:
            if isinstance(value, View):
                assert isinstance(value.buffer, Tensor)
                buffers[str(id(value.buffer))] = value.buffer
                value = View(str(id(value.buffer)), value.shape, value.pixel, value.offset)
            args.append(value)
        renamed.append(Step(step.kernel, tuple(args)))
    Invocation.of(renamed, torch.get_num_threads())(buffers)


def _as_views(operator: LayerOperator, value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, list | tuple):
        return [_as_views(operator, one) for one in value]
    if value.ndim not in (2, 4) or not value.is_floating_point():
        raise InputError(
            f"nhwc::{operator.name} got an image of shape {tuple(value.shape)} and {value.dtype}; "
            "it needs floats of N, C, H, W."
        )
    tensor = value.float()
    view = view_of(tensor)
    if view is None:
        dense = to_format(
            tensor if tensor.ndim == 4 else tensor[:, :, None, None], Format.CHANNELS_LAST
        )
        view = view_of(dense)
    return view


def _refuse_gradients(operator: LayerOperator, *arguments: Any) -> Tensor:
    flat = [one for a in arguments for one in (a if isinstance(a, list | tuple) else (a,))]
    wanted = any(isinstance(one, Tensor) and one.requires_grad for one in flat)
    if torch.is_grad_enabled() and wanted:
        raise InputError(
            f"nhwc::{operator.name} has no gradient. Call the model under torch.inference_mode(), "
            "or train the model it was made from."
        )
    with torch._C._AutoDispatchBelowAutograd():
        return getattr(torch.ops.nhwc, operator.name)(*arguments)  # type: ignore[no-any-return]


def _fake(operator: LayerOperator, *arguments: Any) -> Tensor:
    return _empty(arguments, operator.shape(*arguments))


def _empty(arguments: Sequence[Any], shape: Shape) -> Tensor:
    """A float32 tensor of this shape, channels last, for the first argument's device."""
    like = arguments[0][0] if isinstance(arguments[0], list | tuple) else arguments[0]
    if len(shape) == 2:
        return like.new_empty(shape, dtype=torch.float32)  # type: ignore[no-any-return]
    n, c, h, w = shape
    return like.new_empty((n, h, w, c), dtype=torch.float32).permute(0, 3, 1, 2)  # type: ignore[no-any-return]
