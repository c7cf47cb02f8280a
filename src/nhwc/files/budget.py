"""Estimate what running a graph from a file would cost, without running it.

Choosing kernels runs the graph on its examples. Before that, every step is run on tensors that have
shapes and no memory. Numbers and sequences of Python are computed on the way, each within bounds:
`9 ** 10 ** 9` is refused before it is computed. A graph that exceeds the budget, or whose cost
depends on values, which are not known here, is loaded and not planned.
"""

from __future__ import annotations

import contextlib
import logging
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves, tree_map_only

from ..graph import Interpreter
from ..graph.modules.layers import assert_numbers
from ..models.modes import OperatorMode
from .examples import Example
from .plain import Foreign

_ABSURD = 1 << 36
"""The most numbers of a tensor in any planned model: a file that makes a larger is refused."""

_NUMBERS = 1 << 28
"""The most numbers of a tensor, or a view, that loading may make."""

_HELD = 1 << 32
"""The most bytes of all tensors that a run holds at once, besides the weights."""

_WORK = 4 * 10**12
"""The most numbers read, written or multiplied by one run on each example. Planning runs a layer a
few dozen times: minutes, on a small machine."""

_CALLS = 200_000
"""The most operators called while a file is loaded, including those inside of layers."""

_LEAVES = 100_000
"""The most values of a sequence, with those of the sequences in it counted each time."""

_DEPTH = 64
_BITS = 64


class OverBudget(Exception):
    """Running the graph would take too much, or what it would take cannot be told."""


class Budget:
    """The work that loading one file may still cause."""

    def __init__(self) -> None:
        self.work = float(_WORK)
        self.calls, self.leaves = _CALLS, 100 * _LEAVES

    def check(self, graph: fx.GraphModule, example: Sequence[Any]) -> None:
        """Raise OverBudget, or Foreign, if a run of `graph` on this example is too much."""
        # This takes half a second to import.
        from torch._subclasses.fake_tensor import FakeTensorMode

        # Where an operator does not say its shapes, torch would run it to see them.
        fake = FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)
        with _quiet(), torch.no_grad(), fake, _Meter(self):
            try:
                _Trial(graph, self).run(*tree_map_only(Example, Example.shaped, tuple(example)))
            except (Foreign, OverBudget, MemoryError):
                raise
            except Exception as error:
                raise OverBudget(str(error)) from error

    def spend(self, work: float) -> None:
        self.work -= work
        self.calls -= 1
        if self.work < 0 or self.calls < 0:
            raise OverBudget("the work of the whole file")

    def check_value(self, value: Any) -> None:
        """Refuse a number or a sequence larger than any model makes."""
        left = min(self.leaves, _LEAVES)
        waiting = [(value, 0)]
        while waiting:
            item, depth = waiting.pop()
            left -= 1
            if left < 0 or depth > _DEPTH:
                raise Foreign(f"a sequence of more than {_LEAVES} values, or too deep a one")
            if isinstance(item, dict):
                waiting += [(part, depth + 1) for pair in item.items() for part in pair]
            elif isinstance(item, (list, tuple)):
                if len(item) > left:
                    raise Foreign(f"a sequence of more than {_LEAVES} values")
                waiting += [(part, depth + 1) for part in item]
            elif isinstance(item, int) and item.bit_length() > _BITS:
                raise Foreign(f"a number of {item.bit_length()} bits")
            elif isinstance(item, str) and len(item) > _LEAVES:
                raise Foreign(f"a text of {len(item)} letters")
            self.leaves -= 1


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence torch's log, which has a traceback for each shape that an operator refuses."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


class _Trial(Interpreter):
    """Runs the steps one after the other, and checks each before and after."""

    def __init__(self, graph: fx.GraphModule, budget: Budget) -> None:
        super().__init__(graph)
        self.budget = budget
        self.extra_traceback = False

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.budget.check_value(value)
        return value

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is assert_numbers:  # What it would look at is not known here.
            return None
        _check_python(target, args)
        _check_count(getattr(target, "__name__", ""), args, kwargs)
        value = super().call_function(target, args, kwargs)
        if target is operator.setitem:  # A list may hold another twice, or itself.
            self.budget.check_value(args[0])
        return value

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        _check_count(target, args, kwargs)
        return super().call_method(target, args, kwargs)


class _Meter(OperatorMode):
    """Counts what each operator of torch reads, writes and multiplies."""

    def __init__(self, budget: Budget) -> None:
        super().__init__()
        self.budget = budget
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._held = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        _check_pieces(func, args, kwargs)
        _check_division(func, args, kwargs)
        result = func(*args, **kwargs)
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        largest = max((t.numel() for t in made), default=0)
        if largest > _ABSURD:
            raise Foreign(f"a tensor of {largest} numbers, made by {func}")
        if largest > _NUMBERS:
            raise OverBudget(f"a tensor of {largest} numbers")
        self.budget.spend(_work(func, args, kwargs, result, given, made))
        for tensor in made:
            self._hold(tensor.untyped_storage())
        return result

    def _hold(self, storage: torch.UntypedStorage) -> None:
        """Count the memory that a result lies in, if it is new."""
        _, before = self._storages.get(storage._cdata, (None, 0))
        self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._held += storage.nbytes() - before
        if self._held > _HELD:
            known = self._storages.items()
            self._storages = {key: one for key, one in known if not one[0].expired()}
            self._held = sum(size for _, size in self._storages.values())
        if self._held > _HELD:
            raise OverBudget(f"tensors of {self._held} bytes at once")


def _check_python(target: Any, args: tuple[Any, ...]) -> None:
    """Refuse arithmetic that would take Python forever, before it begins."""
    first, second = (*args, None, None)[:2]
    whole = isinstance(first, int) and isinstance(second, int)
    power = target in (operator.pow, operator.ipow, pow)
    if power and whole and first.bit_length() * abs(second) > 64 * _BITS:
        raise Foreign(f"{first} to the power of {second}")
    if target in (operator.lshift, operator.ilshift) and whole and second > 64 * _BITS:
        raise Foreign(f"{first} shifted by {second}")
    if target is round and isinstance(second, int) and abs(second) > _BITS * _BITS:
        raise Foreign(f"a number rounded to {second} digits")
    if target in (operator.mod, operator.mul, operator.imul):
        for some, times in ((first, second), (second, first)):
            # `%` on a text makes another text, of any length that the first asks for.
            if isinstance(some, str):
                raise Foreign("arithmetic with a text")
            sequence = isinstance(some, (list, tuple)) and isinstance(times, int)
            if sequence and len(some) * times > _LEAVES:
                raise Foreign(f"a sequence of {len(some) * times} values")


def _check_pieces(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse to take a tensor apart into more pieces than a sequence may have."""
    unbound = func._overloadpacket.__name__ in ("unbind", "unbind_copy")
    if not unbound and func.name().removeprefix("aten::") not in _SPLITS:
        return
    given = dict(zip(("self", "dim") if unbound else ("self", "size", "dim"), args, strict=False))
    dim = kwargs.get("dim", given.get("dim", 0))
    pieces = args[0].size(dim) // (1 if unbound else max(1, int(given.get("size", 1))))
    if pieces > _LEAVES:
        raise OverBudget(f"{pieces} pieces of a tensor")


def _check_count(target: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a list of more tensors than a sequence may have, which torch makes of a number."""
    counted = _COUNTED.get(target.partition(".")[0])
    count = kwargs.get(counted, (*args, None, None)[1]) if counted else None
    if isinstance(count, int) and count > _LEAVES:
        raise OverBudget(f"{count} tensors of {target}")


def _check_division(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Leave whole numbers undivided: torch ends the process where the least is divided by -1."""
    if kwargs.get("rounding_mode") == "trunc" and not any(
        isinstance(one, float) or (isinstance(one, Tensor) and one.is_floating_point())
        for one in args
    ):
        raise OverBudget(f"{func} of whole numbers")


_COUNTED = {"chunk": "chunks", "unsafe_chunk": "chunks", "combinations": "r"}
"""Operators that make a list as long as an argument says before they look at the shapes."""

_SPLITS = ("split.Tensor", "split_copy.Tensor", "unsafe_split.Tensor")
"""Operators that make pieces of a size."""


def _work(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
    given: Sequence[Tensor],
    made: Sequence[Tensor],
) -> float:
    """About how many numbers an operator reads, writes and multiplies."""
    from torch.utils.flop_counter import flop_registry

    touched = float(_numbers(given) + _numbers(made))
    counter = flop_registry.get(func._overloadpacket)
    if counter is not None:
        return touched + float(counter(*args, **kwargs, out_val=result)) / 2
    name = func._overloadpacket.__name__
    if "linalg" in name or name in _CUBIC or "attention" in name or "trilinear" in name:
        # Decomposing a matrix takes about the third power of its side.
        return touched * max((max(t.shape[-2:], default=1) for t in given), default=1) * 10
    sizes = [
        math.prod(_whole(value))
        for argument, value in zip(func._schema.arguments, args, strict=False)
        if argument.name == "kernel_size"
    ]
    return touched * max([1, *sizes])


_CUBIC = (
    *("cholesky", "cholesky_inverse", "cholesky_solve", "triangular_solve", "geqrf", "orgqr"),
    *("ormqr", "qr", "svd", "lu_unpack", "matrix_exp", "_cdist_forward", "_pdist_forward"),
)


def _whole(value: Any) -> Iterable[int]:
    return [abs(int(one)) for one in (value if isinstance(value, (list, tuple)) else [value])]


def _numbers(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() for t in tensors)
