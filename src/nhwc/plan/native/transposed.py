"""Transposed convolutions of images, volumes, and signals as images of one row."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from torch import fx, nn

from ...graph.modules.folded import (
    FoldedConvTranspose1d,
    FoldedConvTranspose2d,
    FoldedConvTranspose3d,
    PromotedConvTranspose1d,
    PromotedConvTranspose2d,
    PromotedConvTranspose3d,
)
from ...kernels.convolutions.transposed import (
    Transposed,
    few_rows_steps,
    has_few_filters,
    has_transforms,
    pack_few_rows,
    pack_transposed,
    transposed_steps,
)
from ...kernels.layers.activations import Activation
from ...kernels.layers.elementwise import add_step
from ...kernels.programs.builder import Buffer, Builder
from ..implementation import Implementation
from .calls import OperatorCall, computing
from .weighted import ours

TRANSPOSED = (
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    FoldedConvTranspose2d,
    FoldedConvTranspose3d,
    PromotedConvTranspose2d,
    PromotedConvTranspose3d,
)
OF_SIGNALS = (nn.ConvTranspose1d, FoldedConvTranspose1d, PromotedConvTranspose1d)


def transposed(call: OperatorCall) -> tuple[Implementation, ...]:
    """A transposed convolution, of one input."""
    return convolved(call, call.module) if len(call.places()) == 1 else ()


def convolved(
    call: OperatorCall, module: Any, activation: Activation = Activation.NONE, slope: float = 0.0
) -> tuple[Implementation, ...]:
    """What `module` makes of the first input, the second added, if there is one; then activated."""
    x, y, places = call.seen(0).shape, call.out.shape, call.places()
    alone = all(isinstance(one, fx.Node) for one in call.node.args) and not call.node.kwargs
    alone = alone and all(call.seen(number).shape == y for number in range(1, len(places)))
    rank = len(call.record.values[call.node].shape)
    if not alone or rank != module.weight.ndim or len(x) < 4:
        return ()
    image = (1,) * (3 - len(module.kernel_size))
    spec = Transposed(
        _deep(x),
        _deep(y),
        size=(*image, *module.kernel_size),
        stride=(*image, *module.stride),
        padding=(*(0 for _ in image), *module.padding),
        dilation=(*image, *module.dilation),
        groups=module.groups,
    )

    # What is added comes before the activation.
    last: dict[str, Any] = {"activation": activation, "slope": slope}
    spec = spec if len(places) == 2 else replace(spec, **last)

    def emit(
        builder: Builder, constants: None, *given: Buffer, few: bool = False, exact: bool = True
    ) -> Buffer:
        x, *residual = (given[place] for place in places)
        weight = module.weight.view(*module.weight.shape[:2], *image, *module.kernel_size)
        result = builder.buffer(y)
        if few:
            rows = pack_few_rows(spec, weight, module.bias)
            builder.add(partial(few_rows_steps, spec, rows), x, builder.dense(result))
        else:
            parts = pack_transposed(spec, weight, module.bias, exact=exact)
            stacked = builder.buffer(spec.stacked)
            builder.add(partial(transposed_steps, spec, parts), x, stacked, result)
        if not residual:
            return result
        added = builder.buffer(y)
        builder.add(partial(add_step, **last), result, *residual, added)
        return added

    found = [computing(emit)]
    if has_few_filters(spec):
        found.append(ours("nhwc few", partial(emit, few=True), exact=False))
    if has_transforms(spec):
        found.append(ours("nhwc winograd", partial(emit, exact=False), exact=False))
    return tuple(found)


def _deep(shape: tuple[int, ...]) -> Any:
    """The shape of a volume, or of an image as a volume of one frame."""
    return shape if len(shape) == 5 else (*shape[:2], 1, *shape[2:])
