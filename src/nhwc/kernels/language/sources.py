"""A digest of the generators: all files that may have a part in a kernel."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

_KERNELS = Path(__file__).parents[1]


@cache
def sources() -> str:
    """A digest of every file of `kernels`: a change in any of them makes all kernels new."""
    digest = hashlib.sha256()
    for file in sorted(_KERNELS.rglob("*.py")):
        digest.update(file.relative_to(_KERNELS).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()
