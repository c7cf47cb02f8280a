"""What a process writes to its standard output, C code included, taken for a while."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import tempfile
import threading
from collections.abc import Iterator

_ONE_AT_A_TIME = threading.Lock()
"""A process has one standard output: two that took it could not both put it back."""


class Taken:
    """What was written while standard output was taken."""

    def __init__(self) -> None:
        self.text = b""

    def mark(self, line: str) -> None:
        """Write a line between those that others write."""
        os.write(1, f"{line}\n".encode())


@contextlib.contextmanager
def stdout_taken(taken: Taken) -> Iterator[None]:
    """Lead descriptor 1 into a file while the body runs; `taken.text` holds it afterwards.

    Whoever takes it gives back what belongs to others: `give_back`. It raises OSError where there
    is no standard output, or no C library that can be told to write out what it holds.

    >>> taken = Taken()
    >>> with stdout_taken(taken):
    ...     taken.mark("seen")
    >>> taken.text
    b'seen\\n'
    """
    if os.name != "posix":
        raise OSError(f"standard output cannot be led elsewhere under {os.name}")
    flush = ctypes.CDLL(None).fflush
    with _ONE_AT_A_TIME, tempfile.TemporaryFile() as file:
        before = os.dup(1)
        try:
            # What waits in buffers belongs to the owner's output, not to ours.
            _flush_python()
            flush(None)
            os.dup2(file.fileno(), 1)
            yield
        finally:
            flush(None)
            os.dup2(before, 1)
            os.close(before)
            file.seek(0)
            taken.text = file.read()


def give_back(text: bytes) -> None:
    """Write to standard output what others meant for it."""
    while text:
        text = text[os.write(1, text) :]


def _flush_python() -> None:
    # It may be closed, replaced by anything, or missing.
    with contextlib.suppress(AttributeError, OSError, ValueError):
        sys.stdout.flush()
