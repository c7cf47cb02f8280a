"""Stop before a convolution that would kill the process, and say which one it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format
from torch.overrides import TorchFunctionMode

from ..errors import ModelFailed
from ..operators.unseen import sees_no_column


class NoDeath(TorchFunctionMode):
    """Raise `ModelFailed` where the next convolution is one that torch does not survive."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "overloadpacket", func) in _CONVOLUTIONS:
            _survived(*args, **kwargs)
        return func(*args, **kwargs)


_CONVOLUTIONS = (torch.conv2d, torch.conv3d, torch.ops.aten.conv2d, torch.ops.aten.conv3d)
"""As code calls them, and as graphs of torch.export do."""


def _survived(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> None:
    batch = input if input.ndim == weight.ndim else input[None]
    # By torch's own rule, which looks at the strides of dimensions of size 1, too.
    last = any(suggest_memory_format(one) in _LAST for one in (batch, weight))
    if bias is None or not last or input.device.type != "cpu":
        return
    size, dilation = weight.shape[-1], _last(dilation)
    if isinstance(padding, str):
        padding = dilation * (size - 1) // 2 if padding == "same" else 0
    window = {"stride": _last(stride), "padding": _last(padding), "dilation": dilation}
    if sees_no_column(input.shape[-1], size, **window):
        raise ModelFailed(
            f"a convolution with weights {tuple(weight.shape)} on an input "
            f"{tuple(input.shape)} has all of its taps in the padding, in each column, and torch "
            "may die of that in channels last. Give a wider input, or pad less; in NCHW, "
            "audit(..., convert=False) looks at it."
        )


_LAST = (torch.channels_last, torch.channels_last_3d)


def _last(numbers: Any) -> int:
    """What an argument says of a row: it is one number for all dimensions, or one for each."""
    return int(numbers[-1]) if isinstance(numbers, (tuple, list)) else int(numbers)
