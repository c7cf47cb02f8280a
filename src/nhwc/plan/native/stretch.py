"""Layers of our kernels as programs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ...formats import Format
from ...kernels.layers.elementwise import activation_step
from ...kernels.programs.builder import Builder
from ...kernels.programs.program import Pool
from ...timing import interleave
from ..recording import Record
from ..specs import Layer
from .kernel import Constants, Native

_LOOKING_S = 0.1


class Stretch:
    """Neighbouring layers of our kernels, as one program: one call, one arena, one tape."""

    def __init__(self, outputs: Sequence[fx.Node]) -> None:
        self.builder = Builder()
        self.outputs = tuple(outputs)
        self.inputs: list[fx.Node] = []
        self._buffers: dict[fx.Node, Any] = {}

    def add(self, native: Native, layer: Layer, packed: Any, record: Record) -> None:
        for node in layer.inputs:
            if node not in self._buffers:
                self.inputs.append(node)
                self._buffers[node] = self.builder.input(record.values[node].shape)
        given = [self._buffers[node] for node in layer.inputs]
        self._buffers[layer.node] = native.emit(self.builder, packed, *given)

    def build(self, record: Record, pool: Pool | None = None) -> Callable[..., Any]:
        """The program, as a function of `inputs` that returns what `outputs` are."""
        for node in self.outputs:
            shape = record.values[node].shape
            self.builder.output(self._buffers[node], shape, Format.CHANNELS_LAST)
        program = self.builder.build(pool)
        if len(self.outputs) == 1:
            return lambda *tensors: program(*tensors)[0]
        return program


def single(
    native: Native, layer: Layer, constants: Constants | None, record: Record
) -> Callable[..., Any]:
    """A program of this one layer, as a function of its inputs."""
    stretch = Stretch([layer.node])
    stretch.add(native, layer, native.pack(constants), record)
    program = stretch.build(record)
    # `conv(x) + x` reads one value twice; a program takes it once.
    places = [layer.inputs.index(node) for node in dict.fromkeys(layer.inputs)]
    if len(places) == len(layer.inputs):
        return program
    return lambda *inputs: program(*(inputs[place] for place in places))


def call_seconds() -> float:
    """What calling a program costs, whatever is in it: the least of many calls.

    On a busy machine most calls wait for a second core, for as long as other work may have it.
    """
    builder = Builder()
    x, y = builder.input((1, 8, 1, 1)), builder.buffer((1, 8, 1, 1))
    builder.add(activation_step, x, y)
    builder.output(y)
    program, tensor = builder.build(), torch.zeros(1, 8, 1, 1)
    least, end = math.inf, time.perf_counter() + _LOOKING_S
    while time.perf_counter() < end:
        times = interleave({"": lambda: program(tensor)}, rounds=20)
        least = min(least, *times[""].seconds)
    return least
