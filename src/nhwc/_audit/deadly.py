"""Stop before a convolution that would kill the process, and say which one it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
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
        if func in (torch.conv2d, torch.conv3d):
            _survived(*args, **kwargs)
        return func(*args, **kwargs)


def _survived(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> None:
    last = _taken_for_last(input) or _taken_for_last(weight)
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


def _taken_for_last(tensor: Tensor) -> bool:
    """Whether a convolution of torch's takes the strides for channels last.

    It looks at those of dimensions of size 1, too: at two tensors that lie alike it does not do
    the same, and one of `audit`'s copies may die where the model did not.

    >>> strides = (16, 1, 16, 16)
    >>> [_taken_for_last(torch.ones(6, 16, 1, 1).as_strided((6, 16, 1, 1), s))
    ...  for s in (strides, (16, 1, 1, 1))]
    [True, False]
    """
    if tensor.ndim not in (4, 5):
        return False
    least = 0
    for dim in (1, *range(tensor.ndim - 1, 1, -1), 0):
        size, stride = tensor.shape[dim], tensor.stride(dim)
        tied = dim == 0 and least == tensor.stride(1)
        if size == 0 or stride < least or stride == 0 or tied:
            return False
        least = stride * size
    return True


def _last(numbers: Any) -> int:
    """What an argument says of a row: it is one number for all dimensions, or one for each."""
    return int(numbers[-1]) if isinstance(numbers, (tuple, list)) else int(numbers)
