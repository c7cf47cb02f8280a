"""What a kernel of ours is to a plan, and what it understands of a layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...kernels.layers.activations import Activation as Code
from ...kernels.programs.builder import Buffer, Builder
from ..specs import Activation

Constants = tuple[Tensor, "Tensor | None"]
Emit = Callable[..., Any]
"""Called with a builder, the layer's constants, packed, and its inputs' buffers."""


def _as_they_are(constants: Constants | None) -> Any:
    return constants


@dataclass(frozen=True)
class Native:
    """One of our kernels for a layer; `free` if within a program it only says where data lies.

    `emit` is given what `pack` makes of the layer's constants, which programs may share.
    """

    name: str
    exact: bool
    emit: Emit
    free: bool = False
    pack: Callable[[Constants | None], Any] = _as_they_are


def code_of(activation: Activation | None) -> tuple[Code, float] | None:
    """Our kernels' number for an activation, and its slope; None for one they lack.

    >>> code_of(Activation("hardtanh", (0.0, 6.0)))
    (<Activation.RELU6: 2>, 0.0)
    """
    if activation is None:
        return Code.NONE, 0.0
    if activation == Activation("hardtanh", (0.0, 6.0)):
        return Code.RELU6, 0.0
    if activation.name.upper() not in Code.__members__:
        return None
    return Code[activation.name.upper()], (*activation.numbers, 0.0)[0]


def one_step(shape: Sequence[int], step: Callable[..., Any], **settings: Any) -> Emit:
    """Add `step(x, y, *constants, residual=..., **settings)`."""

    def emit(builder: Builder, constants: Constants, x: Buffer, *residual: Buffer) -> Buffer:
        y = builder.buffer(shape)

        def make(x: Any, y: Any, *more: Any) -> Any:
            return step(x, y, *constants, residual=more[0] if more else None, **settings)

        builder.add(make, x, y, *residual)
        return y

    return emit
