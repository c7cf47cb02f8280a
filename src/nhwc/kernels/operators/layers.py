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
import torch.nn.functional as F
from torch import Tensor

from ...errors import InputError
from ...formats import Format, to_format
from ...shown import first_line
from ..convolutions.depthwise import depthwise_step
from ..layers import copies, elementwise, linear, normalize, pooling, resize
from ..layers.activations import named
from ..tape.invoke import Invocation
from ..tape.steps import Step, View, view_of
from .conv2d import register as register_convolution

_IMAGES = {"x", "other", "factor", "residual", "parts"}
"""The arguments that are images: they become views, in channels last."""


@dataclass(frozen=True)
class LayerOperator:
    """`make(y, *arguments)` returns the steps, given views for images.

    `means` computes the same with torch's own operators. It never runs on numbers, it says of
    which shape the result is and refuses what does not fit together.
    """

    name: str
    signature: str
    means: Callable[..., Tensor]
    make: Callable[..., Step | Sequence[Step]]

    @property
    def arguments(self) -> tuple[str, ...]:
        return tuple(part.split()[-1] for part in self.signature.split(", "))


def _plus(x: Tensor, residual: Tensor | None) -> Tensor:
    if residual is not None and residual.shape != x.shape:
        raise ValueError(f"{tuple(residual.shape)} cannot be added to {tuple(x.shape)}.")
    return x


def _gated(x: Tensor, factor: Tensor) -> Tensor:
    pixels = [(images, x.shape[1], 1, 1) for images in (x.shape[0], 1)]
    if factor.shape not in (x.shape, *pixels):
        raise ValueError(
            f"the factor is {tuple(factor.shape)}, the image {tuple(x.shape)}. Give one of the "
            "same shape, or of one pixel for each image or for all."
        )
    return x


def _convolved(
    x: Tensor, weight: Tensor, bias: Any, residual: Any, stride: Any, padding: Any, *rest: Any
) -> Tensor:
    dilation, _ = rest
    filters = weight.expand(x.shape[1], 1, *weight.shape[-2:])
    y = F.conv2d(x, filters, bias, stride, padding, dilation, x.shape[1])
    return _plus(y, residual)


def _resized(x: Tensor, size: Sequence[int], *_: Any) -> Tensor:
    return x.new_empty((*x.shape[:2], *size))


def _normalized(x: Tensor, weight: Any, bias: Any, eps: float) -> Tensor:
    return F.layer_norm(x.movedim(1, -1), x.shape[1:2], weight, bias, eps).movedim(-1, 1)


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


_WINDOW = "Tensor x, int[2] size, int[2] stride, int[2] padding, bool ceil_mode"

OPERATORS = (
    LayerOperator(
        "depthwise",
        "Tensor x, Tensor weight, Tensor? bias, Tensor? residual, "
        "int[2] stride, int[2] padding, int[2] dilation, str activation",
        _convolved,
        _depthwise,
    ),
    LayerOperator(
        "max_pool",
        _WINDOW,
        lambda x, size, stride, padding, ceil: F.max_pool2d(x, size, stride, padding, 1, ceil),
        _max_pool,
    ),
    LayerOperator("avg_pool", f"{_WINDOW}, bool count_include_pad", F.avg_pool2d, _avg_pool),
    LayerOperator(
        "adaptive_avg_pool",
        "Tensor x, int[2] size",
        F.adaptive_avg_pool2d,
        lambda y, x, size: pooling.adaptive_avgpool_step(x, y),
    ),
    LayerOperator(
        "affine",
        "Tensor x, Tensor scale, Tensor? shift, Tensor? residual, str activation",
        lambda x, scale, shift, residual, _: _plus(torch.group_norm(x, 1, scale, shift), residual),
        _affine,
    ),
    LayerOperator(
        "activation",
        "Tensor x, str activation, float slope",
        lambda x, *_: x,
        lambda y, x, name, slope: elementwise.activation_step(x, y, named(name), slope=slope),
    ),
    LayerOperator(
        "add",
        "Tensor x, Tensor other, str activation",
        lambda x, other, _: _plus(x, other),
        lambda y, x, other, name: elementwise.add_step(x, other, y, activation=named(name)),
    ),
    LayerOperator(
        "multiply",
        "Tensor x, Tensor factor",
        _gated,
        lambda y, x, factor: elementwise.multiply_step(x, factor, y),
    ),
    LayerOperator(
        "linear",
        "Tensor x, Tensor weight, Tensor? bias, str activation",
        lambda x, weight, bias, _: F.linear(x, weight, bias),
        _linear,
    ),
    LayerOperator(
        "interleave",
        "Tensor[] parts",
        lambda parts: torch.stack(parts, 2).flatten(1, 2),
        lambda y, parts: copies.interleave_steps(parts, y),
    ),
    LayerOperator(
        "softmax",
        "Tensor x",
        lambda x: x.softmax(1),
        lambda y, x: normalize.softmax_step(x, y),
    ),
    LayerOperator(
        "layer_norm",
        "Tensor x, Tensor? weight, Tensor? bias, float eps",
        _normalized,
        lambda y, x, weight, bias, eps: normalize.layer_norm_step(x, y, weight, bias, eps=eps),
    ),
    LayerOperator(
        "nearest",
        "Tensor x, int[2] size",
        _resized,
        lambda y, x, _: resize.nearest_step(x, y),
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
    given = dict(zip(operator.arguments, arguments, strict=True))
    result = _empty(arguments, _shape(operator, given))
    if result.numel() == 0:
        return result
    y = view_of(result)
    assert y is not None
    seen = [_as_views(value) if name in _IMAGES else value for name, value in given.items()]
    try:
        made = operator.make(y, *seen)
    except RuntimeError as error:
        raise _refused(operator, error) from None
    _run_steps([made] if isinstance(made, Step) else list(made))
    return result


def _shape(operator: LayerOperator, given: dict[str, Any]) -> torch.Size:
    """The result's, once it is sure that the arguments fit together."""
    for name, value in given.items():
        if name in _IMAGES and value is not None:
            for image in [value] if isinstance(value, Tensor) else value:
                _check_image(operator, image)
        elif isinstance(value, list) and (len(value) != 2 or min(value) < (name != "padding")):
            raise InputError(f"nhwc::{operator.name}: {name} is {value}. Give two sizes.")
    try:
        shape = operator.means(*map(_without_numbers, given.values())).shape
    except (RuntimeError, ValueError, IndexError) as error:
        raise _refused(operator, error) from None
    if len(shape) not in (2, 4):
        raise InputError(f"nhwc::{operator.name}: the weight is a vector. Give a matrix.")
    return shape


def _check_image(operator: LayerOperator, image: Tensor) -> None:
    if image.ndim not in (2, 4) or not image.is_floating_point() or 0 in image.shape[2:]:
        raise InputError(
            f"nhwc::{operator.name} got an image of shape {tuple(image.shape)} and {image.dtype}; "
            "it needs floats of N, C, H, W."
        )


def _refused(operator: LayerOperator, error: Exception) -> InputError:
    return InputError(f"nhwc::{operator.name}: {first_line(error)}")


def _without_numbers(value: Any) -> Any:
    if isinstance(value, Tensor):
        dtype = torch.float32 if value.is_floating_point() else value.dtype
        return torch.empty(value.shape, dtype=dtype, device="meta")
    return [_without_numbers(one) for one in value] if isinstance(value, list) else value


def _as_views(value: Any) -> Any:
    if value is None:
        return None
    if isinstance(value, list | tuple):
        return [_as_views(one) for one in value]
    tensor = value.float()
    view = view_of(tensor)
    if view is None:
        view = view_of(
            to_format(
                tensor if tensor.ndim == 4 else tensor[:, :, None, None], Format.CHANNELS_LAST
            )
        )
    return view


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
    return _empty(arguments, operator.means(*arguments).shape)


def _empty(arguments: Sequence[Any], shape: torch.Size) -> Tensor:
    """A float32 tensor of this shape, channels last, for the first argument's device."""
    like = arguments[0][0] if isinstance(arguments[0], list | tuple) else arguments[0]
    if len(shape) == 2:
        return like.new_empty(shape, dtype=torch.float32)  # type: ignore[no-any-return]
    n, c, h, w = shape
    return like.new_empty((n, h, w, c), dtype=torch.float32).permute(0, 3, 1, 2)  # type: ignore[no-any-return]
