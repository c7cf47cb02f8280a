"""Lower a graph to kernels: which layout and which kernel, by measurement on the real shapes.

recording  run the graph once: shapes, layouts, what is fixed
recognize  nodes -> layers with specifications
candidates the kernels that can serve a layer
measuring  how long each takes here, from memory where it is known
assigning  one candidate per layer, conversions between them counted
program    weights prepared, steps in a row
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..memory import Memory
from .assigning import Choice, assign
from .calls import is_opaque
from .measuring import Option, Options, conversion_seconds, measure
from .program import Program, bind
from .purity import why_impure
from .recognize import layers_of
from .recording import Record, record
from .specs import Layer

__all__ = ["Option", "Plan", "Unplannable", "make_plan", "remake_plan"]


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
    before = memory.measured
    with torch.no_grad():
        options = measure(graph, found, layers, memory, exact=exact, progress=progress)
        choice = assign(layers, options, found, lambda seen: conversion_seconds(seen, memory))
        program = bind(graph, found, layers, choice)
    return Plan(program, tuple(layers), choice, options, memory.measured - before)


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
    found = record(graph, inputs)
    layers = layers_of(graph, found)
    if all(is_opaque(graph, layer.node) for layer in layers):
        raise Unplannable("no graph could be made of any part of it")
    return found, layers
