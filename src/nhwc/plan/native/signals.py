"""Calls on signals, N, C, L: an image of one row each, which the kernels for images compute.

The numbers of a signal lie as those of other tokens do, and are moved on paper until a kernel wants
the channels of each place side by side. What a call says of a signal, `kernel_size=(3,)`, is said
of that image: `(1, 3)`. Layers with weights, `Conv1d` say, become one in `weighted`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from ...graph.modules.layers import Fused
from ...graph.modules.leaves import computes_as, runs_hooks
from ...graph.modules.mended import GroupNorm, InstanceNorm
from ...kernels.layers.pooling import adaptive_avgpool_step
from ..implementation import Implementation
from ..recording import Seen
from . import arithmetic, norms
from .calls import Lower, OperatorCall, kernels_in
from .fused import fused
from .rows import in_one_row
from .transposed import OF_SIGNALS, transposed
from .windows import ARGUMENTS, Given, Make, average_pool, max_pool, of_row, resize


class _RowCall(OperatorCall):
    """A call whose tensors have a row of their own."""

    @property
    def out(self) -> Seen:
        return _with_row(super().out)

    def seen(self, index: int) -> Seen:
        return _with_row(super().seen(index))


def signals(call: OperatorCall) -> tuple[Implementation, ...]:
    """Our kernels for a call whose tensors are all signals."""
    seen = [call.record.tensor(node) for node in (*call.layer.inputs, call.node)]
    if any(one is None or len(one.shape) != 3 for one in seen):
        return ()
    row = _RowCall(call.graph, call.record, call.layer)
    lower = _of_module(row.module) if row.module is not None else _FUNCTIONS.get(row.name)
    found = kernels_in(lower(row)) if lower else ()
    return tuple(in_one_row(one, call.out.shape) for one in found)


def _with_row(seen: Seen) -> Seen:
    n, c, length = seen.shape
    return replace(seen, shape=(n, c, 1, length))


def _of_module(module: Any) -> Lower | None:
    kinds = (lower for kind, lower in _MODULES.items() if computes_as(module, kind))
    return None if runs_hooks(module) else next(kinds, None)


def _windows(make: Callable[[Given], Make | None]) -> Lower:
    def lower(call: OperatorCall) -> Implementation | None:
        module = call.module
        given = vars(module) if module is not None else call.settings(ARGUMENTS[make])
        return None if given is None else call.on_images(make(of_row(given)))

    return lower


def _mean(call: OperatorCall) -> Implementation | None:
    return call.on_images(adaptive_avgpool_step)


_FUNCTIONS: dict[str, Lower] = {
    "max_pool1d": _windows(max_pool),
    "avg_pool1d": _windows(average_pool),
    "adaptive_avg_pool1d": _mean,
    "interpolate": _windows(resize),
}
_MODULES: dict[type[nn.Module], Lower] = {
    nn.MaxPool1d: _windows(max_pool),
    nn.AvgPool1d: _windows(average_pool),
    nn.AdaptiveAvgPool1d: _mean,
    nn.Upsample: _windows(resize),
    nn.PReLU: arithmetic.prelu,
    **dict.fromkeys((nn.GroupNorm, GroupNorm, InstanceNorm), norms.group_norm),
    **dict.fromkeys(OF_SIGNALS, transposed),
    Fused: fused,
}
