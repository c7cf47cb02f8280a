"""A plan in the form in which it runs: a list of steps over numbered slots."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..graph.nodes.flat import leaves_of
from ..kernels.tape.pages import WeightShelf
from ..models.trees import tuple_like


@dataclass(frozen=True)
class PlanStep:
    """One call: the slots of its inputs, of its result, and those to empty after it."""

    name: str
    run: Callable[..., Any]
    inputs: tuple[int, ...]
    output: int
    drops: tuple[int, ...]


class PlanProgram:
    """Steps bound to the weights of one graph, for one set of input shapes.

    `start` holds the slots' contents before a call, `feeds` are the slots of the inputs. `back`
    pairs the slot of an input with that of what is copied into it at the end of a call. On `shelf`
    lies what its kernels packed, where other programs find it as long as this one lives. A program
    keeps nothing from one call to the next, so threads may share it.
    """

    def __init__(
        self,
        steps: Sequence[PlanStep],
        start: list[Any],
        feeds: Sequence[int | None],
        output: Any,
        shelf: WeightShelf | None = None,
        back: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.steps = tuple(steps)
        self.shelf = shelf
        self._calls = tuple((s.run, s.inputs, s.output, s.drops) for s in steps)
        self._start = start
        self._feeds = tuple(feeds)
        self._output = output
        self._returned = tuple({slot.number for slot in _slots_in(output)})
        self._back = tuple(back)

    @property
    def writes_back(self) -> bool:
        """Whether a call writes into its inputs."""
        return bool(self._back)

    def __call__(self, *inputs: Any) -> Any:
        return self.result(self._run(inputs))

    def result(self, values: Sequence[Any] | Mapping[int, Any]) -> Any:
        """What a call returns, in fresh containers, whose values are in these slots."""
        return _filled(self._output, values)

    def returned(self, *inputs: Any) -> dict[int, Any]:
        """What a call computes for its result, by slot."""
        values = self._run(inputs)
        return {slot: values[slot] for slot in self._returned}

    def _run(self, inputs: Sequence[Any]) -> list[Any]:
        values = self._fed(inputs)
        for run, read, write, drops in self._calls:
            values[write] = run(*[values[slot] for slot in read])
            for slot in drops:
                values[slot] = None
        for given, value in self._back:
            values[given].copy_(values[value])
        return values

    def step_seconds(self, inputs: Sequence[Any]) -> dict[str, float]:
        """What each step takes in its place in a call, by its name: the least of a few calls.

        A device that works beside the processor has not finished when a step returns.
        """
        least: dict[str, float] = {}
        for _ in range(3):
            values = self._fed(inputs)
            for step in self.steps:
                start = time.perf_counter()
                values[step.output] = step.run(*[values[slot] for slot in step.inputs])
                took = time.perf_counter() - start
                least[step.name] = min(took, least.get(step.name, took))
                for slot in step.drops:
                    values[slot] = None
        return least

    def _fed(self, inputs: Sequence[Any]) -> list[Any]:
        """The slots before the first step of a call."""
        values = self._start.copy()
        # Arguments left out have defaults, which are fixed.
        for slot, value in zip(self._feeds, leaves_of(inputs), strict=False):
            if slot is not None:
                values[slot] = value
        return values


@dataclass(frozen=True)
class Slot:
    """Stands in the structure that a program returns for the value in this slot."""

    number: int


@dataclass(frozen=True)
class Made:
    """Stands in that structure for what a class makes of these arguments, anew in each call."""

    kind: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def with_drops(
    steps: Sequence[PlanStep], output: Any, back: Sequence[tuple[int, int]], keep: dict[int, Any]
) -> list[PlanStep]:
    """The same steps, each dropping the values that no later one reads."""
    needed = {slot.number for slot in _slots_in(output)}.union(*back)
    kept = []
    for step in reversed(steps):
        # A value that nobody reads need not be computed: no step does more than return one.
        if step.output not in needed:
            continue
        drops = tuple(slot for slot in dict.fromkeys(step.inputs) if slot not in needed | {*keep})
        needed.discard(step.output)
        needed.update(step.inputs)
        kept.append(PlanStep(step.name, step.run, step.inputs, step.output, drops))
    return kept[::-1]


def _slots_in(output: Any) -> list[Slot]:
    if isinstance(output, Slot):
        return [output]
    if isinstance(output, Made):
        output = [output.args, output.kwargs]
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, (list, tuple)):
        return [slot for item in output for slot in _slots_in(item)]
    return []


def _filled(output: Any, values: Sequence[Any] | Mapping[int, Any]) -> Any:
    """The caller's structure, with fresh containers of the kinds the model returned."""
    if isinstance(output, Slot):
        return values[output.number]
    if isinstance(output, Made):
        return output.kind(*_filled(output.args, values), **_filled(output.kwargs, values))
    if isinstance(output, dict):
        return {key: _filled(item, values) for key, item in output.items()}
    if isinstance(output, tuple):
        return tuple_like(output, [_filled(item, values) for item in output])
    if isinstance(output, list):
        return [_filled(item, values) for item in output]
    return output
