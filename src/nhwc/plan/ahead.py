"""Compile what is about to be timed, on all cores; the trials then find it compiled.

A kernel is compiled when the first program with it is made, in a process of its own, while this one
waits. So programs are made in several threads, one for each sort of implementation, and dropped: on
a machine that has compiled nothing yet most of the first `optimize` is this. Triton compiles when a
kernel is first called, so its kernels are called.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from ..kernels.language import isa as isas
from ..machine.environment import available_cores
from .implementation import Implementation
from .scene import Scene
from .specs import Convolution, Layer, Linear, OperatorSpec
from .stretch import together
from .trials import sample

_LARGE = 1 << 24
"""Weights of more bytes are not packed twice; their kernels seldom serve no smaller ones."""


def compile_ahead(scene: Scene, layers: Iterable[Layer]) -> None:
    """Have the kernels of ours that can compute `layers` compiled, several at a time."""
    cores = available_cores()
    if cores == 1:
        return
    sorts: dict[object, tuple[Layer, Implementation]] = {}
    called: list[tuple[Layer, Implementation]] = []
    for layer in layers:
        offered = scene.offered(layer)
        for one in offered:
            if one.ours and not one.free:
                sorts.setdefault(_sort(layer, one), (layer, one))
        compiled = [(layer, one) for one in offered if one.compiles]
        if compiled and _has_room(scene, layer, cores):
            called += compiled
    # More threads than cores: those that wait for one kernel leave the cores to others.
    with ThreadPoolExecutor(4 * cores) as pool:
        made = [pool.submit(_make, scene, *pair) for pair in sorts.values()]
    with ThreadPoolExecutor(cores) as pool:
        for pair in called:
            pool.submit(_call, scene, *pair)
    for program in made:
        program.result()


def _sort(layer: Layer, one: Implementation) -> object:
    """The same for what most likely runs the same kernels."""
    return one.name, one.reads, tuple(map(_alike, one.layers(layer)))


def _alike(layer: Layer) -> object:
    spec, panel = layer.spec, isas.host().panel_columns
    if isinstance(spec, Convolution):
        rest = spec.weight[0] // spec.groups % panel
        return spec.weight[2:], spec.stride, spec.groups, rest
    if isinstance(spec, Linear):
        return Linear, spec.weight[0] % panel
    return spec.name if isinstance(spec, OperatorSpec) else type(spec)


def _make(scene: Scene, layer: Layer, one: Implementation) -> None:
    # A thread of its own begins with gradients.
    with torch.no_grad():
        constants = [given for part in one.layers(layer) for given in scene.constants(part)]
        if not constants or constants[0].nbytes <= _LARGE:
            together(scene.record, [(layer, one, partial(one.prepare, *constants))], [layer.node])


def _call(scene: Scene, layer: Layer, one: Implementation) -> None:
    """Call a kernel that its first call compiles; one that fails is told when it is timed."""
    with torch.no_grad():
        given = [sample(scene.record.values[node], one.reads) for node in layer.inputs]
        one.prepare(*scene.constants(layer))(*given)


def _has_room(scene: Scene, layer: Layer, calls: int) -> bool:
    """Whether a GPU has memory for so many calls of the layer at once, and for as much again."""
    seen = [scene.record.tensor(node) for node in (*layer.inputs, layer.node)]
    size = sum(one.dtype.itemsize * math.prod(one.shape) for one in seen if one)
    return 2 * calls * size <= torch.cuda.mem_get_info(layer.spec.device)[0]
