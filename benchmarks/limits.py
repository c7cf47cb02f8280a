"""Limits that a process sets to itself before it runs what may ask for anything."""

from __future__ import annotations

import resource
from pathlib import Path


def limit_memory(more: int) -> None:
    """Let this process take `more` bytes beyond what it has now."""
    # Much of the address space is not memory, so the limit counts only what is added from now on.
    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + more, taken + more))
