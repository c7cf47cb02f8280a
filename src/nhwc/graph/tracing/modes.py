"""What torch has once for all code, which a graph does not set: gradients, autocast, seeds."""

from __future__ import annotations

import torch

SEEDS = "it seeds torch's random numbers, or draws some itself"

_KINDS = ("cpu", "cuda")


def modes() -> tuple[object, ...]:
    """Return the global modes that a graph would not set: gradients and autocast."""
    # torch.autocast("cpu", torch.float32) sets a type and enables nothing.
    cast = [torch.get_autocast_dtype(k) if torch.is_autocast_enabled(k) else None for k in _KINDS]
    return torch.is_grad_enabled(), *cast
