"""Stop before a convolution that would kill the process, or may, and say which one it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from ..errors import ModelFailed
from ..models.modes import OperatorMode
from ..operators.overrun import overruns
from ..operators.unseen import sees_no_column


class NoDeath(OperatorMode):
    """Raise `ModelFailed` where the next convolution is one that torch does not survive.

    It is `found`, too: TorchScript makes another error of it, and code of the model may catch it.
    """

    found: ModelFailed | None = None
    supports_higher_order_operators = True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        packet = getattr(func, "overloadpacket", None)
        try:
            if packet in _CONVOLUTIONS or (packet in _OF_EITHER_WAY and not args[6]):
                _survived(*args[:6])
            elif packet is torch.ops.aten.convolution_backward and args[10][1] and not args[7]:
                _fits(*(args[i] for i in (1, 2, 4, 5, 9)))
        except ModelFailed as error:
            self.found = error
            raise
        return func(*args, **(kwargs or {}))


_CONVOLUTIONS = (torch.ops.aten.conv2d, torch.ops.aten.conv3d)
"""As torch leaves them in inference mode."""

_OF_EITHER_WAY = (torch.ops.aten.convolution, torch.ops.aten._convolution)
"""As it calls them elsewhere, and as decomposed graphs and traces do; some are transposed."""


def _survived(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
) -> None:
    if bias is None or input.device.type != "cpu":
        return
    size, dilation = weight.shape[-1], _last(dilation)
    if isinstance(padding, str):
        padding = dilation * (size - 1) // 2 if padding == "same" else 0
    window = {"stride": _last(stride), "padding": _last(padding), "dilation": dilation}
    batch = input if input.ndim == weight.ndim else input[None]
    if sees_no_column(input.shape[-1], size, **window) and _is_any_last(batch, weight):
        raise ModelFailed(
            f"a convolution with weights {tuple(weight.shape)} on an input "
            f"{tuple(input.shape)} has all of its taps in the padding, in each column, and torch "
            "may die of that in channels last. Give a wider input, or pad less; in NCHW, "
            "audit(..., convert=False) looks at it."
        )


def _fits(image: Tensor, weight: Tensor, stride: Any, padding: Any, groups: int) -> None:
    """Refuse a weight gradient that torch may write past its memory."""
    plain = image.device.type == "cpu" and image.dtype is torch.float32
    window = {"stride": stride, "padding": padding, "groups": groups}
    if plain and overruns(weight.shape, **window) and _is_any_last(image, weight):
        raise ModelFailed(
            f"the weight gradient of a convolution with weights {tuple(weight.shape)} and stride "
            f"{tuple(stride)} may be written past its memory by torch on a CPU in channels last. "
            "In NCHW, audit(..., convert=False) looks at it; or leave out backward."
        )


def _is_any_last(*tensors: Tensor) -> bool:
    """Whether one is in channels last by torch's own rule, which looks at the strides of dimensions
    of size 1, too; and whose first use imports sympy."""
    return any(suggest_memory_format(one) in _LAST for one in tensors)


_LAST = (torch.channels_last, torch.channels_last_3d)


def _last(numbers: Any) -> int:
    """What an argument says of a row: it is one number for all dimensions, or one for each."""
    return int(numbers[-1]) if isinstance(numbers, (tuple, list)) else int(numbers)
