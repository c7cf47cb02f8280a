"""Look for values that depend on the memory format: a kernel's mistake, or code that reads strides.

Each call of a run in channels last is made twice, the first time on contiguous copies of what it is
given. So an error is told where it arises, and rounding does not add up on the way. Python code
that asks for strides and then does something else is no call: only the result of the whole model
shows that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ..models.trees import every_tensor_of, has_strides
from ..watch.calls import Call, CallSite
from ..watch.effects import short_name
from ..watch.recorder import Recorder, name_of
from .running import Run

_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.1}
"""The share of the largest value by which two orders of the same sum may differ, at most."""

_OF_ITSELF = ("empty", "new_empty", "rand", "normal", "bernoulli", "multinomial", "resize_")
"""Beginnings of the names of calls whose values follow from no argument."""


@dataclass(frozen=True)
class Divergence:
    """A call, or the whole model, that answers otherwise in channels last.

    `error` is the largest difference as a share of the largest value; infinite where one is not
    finite and the other is, or where the results have different shapes.
    """

    operator: str
    site: CallSite
    error: float

    def to_dict(self) -> dict[str, Any]:
        """As plain data; JSON has no infinity, so an infinite error is None there."""
        return {**asdict(self), "error": self.error if math.isfinite(self.error) else None}


@dataclass(frozen=True)
class Agreement:
    """What a run in channels last computed, held against contiguous memory call by call."""

    calls: int
    """How many calls were made in both formats."""
    first: Divergence | None
    """The first call whose values differ."""
    result: Divergence | None
    """The model itself, if its results differ."""

    @property
    def agrees(self) -> bool:
        return self.first is None and self.result is None

    def to_dict(self) -> dict[str, Any]:
        return {
            "calls": self.calls,
            "first": None if self.first is None else self.first.to_dict(),
            "result": None if self.result is None else self.result.to_dict(),
            "agrees": self.agrees,
        }


def agreement_of(last: Run, plain: Run) -> Agreement:
    """Run a model in channels last, each call twice, and then a contiguous copy of it."""
    calls: list[Call] = []
    both = _InBothFormats(calls)
    state = torch.get_rng_state()
    with Recorder(last.model, calls.append):
        found = _results(last, both)
    torch.set_rng_state(state)
    expected = _results(plain, None)
    pairs = zip(found, expected, strict=True)
    # What was drawn falls on other elements in another layout.
    error = 0.0 if both.drew else max((_error(*pair) for pair in pairs), default=0.0)
    site = CallSite("", type(last.model).__name__, "", 0, "")
    result = Divergence("the model's result", site, error) if error else None
    return Agreement(both.made, both.first, result)


def _results(run: Run, mode: TorchFunctionMode | None) -> list[Tensor]:
    """Copies of what the model returns."""
    kept: list[Tensor] = []

    def keep(result: object) -> None:
        with torch._C.DisableTorchFunction():  # These calls are ours, not the model's.
            kept.extend(value.clone() for value in _values(every_tensor_of(result)))

    run.go(mode, keep)
    return kept


class _InBothFormats(TorchFunctionMode):
    """Make each call on contiguous copies first, and keep the first that answers otherwise."""

    def __init__(self, calls: list[Call]) -> None:
        super().__init__()
        self.calls = calls
        self.made = 0
        self.drew = False
        self.first: Divergence | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = short_name(name_of(func))
        images = [leaf for leaf in tree_leaves((args, kwargs)) if _is(leaf) and leaf.ndim >= 4]
        if self.first is not None or not images or name in _ASKING:
            return func(*args, **kwargs)
        state = torch.get_rng_state()
        if name.startswith(_OF_ITSELF):
            result = func(*args, **kwargs)
            self.drew |= not torch.equal(torch.get_rng_state(), state)
            return result
        expected = _in_contiguous(func, args, kwargs)
        torch.set_rng_state(state)
        result = func(*args, **kwargs)
        # What is computed from here on is recorded as well.
        call = self.calls[-1] if self.calls else None
        if not torch.equal(torch.get_rng_state(), state):
            self.drew = True
            return result
        found = _values(result)
        if found and len(found) == len(expected):
            self.made += 1
            error = max(_error(*pair) for pair in zip(found, expected, strict=True))
            if error and call is not None:
                self.first = Divergence(call.operator, call.site, error)
        return result


def _in_contiguous(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[Tensor]:
    """What the call returns for contiguous copies; what is given twice is one copy."""
    copies: dict[int, Tensor] = {}

    def copied(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = _contiguous(tensor)
        return copies[id(tensor)]

    with torch.no_grad():
        plain_args, plain_kwargs = tree_map_only(Tensor, copied, (args, dict(kwargs)))
        return _values(func(*plain_args, **plain_kwargs))


_ASKING = {
    *("stride", "is_contiguous", "data_ptr", "__get__", "__set__", "backward", "grad"),
    *("retain_grad", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_"),
}
"""Calls that ask about memory, or belong to a backward pass."""


def _contiguous(tensor: Tensor) -> Tensor:
    detached = tensor.detach()
    if not has_strides(tensor):
        return detached
    return detached.clone(memory_format=torch.contiguous_format)


def _is(leaf: object) -> bool:
    """Whether it is a tensor whose numbers can be compared: `vmap` hides them, "meta" has none."""
    if not isinstance(leaf, Tensor) or leaf.is_meta or is_functorch_wrapped_tensor(leaf):
        return False
    return has_strides(leaf)


def _values(result: object) -> list[Tensor]:
    return [leaf.detach() for leaf in tree_leaves(result) if _is(leaf)]  # type: ignore[union-attr]


def _error(found: Tensor, expected: Tensor) -> float:
    """The largest difference as a share of the largest value; 0 if rounding may explain it."""
    if found.shape != expected.shape:
        return float("inf")
    if not (found.is_floating_point() or found.is_complex()):
        return 0.0 if torch.equal(found, expected) else float("inf")
    if found.numel() == 0:
        return 0.0
    finite = found.isfinite()
    if not torch.equal(finite, expected.isfinite()):
        return float("inf")
    zero = torch.zeros((), dtype=found.dtype, device=found.device)
    one, other = (torch.where(finite, t, zero) for t in (found, expected))
    largest = other.abs().max().item()
    difference = (one - other).abs().max().item()
    allowed = _ROUNDING.get(found.dtype, 1e-3) * largest
    return 0.0 if difference <= allowed else difference / largest if largest else float("inf")
