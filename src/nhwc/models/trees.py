"""Nested lists, tuples and dicts of tensors, and lists of names."""

from __future__ import annotations

from torch import Tensor
from torch.utils._pytree import tree_leaves


def tensors_of(tree: object) -> list[Tensor]:
    """Every tensor in nested lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def versions_of(tree: object) -> list[int]:
    """Torch's counter of writes to each tensor in `tree`; inference tensors have none."""
    return [tensor._version for tensor in tensors_of(tree) if not tensor.is_inference()]


def some(names: list[str]) -> str:
    """The first two of many names, and how many more there are."""
    shown = ", ".join(name or "the model" for name in names[:2])
    return shown + (f" and {len(names) - 2} more" if len(names) > 2 else "")
