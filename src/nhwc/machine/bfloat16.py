"""Whether this processor has arithmetic on bfloat16, asked of torch and of the system."""

from __future__ import annotations

from pathlib import Path

import torch

_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
"""The names by which Linux lists a processor's own arithmetic on bfloat16."""

_NARROW = ("DEFAULT", "AVX2")
"""The capabilities of torch without such instructions, whatever the processor has."""


def emulates_bfloat16() -> bool:
    """Whether this processor computes bfloat16 by way of float32, as far as the system tells."""
    if torch.backends.cpu.get_cpu_capability() in _NARROW:
        return True
    try:
        words = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return False
    return not words & _FLAGS
