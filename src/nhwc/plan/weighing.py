"""Leave out the kernels that take more memory than another and are not clearly faster.

Most of Winograd's kernels hold each filter transformed, in two to six times the numbers. Where the
filters are large, reading these numbers takes as long as transforming would, and the times come out
the same. A model of mostly such filters would be held several times: only the kernels that save
most time for their memory stay; other layers transform their filters in every call, or not at all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .implementation import Timed, Timings
from .scene import Scene
from .specs import Affine, Layer, OperatorSpec, Spec
from .trials import evicted

_LARGE = 1 << 18
"""If all layers of a kind have fewer weights than this, no time is given up to save memory."""

_CLEARLY = 1.05
"""Times within this ratio count as equal, because measurements vary that much."""

_CACHE = 1 << 25
"""If all weights take more bytes than this, every call reads them from memory anew."""

_STREAM = 1e10
"""The bytes that memory gives in a second."""

_LIMIT = 0.2
"""Kernels may hold this share of all weights beyond one copy of each."""

_ALWAYS = 1 << 24
"""Bytes that they may hold beyond it in any case: few compared with the whole process."""


def without_waste(scene: Scene, timings: Timings) -> Timings:
    """`timings` without kernels that another matches in less memory and hardly more time."""
    kinds = [*scene.kinds().values()]
    everything = sum(_bytes(layer.spec) or _of_module(scene, layer) for layer in scene.layers)
    stream = _STREAM if everything > _CACHE else math.inf
    kept = {
        layer.node: _worthwhile(layer.spec, timings[layer.node], len(layers), stream)
        for layers in kinds
        for layer in layers
    }
    return _within(max(_ALWAYS, _LIMIT * everything), kinds, kept)


def _within(limit: float, kinds: Sequence[Sequence[Layer]], kept: Timings) -> Timings:
    """`kept` within `limit`: without the transformed filters that save least time for memory.

    Filters of 3x3 are most of a wide model's weights, which would be held several times.
    """
    while True:
        beyond, savings = 0.0, []
        for layers in kinds:
            ours = [one for one in kept[layers[0].node] if one.implementation.ours]
            best = min(ours, key=lambda one: one.seconds, default=None)
            copies = best.implementation.copies if best else 0.0
            rest = [one.seconds for one in ours if one.implementation.copies < copies]
            if best and rest and copies > 1:
                extra = _bytes(layers[0].spec) * (copies - 1)
                beyond += extra * len(layers)
                saved = (min(rest) - best.seconds) / extra
                savings.append((saved, layers, best.implementation.name))
        if beyond <= limit:
            return kept
        _, layers, name = min(savings, key=lambda one: one[0])
        for layer in layers:
            some = kept[layer.node]
            kept[layer.node] = tuple(one for one in some if one.implementation.name != name)


def _bytes(spec: Spec) -> float:
    return 0.0 if isinstance(spec, (OperatorSpec, Affine)) else 4.0 * math.prod(spec.weight)


def _of_module(scene: Scene, layer: Layer) -> float:
    """The bytes of what an operator's module holds: a transposed convolution's filters, say."""
    if layer.node.op != "call_module":
        return 0.0
    module = scene.graph.get_submodule(str(layer.node.target))
    return float(sum(parameter.nbytes for parameter in module.parameters()))


def _worthwhile(
    spec: Spec, timed: tuple[Timed, ...], count: int, stream: float
) -> tuple[Timed, ...]:
    if isinstance(spec, (OperatorSpec, Affine)) or math.prod(spec.weight) * count < _LARGE:
        return timed
    if spec.device != "cpu":
        return timed  # A GPU's memory is as fast as many processors' caches.

    def seconds(one: Timed) -> float:
        # A trial finds small weights in a cache, where a call of the whole model does not: it reads
        # them from memory, all copies of them, or the model's own if a kernel holds none.
        read = 0.0 if evicted(spec.weight) else max(1.0, one.implementation.copies) * _bytes(spec)
        return one.seconds + read / stream

    def spares(other: Timed, one: Timed) -> bool:
        """Whether `other` does the same with less memory in hardly more time."""
        a, b = other.implementation, one.implementation
        same = (a.reads, a.writes, a.ours) == (b.reads, b.writes, b.ours)
        return same and a.copies < b.copies and seconds(other) <= _CLEARLY * seconds(one)

    return tuple(one for one in timed if not any(spares(other, one) for other in timed))
