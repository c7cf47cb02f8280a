"""What float64 said of a model, remembered for the same weights, inputs and kernels.

Running a model in float64 takes most of the time of an `optimize` whose kernels are known, and says
the same every time. So its verdict is kept under a digest of everything it hangs on that can be
read: the weights, the example, the structure as torch prints it. What cannot be read, the user's
code, is why the result is held against the original itself every time, in float32.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .memory import Memory
from .verify import Check, Verification


def digest_of(model: nn.Module, inputs: Sequence[Any], *rest: object) -> str:
    """The same for the same class, structure, weights and inputs.

    >>> net, x = nn.Linear(2, 2), torch.ones(1, 2)
    >>> before = digest_of(net, [x])
    >>> _ = net.weight.data.mul_(2)
    >>> digest_of(net, [x]) == before
    False
    """
    found = hashlib.sha256(f"{type(model)} {model} {rest}".encode())
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        _add(found, name, value)
    for number, value in enumerate(inputs):
        _add(found, str(number), value)
    return found.hexdigest()[:32]


def recall(memory: Memory, digest: str, kernels: str) -> Verification | None:
    """The verdict on these kernels; None if there is none."""
    known = memory.get(f"verified {digest}")
    try:
        if known["kernels"] != kernels:
            return None
        checks = tuple(Check(**check) for check in known["checks"])
        return Verification(checks, bool(known["in_float64"]), remembered=True)
    except (TypeError, KeyError):
        return None


def remember(memory: Memory, digest: str, kernels: str, verdict: Verification) -> None:
    """Keep the verdict for whoever asks with the same digest and kernels."""
    data = verdict.to_dict()
    kept = {name: data[name] for name in ("checks", "in_float64")}
    memory.put(f"verified {digest}", {"kernels": kernels, **kept})


def _add(found: Any, name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        found.update(f"{name} {value!r}".encode())
        return
    value = value.detach()
    found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
    # What has no plain bytes is told by its printed form: sparse, quantized, on another device.
    if value.layout is not torch.strided or value.is_quantized or value.device.type != "cpu":
        found.update(repr(value).encode())
        return
    dense = value.resolve_conj().resolve_neg().contiguous().reshape(-1)
    found.update(dense.view(torch.uint8).numpy() if dense.numel() else b"")
