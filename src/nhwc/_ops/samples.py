"""One call of an operator, and the laying out of its tensors in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..formats import CHANNELS_LAST_OF, Format, format_of, to_format
from ..models.trees import tensors_of


@dataclass(frozen=True)
class Sample:
    """One call of an operator: the function, its arguments, and a label for them."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    label: str = ""
    inplace: Callable[..., Any] | None = None
    takes_out: bool = False
    differentiable: bool = True

    @property
    def converts_on_request(self) -> bool:
        return "memory_format" in self.kwargs

    @property
    def tensors(self) -> list[Tensor]:
        return tensors_of((self.args, self.kwargs))

    @property
    def dims(self) -> int:
        """4 or 5 if the first tensor has that many dimensions and one format; else 0.

        A dimension of size 1 may have any stride, so its results would say little.
        """
        first = next(iter(self.tensors), None)
        return first.ndim if first is not None and can_tell(first) and min(first.shape) > 1 else 0


def can_tell(tensor: Tensor) -> bool:
    """Whether a dense tensor of this shape has one format, never two at once.

    >>> can_tell(torch.empty(2, 3, 4, 5)), can_tell(torch.empty(2, 1, 4, 5))
    (True, False)
    """
    if tensor.ndim not in CHANNELS_LAST_OF or tensor.layout is not torch.strided:
        return False
    if tensor.numel() == 0:
        return False
    dense = torch.empty(tensor.shape, device="meta")
    return format_of(dense) is Format.CONTIGUOUS


Enter = Callable[[str], None]
"""Called before each step; raises to skip a step in which the process died before."""


def enter_all(step: str) -> None:
    """Skip nothing."""


Layout = Callable[[Tensor, int], Tensor]
"""Lays out a tensor that can tell its format; the number is its place among those."""


def contiguous(tensor: Tensor, index: int) -> Tensor:
    return to_format(tensor, Format.CONTIGUOUS)


def channels_last(tensor: Tensor, index: int) -> Tensor:
    return to_format(tensor, CHANNELS_LAST_OF[tensor.ndim])


def first_alone(tensor: Tensor, index: int) -> Tensor:
    return channels_last(tensor, index) if index == 0 else contiguous(tensor, index)


def all_but_first(tensor: Tensor, index: int) -> Tensor:
    return contiguous(tensor, index) if index == 0 else channels_last(tensor, index)


def first_sliced(tensor: Tensor, index: int) -> Tensor:
    """Make the first tensor a channel slice of a wider channels-last one."""
    tensor = channels_last(tensor, index)
    return torch.cat((tensor, tensor), 1)[:, : tensor.shape[1]] if index == 0 else tensor


def arrange(sample: Sample, layout: Layout, *, grad: bool) -> tuple[tuple, dict, list[Tensor]]:
    """Copy the arguments, laid out; also return the list of tensors that `layout` made."""
    leaves, spec = tree_flatten((sample.args, sample.kwargs))
    laid: list[Tensor] = []
    for at, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            continue
        copy = leaf.detach().clone()
        if can_tell(copy):
            copy = layout(copy, len(laid)).detach()
            laid.append(copy)
        leaves[at] = copy.requires_grad_(grad and leaf.requires_grad)
    args, kwargs = tree_unflatten(leaves, spec)
    return args, kwargs, laid


SHAPES = {4: (2, 19, 5, 7), 5: (2, 19, 3, 5, 7)}
"""Prime sizes that no vector register divides, so that the ends of rows are checked as well."""

LARGE = (2, 64, 56, 56)


def lift(sample: Sample, shape: tuple[int, ...], *, spread: bool) -> Sample | None:
    """Give the input of a sample more dimensions, and with it the tensors that match it.

    `spread` gives it `shape` and fills it with values from its own range, which stay in the
    operator's domain. Otherwise it is repeated along new leading dimensions of size 2, 3, ...
    """
    tensors = sample.tensors
    if not tensors or tensors[0].numel() == 0 or tensors[0].layout is not torch.strided:
        return None
    first = tensors[0]
    if first.ndim >= len(shape) or (not spread and first.ndim == 0):
        return None
    leaves, spec = tree_flatten((sample.args, sample.kwargs))
    for at, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            continue
        if spread and leaf.shape == first.shape:
            leaves[at] = _spread(leaf, shape)
        elif not spread and leaf.ndim == first.ndim:
            lead = (2, 3, 4, 5)[: len(shape) - leaf.ndim]
            leaves[at] = leaf.detach().expand(*lead, *leaf.shape).clone()
        else:
            continue
        leaves[at].requires_grad_(leaf.requires_grad)
    args, kwargs = tree_unflatten(leaves, spec)
    return Sample(**{**vars(sample), "args": args, "kwargs": kwargs})


def _spread(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    flat = tensor.detach().flatten()
    count = torch.Size(shape).numel()
    # A step that shares no factor with the count visits every place once: a cheap shuffle.
    order = torch.arange(count, device=flat.device) * 7919 % count
    if flat.is_floating_point() and bool(torch.isfinite(flat).all()) and flat.numel() > 1:
        known, _ = flat.double().sort()
        place = torch.linspace(0, flat.numel() - 1, count, dtype=torch.float64, device=flat.device)
        low = place.long().clamp(max=flat.numel() - 2)
        values = known[low] + (known[low + 1] - known[low]) * (place - low)
        return values.to(flat.dtype)[order].reshape(shape)
    return flat[order % flat.numel()].reshape(shape)


def spread_out(items: Sequence[Any], count: int) -> list[Any]:
    """Return at most `count` of the items, evenly spaced from first to last.

    >>> spread_out(range(10), 3)
    [0, 4, 9]
    """
    if len(items) <= count:
        return list(items)
    return [items[round(i * (len(items) - 1) / max(count - 1, 1))] for i in range(count)]


def describe(sample: Sample) -> str:
    """Describe the call in a few words: its label, or else its shapes and settings."""
    if sample.label:
        return sample.label
    words = []
    for value in (*sample.args, *sample.kwargs.items()):
        key, value = value if isinstance(value, tuple) and _is_item(value) else ("", value)
        text = _word(value)
        if text:
            words.append(f"{key}={text}" if key else text)
    return ", ".join(words)[:120]


def _is_item(value: tuple) -> bool:
    return len(value) == 2 and isinstance(value[0], str)


def _word(value: object) -> str:
    if isinstance(value, Tensor):
        return "x".join(map(str, value.shape)) or "scalar"
    if isinstance(value, list | tuple) and any(isinstance(v, Tensor) for v in value):
        return "[" + ", ".join(_word(v) for v in value) + "]"
    if isinstance(value, dict):
        return ""
    return str(value) if len(str(value)) < 40 else ""
