"""Look inside a call: its copies, the operator that loses the format, random numbers.

Torch's profiler reports the copies, because they happen in C++, out of reach of Python patches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..formats import CHANNELS_LAST_OF, Format, format_of
from ..models.modes import OperatorMode
from ..watch.profile import profiled


@dataclass(frozen=True)
class LayoutCopy:
    """A tensor copied to another order of strides, with the operators it happened in."""

    path: tuple[str, ...]
    elements: int
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        inside = [name for name in self.path if name != "aten::copy_"]
        return f"{' > '.join(inside) or 'aten::copy_'} copies {'x'.join(map(str, self.sizes))}"


def layout_copies(call: Callable[[], object], at_least: int = 1) -> tuple[LayoutCopy, ...]:
    """Run `call` under the profiler; return its copies that reorder `at_least` elements.

    >>> x = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    >>> [str(copy) for copy in layout_copies(x.contiguous)]
    ['aten::contiguous > aten::clone copies 2x3x4x5']
    """
    results = profiled(call, cuda=False).kineto_results
    # The event tree is private to torch: where it is missing, no copy is reported.
    tree: Sequence[Any] = getattr(results, "experimental_event_tree", tuple)()
    found = [copy for root in tree for copy in _walk(root, ())]
    return tuple(copy for copy in found if copy.elements >= at_least)


def _walk(event: Any, path: tuple[str, ...]) -> Iterator[LayoutCopy]:
    if not event.name.startswith("autograd::engine"):
        path = (*path, event.name)
    if event.name == "aten::copy_":
        tensors = [(i.sizes, i.strides) for i in event.extra_fields.inputs if hasattr(i, "strides")]
        if len(tensors) == 2 and _reorders(*tensors):
            sizes = tuple(tensors[0][0])
            yield LayoutCopy(path, math.prod(sizes), sizes)
    for child in event.children:
        yield from _walk(child, path)


def _reorders(target: tuple, source: tuple) -> bool:
    if list(target[0]) != list(source[0]):
        return False
    orders = []
    for sizes, strides in (target, source):
        real = [(stride, dim) for dim, stride in enumerate(strides) if sizes[dim] > 1]
        if any(stride == 0 for stride, _ in real):
            return False
        orders.append([dim for _, dim in sorted(real, reverse=True)])
    return orders[0] != orders[1]


class _RandomFinder(OperatorMode):
    """Notices operators that torch tags as drawing random numbers."""

    found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found = self.found or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def draws_random_numbers(call: Callable[[], object]) -> bool:
    """Whether `call` draws random numbers, which fall on other elements in another layout.

    >>> draws_random_numbers(lambda: torch.rand(2)), draws_random_numbers(lambda: torch.ones(2))
    (True, False)
    """
    with _RandomFinder() as finder:
        call()
    return bool(finder.found)


class _LoserFinder(OperatorMode):
    """Remembers the first operator in the call that got channels last and did not return it."""

    def __init__(self) -> None:
        super().__init__()
        self.found = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.found and not func.is_view:
            given = {t.ndim for t in tree_leaves((args, kwargs)) if _is_last(t)}
            for out in tree_leaves(result):
                if isinstance(out, Tensor) and out.ndim in given and _let_go(out):
                    self.found = str(func).removesuffix(".default").replace(".", "::", 1)
        return result


def first_loser(call: Callable[[], object]) -> str:
    """Name the first operator inside `call` that returned another format than it got.

    >>> x = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    >>> first_loser(x.tril)
    'aten::tril'
    """
    with _LoserFinder() as finder:
        call()
    return str(finder.found)


def _is_last(value: object) -> bool:
    return isinstance(value, Tensor) and format_of(value) in CHANNELS_LAST_OF.values()


def _let_go(result: Tensor) -> bool:
    return format_of(result) in (Format.CONTIGUOUS, Format.OTHER)
