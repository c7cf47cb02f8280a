"""The peak memory of a run: that of its process, counted from a chosen moment."""

from __future__ import annotations

import gc
from pathlib import Path

import torch

from ..machine.host_memory import trim

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def reset_peak(device: str = "cpu") -> None:
    """Return free memory to the system, then forget earlier peaks."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)
        return
    trim()
    try:
        _CLEAR.write_text("5")
    except OSError:
        return


def peak_bytes(device: str = "cpu") -> int | None:
    """Return the most memory held since `reset_peak`; None where the system does not report it."""
    if device.startswith("cuda"):
        return torch.cuda.max_memory_allocated(device)
    return _status("VmHWM")


def resident_bytes(device: str = "cpu") -> int | None:
    """Return the memory held now; None where the system does not report it."""
    if device.startswith("cuda"):
        return torch.cuda.memory_allocated(device)
    return _status("VmRSS")


def _status(field: str) -> int | None:
    try:
        text = _STATUS.read_text()
    except OSError:
        return None
    found = [line.split()[1] for line in text.splitlines() if line.startswith(field + ":")]
    return int(found[0]) * 1024 if found else None
