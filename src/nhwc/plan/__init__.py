"""Lower a graph to kernels: which layout and which kernel, by measurement on the real shapes.

recording  run the graph once: shapes, layouts, what is fixed
recognize  nodes -> layers with specifications
candidates the kernels that can serve a layer
measuring  how long each takes here, by trials, or from memory where it is known
weighing   those that take much memory for no time left out
assigning  one candidate per layer, conversions between them counted
program    weights prepared, steps in a row
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from .. import kernels
from ..memory import Memory
from ..ready import tensors_of
from ..release import trim, unread
from .assigning import Choice, assign
from .binding import Packed, bind
from .calls import is_opaque
from .measuring import conversion_seconds, measure, switch_seconds
from .options import Option, Options
from .program import Program
from .purity import why_impure, why_seen
from .recognize import layers_of
from .recording import Record, layout_of, record
from .specs import Layer
from .trials import sample, shortest
from .weighing import without_waste

__all__ = ["Option", "Plan", "Unplannable", "gains", "make_plan", "remake_plan"]


_HOPELESS = 1.3
"""Kernels that sum up to this many times the best estimate are not tried as a whole."""


class Unplannable(Exception):
    """This graph cannot be planned, and why; it still runs as it is."""


@dataclass(frozen=True)
class Plan:
    """A program for given input shapes, and how it came about."""

    program: Program
    layers: tuple[Layer, ...]
    choice: Choice
    options: Options
    measured: int

    @property
    def kernels(self) -> tuple[tuple[str, Option], ...]:
        """What every layer is and what was chosen for it: enough to make the plan again."""
        return tuple((layer.spec.key, self.choice[layer.node]) for layer in self.layers)

    def weights(self, graph: fx.GraphModule) -> list[Tensor]:
        """The weights that the kernels were given: most keep a copy, packed, and read that."""
        owners = [graph.get_submodule(layer.op) for layer in self.layers if layer.op]
        return [owner.weight for owner in owners if isinstance(owner.weight, Tensor)]


def make_plan(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    memory: Memory,
    *,
    exact: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> Plan:
    """Plan `graph` for the shapes of `inputs`; raises Unplannable with the reason."""
    found, layers = _layers(graph, inputs)
    unread(graph.parameters())
    before = memory.measured
    with torch.no_grad():
        options = measure(graph, found, layers, memory, exact=exact, progress=progress)
        worthwhile = without_waste(options, layers)
        choice, program = _choose(graph, found, layers, worthwhile, memory)
    # What packing left, and the programs that were not chosen.
    trim()
    return Plan(program, tuple(layers), choice, options, memory.measured - before)


def _choose(
    graph: fx.GraphModule, found: Record, layers: list[Layer], options: Options, memory: Memory
) -> tuple[Choice, Program]:
    """The fastest of a few assignments, as whole programs.

    The sum of layers timed alone is only an estimate: caches and threads are shared. So the best
    mixture stands against the best without our kernels, and the best with as many as can be. Each
    holds all weights: there is only one at a time, and others' are packed once for all.
    """
    with_ours = {k: tuple(o for o in some if o.native) or some for k, some in options.items()}
    without = {k: tuple(o for o in some if not o.native) or some for k, some in options.items()}
    conversion = lambda seen: conversion_seconds(seen, memory)
    switch = switch_seconds(memory)
    choices = [assign(layers, options, found, conversion, switch)]
    for some in (with_ours, without):
        choice = assign(layers, some, found, conversion, switch)
        if choice not in choices and _seconds(choice) < _HOPELESS * _seconds(choices[0]):
            choices.append(choice)
    if kernels.available():
        from .native.joining import join

        choices = [join(graph, found, layers, choice, memory) for choice in choices]
    # Packed weights are next, and large; what was measured is in their way.
    trim()
    if len(choices) == 1:
        return choices[0], bind(graph, found, layers, choices[0])
    key = "best of " + _digest(layers, choices)
    best, program = memory.get(key), None
    if type(best) is not int or not 0 <= best < len(choices):
        inputs = [sample(found.values[n], None) for n in graph.graph.find_nodes(op="placeholder")]
        seconds: list[float] = []
        packed = Packed()
        # The most promising one last: it need not be made again.
        for choice in reversed(choices):
            program = None
            trim()
            program = bind(graph, found, layers, choice, packed)
            seconds.insert(0, shortest(program, inputs))
        best = seconds.index(min(seconds))
        memory.put(key, best)
        if best:
            program = None
            trim()
            program = bind(graph, found, layers, choices[best], packed)
    return choices[best], program or bind(graph, found, layers, choices[best])


def gains(plan: Plan, graph: fx.GraphModule, inputs: Sequence[Any], memory: Memory) -> bool:
    """Whether the program of `plan` was faster than `graph` on these inputs, in their layout."""
    layouts = [str(layout_of(x)) for x in tensors_of(inputs)]
    key = " ".join(["gain of", _digest(list(plan.layers), [plan.choice]), *layouts])
    known = memory.get(key)
    if not isinstance(known, bool):
        known = shortest(plan.program, inputs) < shortest(graph, inputs)
        unread(graph.parameters())
        memory.put(key, known)
    return known


def _seconds(choice: Choice) -> float:
    return sum(option.seconds for option in choice.values())


def _digest(layers: list[Layer], choices: list[Choice]) -> str:
    words = [
        f"{layer.spec.key} {choice[layer.node].label}" for choice in choices for layer in layers
    ]
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:24]


def remake_plan(
    graph: fx.GraphModule, inputs: Sequence[Any], kernels: Sequence[tuple[str, Option]]
) -> Program:
    """The program that `kernels` describe, with the weights that `graph` has now."""
    found, layers = _layers(graph, inputs)
    if [layer.spec.key for layer in layers] != [key for key, _ in kernels]:
        raise Unplannable("the graph is not the one that was planned")
    choice = {layer.node: option for layer, (_, option) in zip(layers, kernels, strict=True)}
    with torch.no_grad():
        return bind(graph, found, layers, choice)


def _layers(graph: fx.GraphModule, inputs: Sequence[Any]) -> tuple[Record, list[Layer]]:
    reason = why_impure(graph)
    if reason is not None:
        raise Unplannable(reason)
    if any(tensors_of(x) for x in inputs if not isinstance(x, Tensor)):
        raise Unplannable("it takes tensors in a list; plans are for tensors of known shapes")
    drawn = torch.get_rng_state()
    found = record(graph, inputs)
    if not torch.equal(drawn, torch.get_rng_state()):
        # In another layout the same numbers would fall on other pixels.
        raise Unplannable("it draws random numbers")
    for node, target in found.writes:
        reason = why_seen(graph, node, target)
        if reason is not None:
            raise Unplannable(reason)
    layers = layers_of(graph, found)
    if all(is_opaque(graph, layer.node) for layer in layers):
        raise Unplannable("no graph could be made of any part of it")
    return found, layers
