"""Leave out the kernels that take more memory than another and are not clearly faster.

Two of Winograd's kernels hold each filter transformed, in two to four times the numbers. Where the
filters are large, reading them takes what it saves to have them ready, and the times come out the
same. A model of little else would be held several times: only those that save most for their memory
stay, and the others transform their filters in every call.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from .options import Option, Options
from .specs import Affine, Layer, Linear, Operator, Spec
from .trials import evicted

_LARGE = 1 << 18
"""Weights of fewer numbers, in all layers of a kind, are not worth a slower kernel."""

_CLEARLY = 1.05
"""Times closer than this are the same, on a machine that does anything else."""

_CACHE = 1 << 25
"""Weights of so many bytes all come from memory, in each call anew."""

_STREAM = 1e10
"""So many bytes a second are read from there."""

_LIMIT = 0.2
"""What kernels may hold beyond one copy of each weight, as a share of all weights."""

_ALWAYS = 1 << 24
"""So many bytes beyond it they may hold in any case: little, beside what a process takes."""

_TRANSFORMED = {"nhwc winograd4x4": 36 / 9, "nhwc winograd2x2": 16 / 9}


def without_waste(options: Options, layers: Sequence[Layer]) -> Options:
    """`options` without those for which another of the same layouts takes less memory."""
    specs = {layer.spec.key: layer.spec for layer in layers}
    counts = Counter(layer.spec.key for layer in layers)
    large = sum(_bytes(spec) * counts[key] for key, spec in specs.items()) > _CACHE
    kept = {
        key: _worthwhile(specs[key], some, counts[key], _STREAM if large else math.inf)
        for key, some in options.items()
    }
    return _within_limits(kept, specs, counts)


def _within_limits(options: Options, specs: dict[str, Spec], counts: Counter[str]) -> Options:
    """`options` without the transformed filters that save least time for their memory, if need be.

    Filters of 3x3 are most of a wide model's weights: it would be held several times.
    """
    limit = max(_ALWAYS, _LIMIT * sum(_bytes(spec) * counts[key] for key, spec in specs.items()))
    while True:
        beyond, savings = 0.0, []
        for key, spec in specs.items():
            ours = [option for option in options[key] if option.native]
            best = min(ours, key=lambda option: option.seconds, default=None)
            if best is None or best.kernel not in _TRANSFORMED:
                continue
            rest = [o.seconds for o in ours if _copies(spec, o) < _copies(spec, best)]
            if rest:
                extra = _bytes(spec) * (_copies(spec, best) - 1)
                beyond += extra * counts[key]
                savings.append(((min(rest) - best.seconds) / extra, key, best))
        if beyond <= limit:
            return options
        _, key, best = min(savings, key=lambda one: one[0])
        options = {**options, key: tuple(o for o in options[key] if o.kernel != best.kernel)}


def _bytes(spec: Spec) -> float:
    return 0.0 if isinstance(spec, (Operator, Affine)) else 4.0 * math.prod(spec.weight)


def _worthwhile(
    spec: Spec, options: tuple[Option, ...], count: int, stream: float
) -> tuple[Option, ...]:
    if isinstance(spec, (Operator, Affine)) or math.prod(spec.weight) * count < _LARGE:
        return options

    def seconds(option: Option) -> float:
        # A trial finds small weights in a cache, where a call of the whole model does not.
        unseen = 0.0 if evicted(spec.weight) else _copies(spec, option) * _bytes(spec)
        return option.seconds + unseen / stream

    return tuple(
        option
        for option in options
        if not any(
            _copies(spec, other) < _copies(spec, option)
            and seconds(other) <= _CLEARLY * seconds(option)
            and (other.reads, other.writes, other.native)
            == (option.reads, option.writes, option.native)
            for other in options
        )
    )


def _copies(spec: Spec, option: Option) -> float:
    """How many times its weights a kernel holds, beside those that it reads where they lie."""
    if option.kernel == "torch" or (isinstance(spec, Linear) and option.native):
        return 0.0
    return _TRANSFORMED.get(option.kernel, 1.0)
