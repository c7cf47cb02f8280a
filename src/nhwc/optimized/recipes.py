"""A set of input shapes that has a plan: its key, its name in words, and how to make it again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx, nn

from ..errors import of_kind
from ..formats import format_of
from ..graph.nodes.counts import counts_of, numbers_in
from ..graph.nodes.flat import is_nested
from ..graph.plain import as_plain
from ..plan import Identifier, Plan
from ..plan.gpu.graphs import on_device


@dataclass(frozen=True)
class PlanRecipe:
    """The kernels chosen for one set of input shapes; a program is made from it when it is needed.

    `graph` is set if it was made for these shapes alone. Passes computed its weights from those of
    the graph for all shapes, so the recipe is valid only as long as those do not change. `counts`
    are the places of the inputs that must have the same numbers, too.
    """

    signature: Hashable
    inputs: tuple[Any, ...]
    kernels: tuple[tuple[str, Identifier], ...]
    graph: fx.GraphModule | None = None
    counts: tuple[int, ...] = ()

    @property
    def shapes(self) -> Hashable:
        """The key without the numbers of `counts`."""
        return cast("tuple[Hashable, ...]", self.signature)[0] if self.counts else self.signature


@dataclass(frozen=True)
class Served:
    """A planned set of input shapes: its recipe, its program, and the weights in it."""

    recipe: PlanRecipe
    program: Callable[..., Any]
    weights: tuple[Tensor, ...]


def served(plan: Plan, graph: fx.GraphModule, inputs: Sequence[Any]) -> Served:
    """Serve the shapes of `inputs` by the `plan` that was made of `graph` for them."""
    counts = counts_of(graph.graph)
    key, words = signature(inputs, counts), describe(inputs, counts)
    recipe = PlanRecipe(key, words, plan.kernels, counts=counts)
    return Served(recipe, on_device(plan.program, inputs), tuple(plan.weights(graph)))


def describe(inputs: Sequence[Any], counts: Collection[int] = ()) -> tuple[str, ...]:
    """`1x3x224x224 float32` for every tensor, with its layout where that is channels last.

    Where its dimensions follow one another in another order, without gaps, that is added. Of the
    tensors at the places `counts` the numbers are.

    >>> describe((torch.zeros(2, 3), 7, torch.zeros(2, 3, 4).transpose(0, 1)))
    ('2x3 float32', '7', '3x2x4 float32 order 1,0,2')
    >>> describe([torch.tensor([[16, 8]])], counts=[0])
    ('1x2 int64 numbers 16,8',)
    """
    return tuple(
        f"{_shaped(x)} numbers {','.join(map(str, numbers_in(x)))}"
        if place in counts
        else _described(x)
        for place, x in enumerate(inputs)
    )


def _described(x: Any) -> str:
    if isinstance(x, (list, tuple)):
        first, last = "[]" if isinstance(x, list) else "()"
        return f"{_kind(x)}{first}{', '.join(describe(x))}{last}"
    if isinstance(x, dict):
        items = ", ".join(f"{key!r}: {_described(value)}" for key, value in x.items())
        return f"{_kind(x)}{{{items}}}"
    if not isinstance(x, Tensor):
        x = as_plain(x)
        return repr(x) if isinstance(x, (*_PLAIN, *_TELLING)) else of_kind(x)
    words = [_shaped(x)]
    if format_of(x).is_last:
        words.append("channels_last")
    elif order := order_of(x):
        words += ["order", ",".join(map(str, order))]
    return " ".join(words)


def _shaped(x: Tensor) -> str:
    return f"{'x'.join(map(str, x.shape))} {str(x.dtype).removeprefix('torch.')}"


def _kind(holder: object) -> str:
    """The name of what holds inputs, unless its brackets say it."""
    return "" if type(holder) in (list, tuple, dict) else type(holder).__name__


def order_of(x: Tensor) -> tuple[int, ...]:
    """The dimensions from the one that is farthest apart; none where that says nothing."""
    if x.layout is not torch.strided or x.is_contiguous():
        return ()
    strides = x.stride()
    order = tuple(sorted(range(x.ndim), key=lambda dim: -strides[dim]))
    return order if x.permute(order).is_contiguous() else ()


def signature(inputs: Sequence[Any], counts: Sequence[int] = ()) -> Hashable:
    """The key of a program: shapes, types and devices of tensors, and all other values.

    With `counts`, also the numbers of the tensors at these places: a pair of both.
    """
    key = tuple(
        (x.shape, x.dtype, x.device) if isinstance(x, Tensor) and _is_plain(x) else _hashable(x)
        for x in inputs
    )
    if not counts:
        return key
    return key, tuple((place, *numbers_in(inputs[place])) for place in counts)


def is_known(inputs: Sequence[Any]) -> bool:
    """Whether the next call with the same inputs has the same key: no object is among them.

    >>> is_known(([1, torch.float32], None)), is_known((object(),))
    (True, False)
    """
    return signature(inputs) == signature(inputs)


def _is_plain(x: Tensor) -> bool:
    """Whether the numbers of `x` are those in its memory, which a kernel reads."""
    # A subclass answers in tensors of its own kind, or has its numbers elsewhere (a fake or a
    # distributed tensor); a negated or conjugated one stores their opposites, all or some; a nested
    # one has no shape.
    strided = type(x) in (Tensor, nn.Parameter) and x.layout is torch.strided
    return strided and not (x.is_nested or x.is_neg() or x.is_conj())


def _hashable(value: Any) -> Hashable:
    if is_nested(value):
        keys = tuple(value) if isinstance(value, dict) else None
        return type(value), keys, signature([*value] if keys is None else [*value.values()])
    if isinstance(value, (float, complex)):
        # A text tells zeros apart by their signs, and that of NaN equals itself.
        return type(value), repr(value)
    # Any other value may change unnoticed: a new object equals no key, so the graph runs.
    return (type(value), value) if isinstance(value, (*_PLAIN, *_TELLING)) else object()


_PLAIN = (int, float, bool, str, type(None))
_TELLING = (complex, torch.dtype, torch.device, torch.memory_format)
"""Others whose text says all of them."""
