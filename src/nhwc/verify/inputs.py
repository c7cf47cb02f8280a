"""Inputs to compare two models on, made of an example."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from .widened import wide_type

TRIALS = 3
"""On how many inputs answers are compared."""

_TINY = 0.125
"""The share of zeros and denormal numbers among others."""


def random_inputs(example: Sequence[Any], count: int, seed: int = 0) -> list[tuple[Any, ...]]:
    """The example, then `count - 1` others like it: normal, then uniform, values.

    Uniform ones have zeros and denormal numbers among them. Integers and booleans keep the
    example's values, which may be indices into something.
    """
    generator = torch.Generator().manual_seed(seed)

    def like(turn: int, value: Any) -> Any:
        if not holds_numbers(value):
            return value
        drawn = torch.empty((*value.shape, 1 + value.is_complex()), device="cpu")
        drawn = (drawn.normal_ if turn % 2 else drawn.uniform_)(generator=generator)
        if turn % 2 == 0:
            tiny = torch.rand(drawn.shape, generator=generator, device="cpu")
            drawn[tiny < _TINY] *= 1e-40
            drawn[tiny < _TINY / 2] = 0
        drawn = torch.view_as_complex(drawn) if value.is_complex() else drawn[..., 0]
        # Assigning into a like tensor keeps the example's strides, which a plan may depend on.
        return torch.empty_like(value, requires_grad=False).copy_(drawn)

    return [
        tuple(tree_map(_detached if turn == 0 else partial(like, turn), tuple(example)))
        for turn in range(count)
    ]


def holds_numbers(value: Any) -> bool:
    """Whether others can be drawn in their place: not of a sparse tensor, which has some places."""
    plain = isinstance(value, Tensor) and value.layout is torch.strided
    return plain and wide_type(value) is not None


def reordered_inputs(example: Sequence[Any], seed: int = 0) -> tuple[Any, ...]:
    """The example with the numbers of each tensor in another order: within the same bounds.

    >>> [turned] = reordered_inputs([torch.arange(4.0)])
    >>> turned.sort().values
    tensor([0., 1., 2., 3.])
    """
    generator = torch.Generator().manual_seed(seed)

    def turned(value: Any) -> Any:
        if not holds_numbers(value):
            return value
        order = torch.randperm(value.numel(), generator=generator, device="cpu")
        numbers = value.detach().flatten()[order.to(value.device)].view(value.shape)
        return torch.empty_like(value, requires_grad=False).copy_(numbers)

    return tuple(tree_map(turned, tuple(example)))


def other_numbers(example: Sequence[Any]) -> tuple[Any, ...]:
    """The example with other floats, opposite flags, and one of the whole numbers of each tensor.

    >>> other_numbers([torch.tensor([2, 3]), torch.tensor([True, False])])
    (tensor([2, 2]), tensor([False,  True]))
    """

    def like(value: Any) -> Any:
        plain = isinstance(value, Tensor) and value.layout is torch.strided and value.numel()
        if not plain or holds_numbers(value):
            return value
        other = ~value if value.dtype is torch.bool else value.flatten()[0]
        return torch.empty_like(value).copy_(other)

    # What is drawn from the first seed may be the example.
    return tuple(tree_map(like, random_inputs(example, 2, seed=1)[1]))


def without_numbers(example: Sequence[Any]) -> tuple[Any, ...]:
    """The example with NaN throughout the first image, or other first entry, of each tensor.

    >>> without_numbers([torch.ones(2, 2)])
    (tensor([[nan, nan],
            [1., 1.]]),)
    """

    def like(value: Any) -> Any:
        if not holds_numbers(value):
            return value
        changed = value.detach().clone()
        (changed[:1] if changed.ndim else changed).fill_(math.nan)
        return changed

    return tuple(tree_map(like, tuple(example)))


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value
