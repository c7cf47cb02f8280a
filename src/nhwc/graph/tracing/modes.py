"""What torch has once for all code, which a graph does not set: gradients, autocast, seeds."""

from __future__ import annotations

import torch

SEEDS = "it seeds torch's random numbers, or draws some itself"

_KINDS = ("cpu", "cuda")


def modes() -> tuple[object, ...]:
    """Return the global modes that a graph would not set: gradients and autocast."""
    kinds = [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in _KINDS]
    return torch.is_grad_enabled(), *kinds
