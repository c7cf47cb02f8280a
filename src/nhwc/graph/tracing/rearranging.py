"""einops in a graph: each of its functions is a call there, and so is each of its layers.

A trace cannot go into them, since they ask an image how many dimensions it has.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor, nn


def einops_loaded() -> ModuleType | None:
    """The package, if anybody has loaded it."""
    return sys.modules.get("einops")


def einops_functions() -> tuple[Callable[..., Any], ...]:
    package: Any = einops_loaded()
    return (package.rearrange, package.reduce, package.repeat, package.einsum) if package else ()


def einops_layers() -> dict[type[nn.Module], type[nn.Module]]:
    """For each class of einops' layers one that calls the function of the same name instead."""
    home = sys.modules.get("einops.layers.torch")
    if home is None:
        return {}
    return {
        kind: _calling(kind, forward)
        for kind, forward in ((home.Rearrange, _rearrange), (home.Reduce, _reduce))
    }


@functools.cache
def _calling(kind: type[nn.Module], forward: Callable[..., Tensor]) -> type[nn.Module]:
    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})


def _rearrange(layer: Any, input: Tensor) -> Tensor:
    package: Any = einops_loaded()
    return package.rearrange(input, layer.pattern, **layer.axes_lengths)  # type: ignore[no-any-return]


def _reduce(layer: Any, input: Tensor) -> Tensor:
    package: Any = einops_loaded()
    return package.reduce(  # type: ignore[no-any-return]
        input, layer.pattern, layer.reduction, **layer.axes_lengths
    )
