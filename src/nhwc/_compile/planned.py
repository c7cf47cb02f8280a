"""What torch calls in the place of a graph: plans for the shapes it comes to, else the graph."""

from __future__ import annotations

import operator
import re
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from .._optimize import OptimizeReport, optimize
from ..errors import NhwcError, VerificationError
from ..graph.nodes.names import sayable_function
from ..models.preserve import turn
from ..models.trees import flatten, has_strides, storage_of
from ..optimized import Optimized, is_known, is_observed, signature
from ..shown import shown
from ..verify import cloned
from ..verify.comparing import compare
from .behaviour import TRAINS, Unserved
from .core import Core, core_of
from .numbers import unwrapped
from .sides import with_fewer_writes
from .weights import Weights, weights_of

_MOST = 4
"""For so many sets of shapes one graph is planned; each plan holds weights of its own."""

_GRADIENTS = (
    "nhwc leaves graphs to eager: gradients are wanted, and planned kernels have none. Call the "
    "model under torch.no_grad() or torch.inference_mode()."
)
_TRAINING = (
    "nhwc leaves graphs to eager: the model is in training mode, and plans are for inference. Call "
    "model.eval() first."
)


@dataclass(frozen=True)
class GraphReport:
    """What became of a graph that Dynamo captured: a report for each set of shapes it met.

    `place` is where the code of its first operator stands. `reason` says why it was left to eager,
    if it was, or the last thing that stood in the way.
    """

    place: str
    operators: int
    reports: tuple[OptimizeReport, ...]
    reason: str = ""


@dataclass(frozen=True)
class _Places:
    """Where among the inputs of a graph its weights are, and where all else is."""

    weights: tuple[int, ...]
    rest: tuple[int, ...]

    def without(self, others: Sequence[int]) -> _Places:
        """These with some weights among the rest."""
        weights = tuple(i for i in self.weights if i not in others)
        return _Places(weights, tuple(sorted((*self.rest, *others))))


@dataclass(frozen=True)
class _Plan:
    """A core that is planned, called with the graph's inputs; it returns what the graph does."""

    core: Core
    model: Optimized
    writes: bool

    def __call__(self, inputs: Sequence[Any]) -> Any:
        return self.core.answer(self.model, inputs)


class PlannedGraph:
    """A graph of Dynamo's that answers as it does, from plans where there are any."""

    def __init__(
        self,
        graph: fx.GraphModule,
        examples: Sequence[Any],
        *,
        exact: bool,
        say: Callable[[str], None],
    ) -> None:
        _say_powers(graph)
        self._graph, self._exact, self._say = graph, exact, say
        self._unwrapped = unwrapped(graph)
        numbers = self._unwrapped.places
        weights = tuple(i for i in weights_of(graph, examples) if i not in numbers)
        rest = tuple(i for i in range(len(examples)) if i not in weights)
        self._places = _Places(weights, rest)
        self._known: dict[tuple[int, ...], Weights] = {}
        self._reports: list[OptimizeReport] = []
        # A graph that does what no plan does is left alone from then on.
        self._left = not weights
        self._reason = "" if weights else "it has no weights"

    @property
    def report(self) -> GraphReport:
        operators = sum(node.op.startswith("call") for node in self._graph.graph.nodes)
        return GraphReport(_place_of(self._graph), operators, tuple(self._reports), self._reason)

    def __call__(self, *inputs: Any) -> Any:
        if self._left:
            return self._graph(*inputs)
        if is_observed():
            self._reason = "torch watches or transforms the call, or runs it under autocast"
            return self._graph(*inputs)
        if self._wants_gradients(inputs):
            return self._graph(*inputs)
        given = self._unwrapped.given(inputs)
        plan = self._plan_for(given)
        return self._graph(*inputs) if plan is None else plan(given)

    def _plan_for(self, inputs: Sequence[Any]) -> _Plan | None:
        places = self._places
        weights, key = self._seen_in(inputs, places)
        if weights is None:
            return None
        # Other weights get other plans: what is made of these must not be found among those.
        made = weights.made
        if key not in made and self._can_have_one(inputs, places, made):
            # Only who compiles has Dynamo: to import it takes longer than to import torch.
            from torch._dynamo.convert_frame import compile_lock

            # A graph is traced with what torch has once for all threads replaced. What Dynamo found
            # then, it would look for in every call.
            with turn, compile_lock:
                if key not in made and len(made) < _MOST and not self._left:
                    with suppress(_Fails):
                        made[key] = self._made(inputs, places)
        plan: _Plan | None = made.get(key)
        return None if plan is None or (plan.writes and _overlap(inputs)) else plan

    def _seen_in(self, inputs: Sequence[Any], places: _Places) -> tuple[Weights | None, Hashable]:
        """The weights of a call, if anything is to be made of them, and the rest as a key."""
        weights = self._known_again([inputs[i] for i in places.weights])
        rest = [inputs[i] for i in places.rest]
        # What a graph returns may have strides that follow from its inputs'.
        tensors = [x for x in rest if isinstance(x, Tensor)]
        return weights, (signature(rest), tuple(x.stride() for x in tensors if has_strides(x)))

    def _can_have_one(
        self, inputs: Sequence[Any], places: _Places, made: dict[Hashable, Any]
    ) -> bool:
        """Whether a plan for these shapes can be made, and found again."""
        rest = [inputs[i] for i in places.rest]
        if len(made) >= _MOST:
            self._reason = f"it has met {_MOST} sets of shapes, and is planned for no more"
        elif _is_empty(rest):
            self._reason = "an input has no numbers"
        elif not is_known(rest):
            # A tensor of a subclass, say, or a conjugated one: no call ever has the same key.
            self._reason = "an input is no plain tensor"
        else:
            return True
        return False

    def _known_again(self, tensors: list[Tensor]) -> Weights | None:
        """What is known of these weights; None if nothing is to be made of them yet."""
        key = tuple(map(id, tensors))
        known = self._known
        found = known.get(key)
        if found is None:
            # The first weights are the model's. Others may be made for one call alone. Threads that
            # come to new weights at once have one set of plans.
            waits = int(bool(known))
            for old, one in [*known.items()]:
                if not one.are_alive():
                    known.pop(old, None)
            found = known.setdefault(key, Weights(tensors, waits))
        return found if found.are_ready(tensors) else None

    def _made(self, inputs: Sequence[Any], places: _Places) -> _Plan | None:
        """A plan for the shapes of `inputs`; None where the graph is as good or has to do."""
        try:
            graph, seen = with_fewer_writes(self._unwrapped.graph, inputs)
            nodes = graph.graph.find_nodes(op="placeholder")
            written = [i for i in places.weights if nodes[i] in seen.written]
            if written:
                # A buffer that counts calls is no weight; the next call knows.
                self._places = places.without(written)
                self._known.clear()
                return None
            core = core_of(graph, seen, inputs, places.weights)
        except Unserved as error:
            self._left, self._reason = True, str(error)
            if str(error) == TRAINS:
                self._say(_TRAINING)
            return None
        try:
            plan = self._optimized(core, inputs, bool(seen.written))
        except _Fails:
            raise
        except Exception as error:
            # Whatever stops a plan is no reason to stop the user's program.
            kind = "" if isinstance(error, NhwcError) else f"{type(error).__name__}: "
            self._reason = kind + shown(error)
            place = _place_of(self._graph)
            self._say(f"nhwc leaves a graph that begins at {place} to eager: {self._reason}")
            return None
        else:
            return plan if plan and self._pays(plan, inputs, places) else None
        finally:
            # Graphs are held in circles, and would keep the weights of a model that is gone.
            for module in core.model.modules():
                module._parameters.clear()
                module._buffers.clear()

    def _optimized(self, core: Core, inputs: Sequence[Any], writes: bool) -> _Plan | None:
        self._hold(core, inputs, writes)
        # The beginning may write into its inputs, which the call itself has to.
        copies = cloned(inputs) if writes else inputs
        with torch.no_grad():
            sources = (*copies, *core.beginning(*copies))
            examples = [sources[i] for i in core.inputs]
            # Of a number to a power, or a side of one, fake tensors have other strides than real.
            core = replace(core, strides=tuple(x.stride() for x in core.model(*examples)))
        fast = optimize(core.model, *examples, exact=self._exact)
        self._reports.append(fast.report)
        self._reason = fast.report.reason
        return None if fast.report.chosen == "input" else _Plan(core, fast, writes)

    def _hold(self, core: Core, inputs: Sequence[Any], writes: bool) -> None:
        """Hold the core against the graph that it was cut from; all that follows is against it."""

        def run(call: Callable[[Sequence[Any]], Any]) -> dict[str, Any]:
            with torch.no_grad():
                return dict(flatten(call(cloned(inputs) if writes else inputs)))

        try:
            wanted = run(lambda given: self._unwrapped.graph(*given))
        except Exception as error:
            raise _Fails from error
        found = run(lambda given: core.answer(core.model, given))
        if not all(check.passed for check in compare(0, wanted, found, wanted, False)):
            raise VerificationError("the part to plan does not answer as the graph does")

    def _pays(self, plan: _Plan, inputs: Sequence[Any], places: _Places) -> bool:
        """Whether the plan gains more than the look at each call takes: tiny graphs are many."""
        found = plan.model.report.comparison
        gain_s = found.before.median_s - found.after.median_s
        if gain_s <= _seconds(lambda: self._seen_in(inputs, places)):
            self._reason = "a plan gains less than it takes to see that the weights are the same"
            return False
        return True

    def _wants_gradients(self, inputs: tuple[Any, ...]) -> bool:
        if not torch.is_grad_enabled():
            return False
        if not any(x.requires_grad for x in inputs if isinstance(x, Tensor)):
            return False
        self._reason = "gradients are wanted"
        self._say(_GRADIENTS)
        return True


class _Fails(Exception):
    """The graph fails in this call, as it will when it runs; the next may be a better one."""


def _seconds(look: Callable[[], object]) -> float:
    """How long `look` takes, at its best: what disturbs it disturbs the graph, too."""
    found = []
    for _ in range(5):
        start = time.perf_counter()
        look()
        found.append(time.perf_counter() - start)
    return min(found)


def _is_empty(inputs: Sequence[Any]) -> bool:
    """Whether there is nothing to compute, and nothing to verify, as in a batch of no image."""
    return any(isinstance(x, Tensor) and not x.numel() for x in inputs)


def _overlap(inputs: Sequence[Any]) -> bool:
    """Whether two inputs lie in one memory: what is written to one is read from the other."""
    found = [storage_of(x) for x in inputs if isinstance(x, Tensor) and x.numel()]
    return len(set(found)) < len(found)


def _place_of(graph: fx.GraphModule) -> str:
    """`net.py:12 in forward`, which calls the first operator; or that, if no user's code does."""
    calls = [node for node in graph.graph.nodes if node.op.startswith("call")]
    for node in calls:
        found = re.search(r'File "(.*)", line (\d+), in (\S+)', node.meta.get("stack_trace") or "")
        if found:
            path, line, function = found.groups()
            return f"{Path(path).name}:{line} in {function}"
    return str(calls[0]) if calls else "its output"


def _say_powers(graph: fx.GraphModule) -> None:
    """Let the graph's code raise negative numbers to powers: torch negates the power of it."""
    powers = graph.graph.find_nodes(op="call_function", target=operator.pow)
    for node in powers:
        node.target = sayable_function(node.target, node.args)
    if powers:
        graph.recompile()
