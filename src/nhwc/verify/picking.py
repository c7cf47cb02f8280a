"""Does a model sort, pick or round? Then two right ones may answer otherwise."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..models.modes import OperatorMode
from . import answer


def picks(func: Any) -> bool:
    """Whether this operator picks among numbers, so that its choice jumps where two nearly tie."""
    return func._overloadpacket.__name__ in _PICKING


class _Decisions(OperatorMode):
    """Notices operators whose results jump where the numbers that they are given hardly differ."""

    def __init__(self, comparing: bool) -> None:
        super().__init__()
        self._comparing = comparing
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found = (
            self.found
            or picks(func)
            or _jumps(func, args, kwargs or {})
            or (self._comparing and func._overloadpacket.__name__ in _COMPARING)
        )
        return func(*args, **(kwargs or {}))


def _jumps(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operator rounds, or says where the largest number lies."""
    name = func._overloadpacket.__name__.removesuffix("_")
    if name == "_to_copy" and kwargs.get("dtype") is not None:
        kind, was = kwargs["dtype"], args[0].dtype
        whole = not (kind.is_floating_point or kind.is_complex)
        return was.is_floating_point and (whole or kind.itemsize < was.itemsize)
    found = name in _ROUNDING or (name in ("max", "min") and func._overloadname == "dim")
    return found or kwargs.get("rounding_mode") is not None


_PICKING = frozenset(
    ("topk", "sort", "argsort", "argmax", "argmin", "kthvalue", "median", "mode", "nms")
)
_COMPARING = frozenset(("gt", "ge", "lt", "le", "eq", "ne"))
_ROUNDING = frozenset(
    (
        *("round", "floor", "ceil", "trunc", "sign", "frac"),
        *("nonzero", "searchsorted", "bucketize", "floor_divide", "remainder", "fmod"),
        *("cummax", "cummin", "nanmedian", "_unique2", "unique_dim"),
    )
)


def decides(model: nn.Module, inputs: tuple[Any, ...], *, comparing: bool = False) -> bool:
    """Whether the model sorts, picks or rounds numbers: two right ones may answer otherwise.

    If `comparing`, one that compares numbers decides, too, though it may be no more than a ReLU.

    >>> import torch
    >>> decides(nn.ReLU(), (torch.ones(3),)), decides(nn.Threshold(0, 0), (torch.ones(3),))
    (False, False)
    >>> class Largest(nn.Module):
    ...     def forward(self, x):
    ...         return x.topk(2).values
    >>> decides(Largest(), (torch.ones(3),))
    True
    """
    with _Decisions(comparing) as seen:
        answer(model, inputs)
    return bool(seen.found)
