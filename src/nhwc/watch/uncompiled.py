"""What torch.compile made runs as it was written while a mode of ours watches.

Under a mode Dynamo compiles nothing, and remembers that for good: a compiled model whose first call
was watched would never be compiled.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator

import torch


class _Stances(contextlib.ExitStack):
    """The stance of torch.compile, which is one for all threads: the last to leave puts it back."""

    def __init__(self) -> None:
        super().__init__()
        self.lock, self.users = threading.Lock(), 0


_STANCES = _Stances()


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled code as plain Python, in all threads; nothing where nobody compiles."""
    # Whoever compiled anything has loaded it.
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with _STANCES.lock:
        if not _STANCES.users:
            # Inside of a compiled region, where torch refuses this, its own stance holds.
            with contextlib.suppress(RuntimeError):
                _STANCES.enter_context(torch.compiler.set_stance("force_eager"))
        _STANCES.users += 1
    try:
        yield
    finally:
        with _STANCES.lock:
            _STANCES.users -= 1
            if not _STANCES.users:
                _STANCES.close()
