"""Transposed convolutions of images and volumes."""

from __future__ import annotations

from functools import partial
from typing import Any

from ...kernels.convolutions.transposed import Transposed, pack_transposed, transposed_steps
from ...kernels.programs.builder import Buffer, Builder
from ..implementation import Implementation
from .calls import OperatorCall, computing


def transposed(call: OperatorCall) -> Implementation | None:
    """A transposed convolution whose filters are neither grouped nor dilated."""
    module, x, y = call.module, call.seen(0).shape, call.out.shape
    alone = len(call.node.args) == 1 and not call.node.kwargs
    plain = module.groups == 1 and {*module.dilation} == {1}
    if not alone or not plain or len(x) != module.weight.ndim:
        return None
    image = (1,) if len(x) == 4 else ()
    spec = Transposed(
        _deep(x),
        _deep(y),
        size=(*image, *module.kernel_size),
        stride=(*image, *module.stride),
        padding=(*(0 for _ in image), *module.padding),
    )

    def emit(builder: Builder, constants: None, x: Buffer) -> Buffer:
        weight = module.weight if module.weight.ndim == 5 else module.weight.unsqueeze(2)
        packed = pack_transposed(spec, weight, module.bias)
        stacked, result = builder.buffer(spec.stacked), builder.buffer(y)
        builder.add(partial(transposed_steps, spec, packed), x, stacked, result)
        return result

    return computing(emit)


def _deep(shape: tuple[int, ...]) -> Any:
    """The shape of a volume, or of an image as a volume of one frame."""
    return shape if len(shape) == 5 else (*shape[:2], 1, *shape[2:])
