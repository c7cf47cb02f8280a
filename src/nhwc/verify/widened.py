"""Run a model in float64, on a copy that takes little more memory than it must.

All weights in float64 take twice the memory of the model, but they are needed one after the other.
So the large ones are made when the module that holds them begins to run, and dropped when it ends.

In float64 torch writes out what each output pixel of a convolution sees, 27 copies of a volume for
filters of 3x3x3, and in twice the bytes. So convolutions compute some rows or frames at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..machine.host_memory import apart
from ..models.preserve import copy_as_is
from ..models.trees import tensors_of
from ..operators.windows import sides_of

_LARGE = 1 << 16
"""A weight of at least this many numbers is widened anew for each run of its module."""


_WINDOWS = 1 << 26
"""The bytes that what some rows or frames see may take."""


class _Missing(BaseException):
    """A weight was used that is not there; no Exception, or a model might catch it and go on."""


class _Absent(nn.Parameter):
    """Stands for a weight that is not there: it has shape and type, and computing with it raises.

    A tensor on the meta device would not do: a matrix product with one may return anything.
    """

    @staticmethod
    def of(parameter: nn.Parameter) -> _Absent:
        nothing = torch.full((), math.nan, dtype=torch.float64, device=parameter.device)
        data = nothing.expand(parameter.shape)
        made: Any = torch.Tensor._make_subclass(_Absent, data, parameter.requires_grad)
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.__name__ not in _HARMLESS:
            raise _Missing(f"{func.__name__} of a weight that is not there")
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return args[0] if isinstance(result, Tensor) else result


_HARMLESS = {
    *("__get__", "__set__", "__hash__", "data_ptr", "dim", "double", "is_floating_point", "numel"),
    *("requires_grad_", "size", "stride", "_has_compatible_shallow_copy_type"),
}
"""Functions that need no numbers of a weight."""

_Originals = dict[int, tuple[_Absent, Tensor]]


def run_in_float64(model: nn.Module, run: Callable[[nn.Module], Any]) -> Any:
    """Return what `run` makes of a copy of `model` in float64, through which no gradient flows.

    >>> run_in_float64(nn.Linear(300, 300), lambda wide: wide(torch.ones(1, 300).double()).dtype)
    torch.float64
    """
    wide = None
    try:
        wide, absent = _by_turns(model)
        if absent:
            return run(wide)
    except (Exception, _Missing):
        # A module may have read the weights of another one, or its own while it was copied: have
        # all of them all the time.
        del wide
        wide = widened(model)
    return run(wide)


def widened(model: nn.Module) -> nn.Module:
    """A copy of `model` in float64, made without one in its own precision on the way.

    >>> widened(nn.Linear(2, 2)).weight.dtype
    torch.float64
    """
    return _copied(model, {})


def _by_turns(model: nn.Module) -> tuple[nn.Module, bool]:
    """A copy whose large weights exist only while their modules run, and whether it has any."""
    memo: dict[int, Any] = {}
    originals: _Originals = {}
    compiled = any(
        hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None)
        for module in model.modules()
    )
    for parameter in () if compiled else model.parameters():
        if parameter.is_floating_point() and parameter.numel() >= _LARGE:
            stand_in = _Absent.of(parameter)
            memo[id(parameter)] = stand_in
            originals[id(stand_in)] = stand_in, parameter.detach()
    wide = _copied(model, memo)
    for module in wide.modules():
        if any(id(p) in originals for part in _read_by(module) for p in part._parameters.values()):
            _widen_while_running(module, originals)
    return wide, bool(originals)


def _read_by(module: nn.Module) -> list[nn.Module]:
    """The modules whose weights a module's code may read: itself, and children without children."""
    if type(module) is nn.Sequential:
        return []
    return [module, *(part for part in module.children() if not [*part.children()])]


def _widen_while_running(module: nn.Module, originals: _Originals) -> None:
    calls: list[list[tuple[Any, str, _Absent]]] = []

    # A hook that held its module would keep it until the next garbage collection.
    def begin(module: nn.Module, *_: Any) -> None:
        calls.append([])
        for part in _read_by(module):
            for name, stand_in in part._parameters.items():
                if id(stand_in) in originals:
                    stand_in, own = originals[id(stand_in)]
                    calls[-1].append((part._parameters, name, stand_in))
                    wide = nn.Parameter(apart(own, torch.float64), stand_in.requires_grad)
                    part._parameters[name] = wide

    def end(*_: Any) -> None:
        for slots, name, stand_in in calls.pop():
            slots[name] = stand_in

    module.register_forward_pre_hook(begin, prepend=True)
    module.register_forward_hook(end, always_call=True)


def _copied(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    for parameter in model.parameters():
        if (kind := wide_type(parameter)) and id(parameter) not in memo:
            wide = parameter.detach().to(kind, copy=True)
            memo[id(parameter)] = nn.Parameter(wide, parameter.requires_grad)
    for buffer in model.buffers():
        if kind := wide_type(buffer):
            memo[id(buffer)] = buffer.detach().to(kind, copy=True)
    # Code may keep others, in a list or a dict: a table of positions, say.
    for module in model.modules():
        for value in tensors_of(vars(module)):
            if (kind := wide_type(value)) and id(value) not in memo:
                memo[id(value)] = value.detach().to(kind, copy=True)
    made = copy_as_is(model, memo).double()
    for module in made.modules():
        found: Any = module
        plain = type(module) in (nn.Conv2d, nn.Conv3d) and "_conv_forward" not in vars(module)
        if plain and not isinstance(found.padding, str):
            found._conv_forward = _Sliced.of(found)
    return made


@dataclass(frozen=True)
class _Sliced:
    """A convolution that computes some rows or frames at a time.

    It does not hold its module, which would then live until the next garbage collection. `around`
    are pixels in torch's order, the last side first.
    """

    mode: str
    around: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @classmethod
    def of(cls, module: nn.Conv2d | nn.Conv3d) -> _Sliced:
        zeros = module.padding_mode == "zeros"
        count = len(module.kernel_size)
        first, *others = map(int, sides_of(module.padding, count if zeros else 1))
        if zeros:
            mode, around, left = "constant", (*[0] * 2 * len(others), first, first), (0, *others)
        else:
            mode, left = module.padding_mode, (0,) * (1 + len(others))
            around = tuple(n for side in reversed((first, *others)) for n in (side, side))
        stride, dilation = (sides_of(one, count) for one in (module.stride, module.dilation))
        return cls(mode, around, stride, left, dilation, module.groups)

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        alone = x.ndim < weight.ndim
        x = F.pad(x[None] if alone else x, self.around, self.mode)
        step, length = self.stride[0], self.dilation[0] * (weight.shape[2] - 1) + 1
        count = max(1, (x.shape[2] - length) // step + 1)
        seen = 8 * weight[0].numel() * self.groups * x[:, 0, 0].numel()
        some = max(1, _WINDOWS // max(1, seen))
        parts = []
        for first in range(0, count, some):
            last = min(first + some, count) - 1
            part = x[:, :, first * step : last * step + length]
            parts.append(self._convolved(part, weight, bias))
        result = torch.cat(parts, 2)
        return result[0] if alone else result

    def _convolved(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        geometry: Any = (self.stride, self.padding, self.dilation, self.groups)
        if weight.ndim == 5:
            return torch.conv3d(x, weight, bias, *geometry)
        return torch.conv2d(x, weight, bias, *geometry)


def wide_type(tensor: Tensor) -> torch.dtype | None:
    """The type with twice the digits, or None for integers and booleans.

    >>> wide_type(torch.ones(1)), wide_type(torch.ones(1, dtype=torch.complex64))
    (torch.float64, torch.complex128)
    """
    if tensor.is_complex():
        return torch.complex128
    return torch.float64 if tensor.is_floating_point() else None
