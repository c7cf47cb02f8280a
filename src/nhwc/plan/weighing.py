"""Leave out the kernels that take more memory than another and are not clearly faster.

Winograd's kernels hold each filter transformed, in two to four times the numbers. Where the filters
are large, reading them takes what the fewer multiplications save, and the times come out the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from .measuring import Option, Options
from .specs import Affine, Layer, Linear, Operator, Spec

_LARGE = 1 << 18
"""Weights of fewer numbers are not worth a slower kernel."""

_CLEARLY = 1.05
"""Times closer than this are the same, on a machine that does anything else."""

_TRANSFORMED = {"nhwc winograd4x4": 36 / 9, "nhwc winograd2x2": 16 / 9}


def without_waste(options: Options, layers: Sequence[Layer]) -> Options:
    """`options` without those for which another of the same layouts takes less memory."""
    specs = {layer.spec.key: layer.spec for layer in layers}
    return {key: _worthwhile(specs[key], some) for key, some in options.items()}


def _worthwhile(spec: Spec, options: tuple[Option, ...]) -> tuple[Option, ...]:
    if isinstance(spec, (Operator, Affine)) or math.prod(spec.weight) < _LARGE:
        return options
    return tuple(
        option
        for option in options
        if not any(
            _copies(spec, other) < _copies(spec, option)
            and other.seconds <= _CLEARLY * option.seconds
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
