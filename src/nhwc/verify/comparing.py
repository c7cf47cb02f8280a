"""Hold two answers against the truth: each output's error, and what it may be."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch import Tensor

FACTOR = 10.0
"""A rewritten model may err this many times as much as eager does."""

_FLOOR = 8.0
"""Errors under this many roundings pass: on a tiny model eager's own may happen to be zero."""

_PIECE = 1 << 22
"""How many numbers are compared at once."""


@dataclasses.dataclass(frozen=True)
class Check:
    """One output tensor on one input; errors are relative to the largest value of the output.

    They are errors if it was held against a float64 run, and else a difference from the original.
    """

    input: int
    output: str
    error: float
    eager_error: float
    allowed: float
    reason: str = ""
    in_float64: bool = True

    @property
    def passed(self) -> bool:
        return not self.reason and self.error <= self.allowed


def lost_nans(before: dict[str, Any], after: dict[str, Any]) -> Iterator[Check]:
    """A failed check for each output that has finite numbers where `before` has NaN.

    Its other numbers are not compared: kernels may spread NaN.
    """
    for path in before:
        old, new = map(numbers, (before[path], after.get(path)))
        if not isinstance(old, Tensor) or not isinstance(new, Tensor) or old.shape != new.shape:
            continue
        # Torch does not say of each type of 8 bits which of its numbers are finite.
        new = new.double() if new.is_floating_point() else new
        lost = int((old.isnan() & new.isfinite()).sum())
        if lost:
            reason = f"{lost} of {old.numel()} numbers are finite where the model answers NaN"
            yield Check(0, f"{path}, for NaN", math.inf, 0.0, 0.0, reason)


def compare(
    index: int, before: dict[str, Any], after: dict[str, Any], exact: dict[str, Any], wide: bool
) -> Iterator[Check]:
    """Compare both answers with `exact`, which is in float64 if `wide`."""
    if list(before) != list(after):
        reason = f"the outputs are {sorted(after)}, they were {sorted(before)}"
        yield Check(index, "output", math.inf, 0.0, 0.0, reason)
        return
    for path in before:
        old, new = map(numbers, (before[path], after[path]))
        if not isinstance(old, Tensor) or not isinstance(new, Tensor):
            if not _equal(old, new):
                reason = f"{str(new)[:40]} where it was {str(old)[:40]}"
                yield Check(index, path, math.inf, 0.0, 0.0, reason)
        elif old.shape != new.shape or old.dtype != new.dtype:
            reason = f"{new.dtype} {tuple(new.shape)} where it was {old.dtype} {tuple(old.shape)}"
            yield Check(index, path, math.inf, 0.0, 0.0, reason)
        elif not (old.is_floating_point() or old.is_complex()):
            wrong = float((old != new).double().mean()) if old.numel() else 0.0
            yield Check(index, path, wrong, 0.0, 0.0, in_float64=wide)
        else:
            eager = _relative(old, numbers(exact[path])) if wide else 0.0
            # Without a float64 run, deep networks differ by a few hundred roundings.
            floor = torch.finfo(old.dtype).eps * (_FLOOR if wide else 32 * _FLOOR)
            allowed = FACTOR * max(eager, floor)
            error = _relative(new, numbers(exact[path]))
            yield Check(index, path, error, eager, allowed, in_float64=wide)


def numbers(value: Any) -> Any:
    """A number, an array of numpy's or a tensor of another kind as a plain tensor.

    >>> numbers(numpy.ones(2)), numbers("a text")
    (tensor([1., 1.], dtype=torch.float64), 'a text')
    """
    if isinstance(value, numpy.ndarray | numpy.generic):
        # Torch has none of texts and of objects.
        with contextlib.suppress(TypeError):
            return torch.tensor(value.copy())
    if not isinstance(value, Tensor):
        return torch.tensor(value) if type(value) in (float, complex) else value
    if value.is_quantized:
        return value.dequantize()
    return value if value.layout is torch.strided else value.to_dense()


def _relative(value: Tensor, truth: Tensor) -> float:
    """The largest difference, over the largest finite value; NaN and infinities must coincide."""
    scale = difference = 0.0
    for one, true in zip(_pieces(value), _pieces(truth), strict=True):
        finite = torch.isfinite(true)
        if not torch.equal(finite, torch.isfinite(one)):
            return math.inf
        if not torch.equal(one[~finite].nan_to_num(0.0), true[~finite].nan_to_num(0.0)):
            return math.inf
        if finite.any():
            scale = max(scale, true[finite].abs().max().item())
            difference = max(difference, (one[finite] - true[finite]).abs().max().item())
    return difference / scale if scale else difference


def _pieces(value: Tensor) -> Iterator[Tensor]:
    """The numbers in float64, complex ones as two; a piece, as picking the finite ones takes twenty
    times their memory."""
    value = value.detach()
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    return (piece.double() for piece in value.reshape(-1).split(_PIECE))


def _equal(old: Any, new: Any) -> bool:
    if isinstance(old, Tensor) or isinstance(new, Tensor) or type(old) is not type(new):
        return False
    # An object without an __eq__ of its own equals only itself, which proves no difference.
    if "__eq__" not in _defined(type(old)):
        return True
    try:
        return bool(old == new)
    except Exception:
        # It holds tensors or arrays: comparing these gives no one answer.
        return True


def _defined(kind: type) -> set[str]:
    """Return the names that a class and its bases define, except those of `object`."""
    return {name for base in kind.__mro__ if base is not object for name in vars(base)}


def shapes(answer: dict[str, Any]) -> list[Any]:
    """The shape of each leaf; a nested tensor has none that could be asked for."""
    plain = {
        k: isinstance(v, Tensor | numpy.ndarray) and not getattr(v, "is_nested", False)
        for k, v in answer.items()
    }
    return [(k, tuple(v.shape) if plain[k] else None) for k, v in answer.items()]
