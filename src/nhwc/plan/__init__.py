"""Lower a graph to a program: which layout and which kernel for each layer, by measurement.

A kernel that is fastest alone may lose by the copies around it, and what is fastest here is not so
elsewhere. So everything that can compute a layer is timed on this machine and on the real shapes,
once; then one implementation is chosen for each layer so that their sum, with the conversions
between layouts, is least; and a few such choices are timed as whole programs.

    graph, inputs
      |  recording    run the graph once: shapes, layouts, what is fixed
      |  purity       stop where a node does more than return a value
      |  recognize    nodes -> layers, each with a specification
      v
    Scene             the layers, and for each its implementations: those of others (others,
      |               cuda) and ours (native); made once, and handed on to all that follows
      |  measuring    how long each implementation takes, by trials or from the ledger
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

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from ..machine.host_memory import trim, unread
from ..models.trees import tensors_of
from .assigning import assign
from .binding import Packed, bind
from .implementation import Choice, Identifier, Timed, Timings
from .joining import join
from .ledger import Ledger
from .measuring import conversion_seconds, measure, switch_seconds
from .program import PlanProgram
from .recording import layout_of
from .scene import Scene, UnknownKernel, Unplannable, scene_of
from .specs import Layer
from .trials import sample, shortest
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


_HOPELESS = 1.3
"""Kernels that sum up to this many times the best estimate are not tried as a whole."""


@dataclass(frozen=True)
class Plan:
    """A program for given input shapes, and how it came about."""

    program: PlanProgram
    layers: tuple[Layer, ...]
    choice: Choice
    timings: Timings
    measured: int

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
    progress: Callable[[int, int, str], None] | None = None,
) -> Plan:
    """Plan `graph` for the shapes of `inputs`; raises Unplannable with the reason."""
    scene = scene_of(graph, inputs, exact=exact)
    before = ledger.measured
    with torch.no_grad():
        timings = measure(scene, ledger, progress)
        choice, program = _choose(scene, without_waste(scene, timings), ledger)
    # Give back what packing left over, and the programs that were not chosen.
    trim()
    return Plan(program, scene.layers, choice, timings, ledger.measured - before)


def _choose(scene: Scene, timings: Timings, ledger: Ledger) -> tuple[Choice, PlanProgram]:
    """The fastest of a few assignments, as whole programs.

    The sum of layers timed alone is only an estimate: caches and threads are shared. So the best
    mixture is timed against the best without our kernels, and the best with as many of them as can
    be. Each program holds all weights: so there is only one at a time, and the weights that others'
    kernels packed are handed on to the next.
    """
    conversion = lambda seen: conversion_seconds(seen, ledger)
    switch = switch_seconds(ledger)
    choices = [assign(scene, timings, conversion, switch)]
    for ours in (True, False):
        choice = assign(scene, _where_possible(timings, ours), conversion, switch)
        if choice not in choices and _seconds(choice) < _HOPELESS * _seconds(choices[0]):
            choices.append(choice)
    choices = [join(scene, choice, ledger) for choice in choices]
    if len(choices) == 1:
        return choices[0], bind(scene, choices[0])
    key = "best of " + _digest(word for choice in choices for word in _words(scene.layers, choice))
    best, program = ledger.get(key), None
    if type(best) is not int or not 0 <= best < len(choices):
        places = scene.graph.graph.find_nodes(op="placeholder")
        inputs = [sample(scene.record.values[node], None) for node in places]
        seconds: list[float] = []
        packed = Packed()
        # The most promising one last: it need not be made again.
        for choice in reversed(choices):
            program = None
            program = bind(scene, choice, packed)
            seconds.insert(0, shortest(program, inputs))
        best = seconds.index(min(seconds))
        ledger.put(key, best)
        if best:
            program = None
            program = bind(scene, choices[best], packed)
    return choices[best], program or bind(scene, choices[best])


def _where_possible(timings: Timings, ours: bool) -> Timings:
    """Keep only our kernels, or only those of others, for all layers that have any."""
    some = {
        node: tuple(one for one in timed if one.implementation.ours is ours)
        for node, timed in timings.items()
    }
    return {node: some[node] or timed for node, timed in timings.items()}


def gains(plan: Plan, graph: fx.GraphModule, inputs: Sequence[Any], ledger: Ledger) -> bool:
    """Whether the program of `plan` was faster than `graph` on these inputs, in their layout."""
    layouts = [str(layout_of(x)) for x in tensors_of(inputs)]
    key = " ".join(["gain of", _digest(plan.words), *layouts])
    known = ledger.get(key)
    if not isinstance(known, bool):
        known = shortest(plan.program, inputs) < shortest(graph, inputs)
        unread(graph.parameters())
        ledger.put(key, known)
    return known


def remake_plan(
    graph: fx.GraphModule, inputs: Sequence[Any], kernels: Sequence[tuple[str, Identifier]]
) -> PlanProgram:
    """The program that `kernels` describe, with the weights that `graph` has now.

    Raises UnknownKernel for one that is not here.
    """
    scene = scene_of(graph, inputs)
    if [layer.spec.key for layer in scene.layers] != [key for key, _ in kernels]:
        raise Unplannable("the graph is not the one that was planned")
    chosen = zip(scene.layers, kernels, strict=True)
    choice = {layer.node: Timed(scene.find(layer, name), 0.0) for layer, (_, name) in chosen}
    with torch.no_grad():
        return bind(scene, choice)


def _seconds(choice: Choice) -> float:
    return sum(timed.seconds for timed in choice.values())


def _words(layers: Sequence[Layer], choice: Choice) -> list[str]:
    return [f"{layer.spec.key} {choice[layer.node].implementation.label}" for layer in layers]


def _digest(words: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:24]
