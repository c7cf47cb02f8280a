"""Whether a model can be run at all: its parameters have shapes, values and one device.

And whether there are threads to run it. torch computes on a pool of threads, one for each thread
that calls it. A fork copies the thread that forks, with its pool, but not the threads in that: the
first operator in the child that is large enough to be shared out waits for them for ever.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from .errors import InputError, NhwcError


def check_initialized(model: nn.Module) -> None:
    """Refuse a lazy model that has not been run yet: running it would change it."""
    lazy = [name for name, p in (*model.named_parameters(), *model.named_buffers()) if is_lazy(p)]
    if lazy:
        raise InputError(
            f"{some(lazy)} of {type(model).__name__} has no shape yet: the module is lazy. "
            "Run the model once on an example input first."
        )


def check_devices(model: nn.Module, tensors: Sequence[Tensor]) -> None:
    """Refuse what is on the meta device, and inputs that are elsewhere than the model."""
    own = {t.device for t in (*model.parameters(), *model.buffers())}
    if torch.device("meta") in own or any(t.is_meta for t in tensors):
        raise InputError(
            "the model or its input is on the meta device, where nothing is computed. "
            "Materialise it: model.to_empty(device='cpu')."
        )
    if len(own) == 1 and not all(t.device in own for t in tensors):
        where, other = next(iter(own)), tensors[0].device
        raise InputError(
            f"the model is on {where}, the input on {other}. Move one: input.to({str(where)!r})."
        )


def tensors_of(tree: object) -> list[Tensor]:
    """Every tensor in nested lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def versions_of(tree: object) -> list[int]:
    """How often each tensor in it was written to, where torch counts that."""
    return [tensor._version for tensor in tensors_of(tree) if not tensor.is_inference()]


def some(names: list[str]) -> str:
    """The first two of many names, and how many more there are."""
    shown = ", ".join(name or "the model" for name in names[:2])
    return shown + (f" and {len(names) - 2} more" if len(names) > 2 else "")


class _Forks(threading.local):
    """Of each thread: whether it ran models on several threads, and forked then."""

    ran = False
    lost = False


_forks = _Forks()


def _after_fork() -> None:
    _forks.lost = _forks.ran


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def check_threads() -> None:
    """Refuse to compute in a forked child whose parent's threads are gone: it would hang.

    Only what was run through `nhwc` is known of: torch does not tell whether it used its threads.
    """
    if torch.get_num_threads() == 1:
        return
    if _forks.lost:
        raise NhwcError(
            f"this process was forked after its parent had run a model on "
            f"{torch.get_num_threads()} threads, which the fork did not copy: torch would wait for "
            "them for ever. Call torch.set_num_threads(1) in the child, or start it by spawn."
        )
    _forks.ran = True
