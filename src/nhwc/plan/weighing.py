"""Leave out the kernels that take more memory than another and are not clearly faster.

Two of Winograd's kernels hold each filter transformed, in two to four times the numbers. Where the
filters are large, reading them takes what it saves to have them ready, and the times come out the
same. A model of little else would be held several times: only those that save most for their memory
stay, and the others transform their filters in every call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .implementation import Timed, Timings
from .scene import Scene
from .specs import Affine, Layer, Operator, Spec
from .trials import evicted

_LARGE = 1 << 18
"""Weights of fewer numbers, in all layers of a kind, are not worth a slower kernel."""

_CLEARLY = 1.05
"""Times closer than this are the same, on a machine that does anything else."""

_CACHE = 1 << 25
"""Weights of more bytes all come from memory, in each call anew."""

_STREAM = 1e10
"""Bytes a second that memory gives."""

_LIMIT = 0.2
"""Kernels may hold this share of all weights beyond one copy of each."""

_ALWAYS = 1 << 24
"""Bytes that they may hold beyond it in any case: few, beside what a process takes."""

_TRANSFORMED = {"nhwc winograd4x4": 36 / 9, "nhwc winograd2x2": 16 / 9}


def without_waste(scene: Scene, timings: Timings) -> Timings:
    """`timings` without those for which another of the same layouts takes less memory."""
    kinds = [*scene.kinds().values()]
    everything = sum(_bytes(layer.spec) for layer in scene.layers)
    stream = _STREAM if everything > _CACHE else math.inf
    kept = {
        layer.node: _worthwhile(layer.spec, timings[layer.node], len(layers), stream)
        for layers in kinds
        for layer in layers
    }
    return _within(max(_ALWAYS, _LIMIT * everything), kinds, kept)


def _within(limit: float, kinds: Sequence[Sequence[Layer]], kept: Timings) -> Timings:
    """`kept` without the transformed filters that save least time for their memory, if need be.

    Filters of 3x3 are most of a wide model's weights: it would be held several times.
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
    return 0.0 if isinstance(spec, (Operator, Affine)) else 4.0 * math.prod(spec.weight)


def _worthwhile(
    spec: Spec, timed: tuple[Timed, ...], count: int, stream: float
) -> tuple[Timed, ...]:
    if isinstance(spec, (Operator, Affine)) or math.prod(spec.weight) * count < _LARGE:
        return timed

    def seconds(one: Timed) -> float:
        # A trial finds small weights in a cache, where a call of the whole model does not.
        unseen = 0.0 if evicted(spec.weight) else one.implementation.copies * _bytes(spec)
        return one.seconds + unseen / stream

    def spares(other: Timed, one: Timed) -> bool:
        """Whether `other` does the same with less memory in hardly more time."""
        a, b = other.implementation, one.implementation
        same = (a.reads, a.writes, a.ours) == (b.reads, b.writes, b.ours)
        return same and a.copies < b.copies and seconds(other) <= _CLEARLY * seconds(one)

    return tuple(one for one in timed if not any(spares(other, one) for other in timed))
