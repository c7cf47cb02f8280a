"""Norms and softmax: of the channels of each pixel, of groups of them, of whole images."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from ...graph import bound
from ...graph.modules.mended import InstanceNorm
from ...kernels.layers.activations import Activation
from ...kernels.layers.group_norm import group_norm_steps, pieces_of
from ...kernels.layers.normalize import layer_norm_step, softmax_step
from ...kernels.layers.response import response_steps
from ...kernels.layers.unit import unit_channel_steps, unit_step
from ...kernels.programs.builder import Buffer, Builder, four
from ...kernels.programs.moved import Moved, as_image, channels_of, settled
from ..implementation import Implementation
from ..recording import Record
from ..specs import Layer
from .arithmetic import is_ordinary
from .calls import OperatorCall, computing
from .rows import as_it_lies, rowwise
from .windows import Make

_UNIT = ("input", "p", "dim", "eps", "out")
"""The arguments of `F.normalize`."""


def layer_norm(call: OperatorCall) -> Implementation | None:
    """Normalize over the last dimension, which holds the channels of each row."""
    module, shape = call.module, call.out.shape
    if len(shape) > 3 or tuple(module.normalized_shape) != shape[-1:]:
        return None
    return call.steps(norm_step(module))


def channel_norm(call: OperatorCall) -> Implementation | None:
    """Layer norm over the channels of each pixel."""
    return call.on_images(norm_step(call.module))


def spelled_norm(call: OperatorCall) -> Implementation | None:
    """Layer norm over the channels of each pixel, as a model spelled it."""
    step = spelled_step(call)
    return call.on_pixels(step) if step and call.is_channels(call.module.dim) else None


def spelled_step(call: OperatorCall) -> Make | None:
    """The step of a spelled norm; none if its weights lie along another dimension, or widen it."""
    module, shape = call.module, call.out.shape
    if call.seen(0).shape != shape:
        return None
    dim = module.dim % len(shape)
    sides = (shape[dim], *(1,) * (len(shape) - 1 - dim))
    norm = [one for one in (module.weight, module.bias) if one is not None]
    if any(tuple(one.shape)[-len(sides) :] != sides or one.numel() != shape[dim] for one in norm):
        return None
    rows = [None if one is None else one.flatten() for one in (module.weight, module.bias)]
    return lambda x, y: layer_norm_step(x, y, *rows, eps=module.eps)


def norm_step(module: Any) -> Make:
    """The step of a layer norm over the channels, or of a norm by their root mean square."""
    centred = not isinstance(module, nn.RMSNorm)
    norm = (module.weight, module.bias if centred else None)
    eps = torch.finfo(torch.float32).eps if module.eps is None else module.eps
    return lambda x, y: layer_norm_step(x, y, *norm, eps=eps, centred=centred)


def over_root(call: OperatorCall) -> Implementation | None:
    """`over_root_mean_square` of the channels of each pixel."""
    _, dim, eps = call.node.args
    return call.on_pixels(root_step(eps)) if call.is_channels(dim) else None


def root_step(eps: Any) -> Make:
    return lambda x, y: layer_norm_step(x, y, eps=eps, centred=False)


def group_norm(call: OperatorCall) -> Implementation | None:
    """Group norm, or instance norm, which has a group for each channel."""
    return normed_in_groups(call, call.module)


def normed_in_groups(
    call: OperatorCall, module: Any, activation: Activation = Activation.NONE, slope: float = 0.0
) -> Implementation | None:
    """What `module` makes of the first input, the second added, if there is one; then activated."""
    shape, places = call.out.shape, call.places()
    if any(call.seen(number).shape != shape for number in range(len(places))):
        return None
    norm = module if isinstance(module, nn.GroupNorm) else module.norm
    # An instance norm takes a single image, too, whose channels are its first dimension.
    single = module.single if isinstance(module, InstanceNorm) else None
    if len(call.record.values[call.node].shape) == single:
        return None
    n, c, h, w = four(shape)
    groups = norm.num_groups if isinstance(norm, nn.GroupNorm) else c
    # torch refuses to normalize a single number.
    if len(shape) not in (4, 5) or h * w * (c // groups) == 1:
        return None
    steps = partial(
        group_norm_steps,
        groups=groups,
        weight=norm.weight,
        bias=norm.bias,
        eps=norm.eps,
        activation=activation,
        slope=slope,
    )

    def emit(builder: Builder, constants: None, *given: Buffer) -> Buffer:
        x, *residual = (given[place] for place in places)
        pieces = builder.buffer((n * pieces_of(c, h * w), 2 * c))
        means, y = builder.buffer((n, 2 * c)), builder.buffer(shape)
        builder.add(steps, x, pieces, means, y, *residual)
        return y

    return computing(emit)


def response(call: OperatorCall) -> Implementation | None:
    """Global response norm of images; those whose channels are last in their shape, as they lie."""
    shape, module = call.out.shape, call.module
    if len(shape) != 4 or call.seen(0).shape != shape:
        return None

    def emit(builder: Builder, constants: None, x: Buffer) -> Buffer:
        return _responded(builder, x, module)

    def emit_last(builder: Builder, constants: None, x: Moved) -> Moved:
        image = settled(builder, Moved(x.buffer, x.where.movedim(-1, 1)))
        y = as_image(_responded(builder, image, module), image.shape)
        return Moved(y.buffer, y.where.movedim(1, -1))

    return as_it_lies(call.record, call.layer, emit_last) if module.last else computing(emit)


def _responded(builder: Builder, x: Buffer, module: Any) -> Buffer:
    n, c, h, w = x.shape
    steps = partial(response_steps, weight=module.weight, bias=module.bias, eps=module.eps)
    pieces = builder.buffer((n * pieces_of(c, h * w), c))
    factors, y = builder.buffer((n, c)), builder.buffer(x.shape)
    builder.add(steps, x, pieces, factors, y)
    return y


def normalize(call: OperatorCall) -> Implementation | None:
    """`F.normalize` of each pixel's channels, by the norm of order 2."""
    eps = unit_eps(call)
    if eps is None or not call.is_channels(bound(call.node, _UNIT).get("dim", 1)):
        return None
    return call.on_pixels(lambda x, y: unit_step(x, y, eps=eps))


def unit_along(record: Record, layer: Layer, dim: int, eps: float) -> Implementation:
    """`F.normalize` over one dimension of tokens: along their rows, or over the rows of images.

    Attention of channels to channels normalizes each channel over all tokens.
    """
    along_rows = rowwise(record, layer, partial(unit_step, eps=eps), dim)

    def emit(builder: Builder, constants: None, x: Moved) -> Moved:
        image = channels_of(builder, Moved(x.buffer, x.where.movedim(dim, -1)))
        if image is None:
            assert along_rows.emit is not None
            rows: Moved = along_rows.emit(builder, constants, x)
            return rows
        n, c, h, _ = image.shape
        pieces, factors = builder.buffer((n * pieces_of(c, h), c)), builder.buffer((n, c))
        y = builder.buffer(image.shape)
        builder.add(partial(unit_channel_steps, eps=eps), image, pieces, factors, y)
        lines = as_image(y, (n, c, h, 1)).where
        return Moved(y, lines.reshape(x.where.movedim(dim, -1).shape).movedim(-1, dim))

    return as_it_lies(record, layer, emit)


def unit_eps(call: OperatorCall) -> float | None:
    """The least length that `F.normalize` divides by, if it divides by lengths as we do."""
    given = bound(call.node, _UNIT)
    plain = given.get("p", 2.0) == 2 and given.get("out") is None
    eps = given.get("eps", 1e-12)
    return eps if plain and type(eps) is float and is_ordinary(eps) else None


def softmax(call: OperatorCall) -> Implementation | None:
    """Of each pixel's channels, by a function; or its logarithm."""
    given = bound(call.node, ("input", "dim"))
    over_channels = call.is_channels(given.get("dim")) and given.keys() <= {"input", "dim"}
    return call.on_pixels(softmax_like(call.name == "log_softmax")) if over_channels else None


def softmax_of_module(call: OperatorCall) -> Implementation | None:
    make = softmax_like(call.module.logarithm)
    return call.on_pixels(make) if call.is_channels(call.module.dim) else None


def softmax_like(logarithm: bool) -> Make:
    return partial(softmax_step, logarithm=logarithm)
