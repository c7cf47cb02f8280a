"""One operator of the user's own, checked like torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..errors import InputError, advice_on
from ..models.preserve import undrawn
from ..shown import first_line
from .cases import summarize
from .probe import probe
from .samples import Sample, can_tell, describe
from .speed import time_samples
from .table import Operator


def check_operator(
    function: Callable[..., Any],
    *inputs: Any,
    name: str | None = None,
    timed: bool = False,
    **kwargs: Any,
) -> Operator:
    """Say what happens to channels last in `function`, called with these inputs.

    >>> import torch
    >>> def sharpen(x):
    ...     return x.contiguous() * 2
    >>> found = check_operator(sharpen, torch.rand(2, 8, 5, 7))
    >>> found.outcome()
    <Outcome.LOSES: 'loses'>
    >>> found.reason
    '2x8x5x7; aten::clone returns contiguous 2x8x5x7, strides (280, 35, 7, 1); inside, ...'

    It runs in this process, in both formats, forward and backward. The inputs are copied.
    """
    name = name or str(getattr(function, "__name__", function))
    if isinstance(function, type) and issubclass(function, nn.Module):
        raise InputError(
            f"operator {name} is a class of modules. Give a function of tensors that calls one."
        )
    args, kwargs = tree_map(_leaf, (tuple(inputs), kwargs))
    sample = _Given(function, args, kwargs)
    if not sample.dims:
        raise InputError(
            f"operator {name} got {describe(sample) or 'no tensor'}: no 4-D or 5-D input there has "
            "one format at a time. Pass one with every size above 1, such as 2x8x5x7."
        )
    dtype = str(next(t.dtype for t in sample.tensors if t.ndim == sample.dims)).partition(".")[2]
    device = next(t.device for t in sample.tensors if t.ndim == sample.dims)
    with undrawn():
        cases = list(probe(name, sample))
        if not cases:
            raise InputError(f"operator {name} fails in NCHW already: {_failure(sample)}")
        speeds = tuple(time_samples([sample], str(device), dtype)) if timed else ()
    return Operator(name, "", "custom", summarize(cases, dtype), speeds)


class _Given(Sample):
    """A call of the user's, in which the image need not come first."""

    @property
    def dims(self) -> int:
        return next((t.ndim for t in self.tensors if can_tell(t) and min(t.shape) > 1), 0)


def _leaf(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    copy = value.detach().clone()
    return copy.requires_grad_(copy.is_floating_point())


def _failure(sample: Sample) -> str:
    try:
        sample.call(*sample.args, **sample.kwargs)
    except Exception as error:
        said = f"{type(error).__name__}: {first_line(error).rstrip('.')}"
        return f"{said}. {advice_on(error, 'Check its inputs.')}"
    return "its results could not be compared"
