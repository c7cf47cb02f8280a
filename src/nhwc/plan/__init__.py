"""Lower a graph to a program: which layout and which kernel for each layer, by measurement.

A kernel that is fastest alone may lose by the copies around it, and what is fastest here is not so
elsewhere. So everything that can compute a layer is timed on this machine and on the real shapes,
once; then one implementation is chosen for each layer so that their sum, with the conversions
between layouts, is least; and a few such choices are timed as whole programs.

    graph, inputs
      |  recording    run the graph once: shapes, layouts, what is fixed
      |  parting      calls that become others once shapes are known
      |  following    which tensors are constants, and which are tokens
      |  recognize    nodes -> layers, each with a specification
      v
    Scene             the layers, and for each its implementations: those of others (others,
      |               gpu) and ours (native); made once, and handed on to all that follows
      |  ahead        kernels compiled, several at a time
      |  measuring    how long each implementation takes, by trials or from the ledger, where
      |               the evidence of several optimizations gathers
      |  weighing     leave out those that take much memory and save no time
      |  assigning    one for each layer, conversions between them counted
      |  joining      two layers of ours as one step, where that gains
      v
    Choice            by the node of each layer: an implementation and its time
      |  binding      weights prepared, neighbours of ours together (stretch), slots numbered
      v
    PlanProgram       steps in a row
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ..kernels.programs.pool import Pool
from ..machine.environment import beside
from ..machine.host_memory import apart, trim, unread
from ..machine.timing import SAME
from ..models.trees import tensors_of
from .assigning import assign, cost
from .binding import Packed, bind
from .evidence import Evidence, Sitting, evened
from .gpu.graphs import on_device
from .implementation import Choice, Identifier, Timed, Timings
from .joining import join
from .ledger import Ledger, digest
from .measuring import Leisure, Measured, conversion_seconds, measure, sat, switch_seconds
from .program import PlanProgram
from .recording import Seen, layout_of
from .scene import Scene, UnknownKernel, Unplannable, scene_of
from .specs import Layer
from .trials import shortest
from .weighing import without_waste

__all__ = [
    "Identifier",
    "Plan",
    "UnknownKernel",
    "Unplannable",
    "gains",
    "make_plan",
    "remake_plan",
]


_HOPELESS = {True: 2.0, False: 1.3}
"""Kernels, of ours or of others, that sum up to this many times the best estimate are not tried as
a whole. Alone each of ours may have to bring into order what lies in order beside the others."""

_CONTRARY = 1.05
"""Kernels that sum up to this many times the best estimate are taken only on settled evidence."""


@dataclass(frozen=True)
class Plan:
    """A program for given input shapes, and how it came about.

    `evidence` is on the layers that had a choice, `whole` on the assignments that were timed as
    whole programs, if there were several: the first is by single layers, number `taken` was taken.
    `seconds` is what the layers and the conversions between them take, timed alone. `measured`
    counts what was timed for the first time, `renewed` what was timed again.
    """

    program: PlanProgram
    layers: tuple[Layer, ...]
    choice: Choice
    timings: Timings
    evidence: dict[fx.Node, Evidence]
    whole: Evidence | None
    taken: int
    seconds: float
    measured: int
    renewed: int

    @property
    def kernels(self) -> tuple[tuple[str, Identifier], ...]:
        """The key of every layer and what was chosen for it: enough to make the plan again."""
        chosen = ((layer, self.choice[layer.node].implementation) for layer in self.layers)
        return tuple((layer.spec.key, one.identifier) for layer, one in chosen)

    @property
    def words(self) -> list[str]:
        """The key of every layer and the name of what was chosen for it."""
        return _words(self.layers, self.choice)

    def weights(self, graph: fx.GraphModule) -> list[Tensor]:
        """The weights of the planned layers; most kernels read a packed copy of theirs instead."""
        owners = [graph.get_submodule(layer.op) for layer in self.layers if layer.op]
        return [owner.weight for owner in owners if isinstance(owner.weight, Tensor)]


def make_plan(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    ledger: Ledger,
    *,
    exact: bool = False,
    leisure: Leisure | None = None,
    progress: Callable[[int, int, str], None] | None = None,
    pool: Pool | None = None,
) -> Plan:
    """Plan `graph` for the shapes of `inputs`; raises Unplannable with the reason.

    `leisure` is the time that is left for measuring again what is known; without, nothing is. Plans
    that share a `pool` share the memory of their calls.
    """
    scene = scene_of(graph, inputs, exact=exact)
    leisure, pool = leisure or Leisure(), pool or Pool()
    measured, renewed = ledger.measured, ledger.renewed
    with torch.no_grad():
        found = measure(scene, ledger, leisure, progress)
        chosen = _choose(scene, found, ledger, leisure, pool)
        seconds = cost(scene, chosen.choice, *_costs(ledger, leisure))
    # Give back what packing left over, and the programs that were not chosen.
    pool.forget()
    trim()
    return Plan(
        chosen.program,
        scene.layers,
        chosen.choice,
        found.timings,
        found.evidence,
        chosen.whole,
        chosen.number,
        seconds,
        ledger.measured - measured,
        ledger.renewed - renewed,
    )


@dataclass(frozen=True)
class _Chosen:
    """An assignment and its program; its number among those in the evidence, if there is any."""

    choice: Choice
    program: PlanProgram
    whole: Evidence | None = None
    number: int = 0


def _choose(
    scene: Scene, measured: Measured, ledger: Ledger, leisure: Leisure, pool: Pool
) -> _Chosen:
    """The fastest of a few assignments, as whole programs.

    The sum of layers timed alone is only an estimate: caches and threads are shared. So the best
    mixture is timed against the best without our kernels, and the best with as many of them as can
    be.
    """
    assigned = _assignments(scene, measured, *_costs(ledger, leisure))
    choices = [join(scene, choice, ledger, leisure) for choice in assigned]
    if len(choices) == 1:
        return _Chosen(choices[0], bind(scene, choices[0], pool=pool))
    key = "best of " + digest(word for choice in choices for word in _words(scene.layers, choice))
    bound: dict[int, PlanProgram] = {}
    rivals = [str(number) for number in range(len(choices))]
    hold = lambda: _hold(scene, choices, bound, pool)
    known = sat(ledger, leisure, key, rivals, hold)
    whole = _confirmed(known, choices, hold)
    if whole is not known:
        ledger.put(key, whole.to_entry())
    best = _best(whole, choices)
    if best not in bound:
        bound.clear()
        bound[best] = bind(scene, choices[best], pool=pool)
    return _Chosen(choices[best], bound[best], whole, best)


def _assignments(
    scene: Scene, measured: Measured, conversion: Callable[[Seen], float], switch: float
) -> list[Choice]:
    """The assignment that the layers' own times speak for, then others that may be faster."""
    timings = without_waste(scene, measured.timings)
    even = evened(timings)
    choices = [assign(scene, even, conversion, switch)]
    for ours in (True, False):
        choice = assign(scene, _where_possible(even, ours), conversion, switch)
        if choice not in choices and _seconds(choice) < _HOPELESS[ours] * _seconds(choices[0]):
            choices.append(choice)
    return [_as_timed(choice, timings) for choice in _ranked(choices)]


def _ranked(choices: Sequence[Choice]) -> list[Choice]:
    """The first of `choices` goes behind one that has as good a sum and fewer kernels of others."""
    same = [one for one in choices if _seconds(one) <= (1 + SAME) * _seconds(choices[0])]
    first = min(same, key=_others)
    return [first, *(one for one in choices if one is not first)]


def _costs(ledger: Ledger, leisure: Leisure) -> tuple[Callable[[Seen], float], float]:
    """What lies between layers: the seconds of a copy, and of going from our kernels to others."""
    switch = switch_seconds(ledger, leisure)
    return lambda seen: conversion_seconds(seen, ledger, leisure), switch


def _as_timed(choice: Choice, timings: Timings) -> Choice:
    """`choice` with each kernel's own time in the place of the one that it was chosen by."""
    return {
        node: next(one for one in timings[node] if one.implementation is taken.implementation)
        for node, taken in choice.items()
    }


def _hold(
    scene: Scene, choices: Sequence[Choice], bound: dict[int, PlanProgram], pool: Pool
) -> Sitting:
    """Time every choice as a whole program; the last one that was made is left in `bound`.

    Each program holds all weights: so there is only one at a time, and the weights that others'
    kernels packed are handed on to the next. They run on copies of the example, which they may put
    a result into: code that decides by values may take no other.
    """
    inputs = [apart(x) if isinstance(x, Tensor) else x for x in scene.inputs]
    packed, taken = Packed(), {}
    # The most promising one last: it need not be made again.
    for number in reversed(range(len(choices))):
        bound.clear()
        bound[number] = bind(scene, choices[number], packed, pool)
        taken[str(number)] = shortest(on_device(bound[number], inputs), inputs)
    return dict(sorted(taken.items()))


def _best(whole: Evidence, choices: Sequence[Choice]) -> int:
    """The number of the assignment to take: the first, unless another is clearly faster.

    A restless moment is not believed, nor any one moment where the layers' own times say the
    contrary. Of those that cannot be told apart it is the one with the fewest kernels of others:
    each way out of a program of ours waits for threads that another program may have.
    """
    if not (whole.settled or whole.calm):
        return 0
    if not _is_ahead(whole):
        return min(map(int, whole.even), key=lambda number: (_others(choices[number]), number))
    believed = whole.settled or not _is_contrary(whole, choices)
    return int(whole.leader) if believed else 0


def _others(choice: Choice) -> int:
    """How many layers others' kernels compute."""
    return sum(not timed.implementation.ours for timed in choice.values())


def _confirmed(whole: Evidence, choices: Sequence[Choice], hold: Callable[[], Sitting]) -> Evidence:
    """The evidence after another sitting, if a calm one says the contrary of the layers' times."""
    doubtful = whole.calm and not whole.settled and _is_contrary(whole, choices)
    return whole.with_sitting(hold()) if doubtful else whole


def _is_ahead(whole: Evidence) -> bool:
    """Whether another assignment than the first is clearly faster."""
    return whole.seconds["0"] > (1 + SAME) * whole.seconds[whole.leader]


def _is_contrary(whole: Evidence, choices: Sequence[Choice]) -> bool:
    """Whether an assignment is ahead whose layers alone take longer."""
    leading = _seconds(choices[int(whole.leader)])
    return _is_ahead(whole) and leading > _CONTRARY * _seconds(choices[0])


def _where_possible(timings: Timings, ours: bool) -> Timings:
    """Keep only our kernels, or only those of others, for all layers that have any."""
    some = {
        node: tuple(one for one in timed if one.implementation.ours is ours)
        for node, timed in timings.items()
    }
    return {node: some[node] or timed for node, timed in timings.items()}


def gains(
    plan: Plan, graph: fx.GraphModule, inputs: Sequence[Any], ledger: Ledger, leisure: Leisure
) -> bool:
    """Whether the program of `plan` is clearly faster than `graph` on inputs in this layout."""
    layouts = [str(layout_of(x)) for x in tensors_of(inputs)]
    key = " ".join(["gain of", digest(plan.words), *layouts])

    def hold() -> Sitting:
        program = on_device(plan.program, inputs)
        taken = {"program": shortest(program, inputs), "graph": shortest(graph, inputs)}
        unread(graph.parameters())
        return taken

    found = sat(ledger, leisure, key, ("program", "graph"), hold).seconds
    return found["graph"] > (1 + SAME) * found["program"]


def remake_plan(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    kernels: Sequence[tuple[str, Identifier]],
    pool: Pool | None = None,
) -> PlanProgram:
    """The program that `kernels` describe, with the weights that `graph` has now.

    Raises Unplannable where `graph` has other layers, or a kernel is not here.
    """
    with torch.no_grad(), beside(tensors_of(inputs)):
        scene = scene_of(graph, inputs)
        if [layer.spec.key for layer in scene.layers] != [key for key, _ in kernels]:
            raise Unplannable("its layers are not those that were planned")
        chosen = zip(scene.layers, kernels, strict=True)
        choice = {layer.node: Timed(scene.find(layer, name), 0.0) for layer, (_, name) in chosen}
        return bind(scene, choice, pool=pool)


def _seconds(choice: Choice) -> float:
    return sum(timed.seconds for timed in choice.values())


def _words(layers: Sequence[Layer], choice: Choice) -> list[str]:
    return [f"{layer.spec.key} {choice[layer.node].implementation.label}" for layer in layers]
