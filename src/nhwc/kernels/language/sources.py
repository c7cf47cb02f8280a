"""A digest of the files that make kernels: what was compiled or measured with others is old."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

_KERNELS = Path(__file__).parents[1]


@cache
def sources(folder: Path = _KERNELS) -> str:
    """A digest of every file in a folder; all of `kernels` have a part in each kernel."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(file.relative_to(folder).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()
