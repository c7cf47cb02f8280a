"""The ledger: times and verdicts from this machine, kept so that none is measured twice.

It is one JSON file per environment under `cache_dir()`, read whole and replaced whole, never
locked: two programs at once may both measure the same, and nothing worse. A file that cannot be
read counts as absent.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeGuard

from ..kernels.language.isa import asked
from ..kernels.language.sources import sources
from ..machine.cache import read_own, write_own
from ..machine.environment import Environment, cache_dir

_NATIVE = Path(__file__).parent / "native"
"""What chooses and orders the steps of our kernels."""

_SCHEMA = 3
"""Since 2 an entry keeps every sitting, since 3 the time to enter a program is taken off; files of
before are not read."""


class Ledger:
    """A dictionary from text to plain values that outlives the process.

    >>> ledger = Ledger.of(Environment.here())
    >>> ledger.put("conv2d 1x64x56x56", {"onednn": 0.001})
    >>> ledger.get("conv2d 1x64x56x56")
    {'onednn': 0.001}
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known = _read(path)
        self._new: dict[str, Any] = {}

    @classmethod
    def of(cls, environment: Environment) -> Ledger:
        """The ledger of this machine, torch version and thread count, and of these kernels."""
        made_by = f"{asked()} {sources()} {sources(_NATIVE)}"
        kernels = hashlib.sha256(made_by.encode()).hexdigest()[:8]
        return cls(cache_dir() / "plans" / f"{environment.key}-{kernels}.json")

    @property
    def measured(self) -> int:
        """How many entries were added that the file did not have when it was read or saved."""
        return len(self._new.keys() - self._known.keys())

    @property
    def renewed(self) -> int:
        """How many entries of the file were replaced since then."""
        return len(self._new.keys() & self._known.keys())

    def get(self, key: str) -> Any:
        return self._new.get(key, self._known.get(key))

    def has_new(self, key: str) -> bool:
        """Whether the entry was added since the file was read or saved."""
        return key in self._new

    def forget(self) -> None:
        """Forget the entries of the file; each stays there until a new one replaces it."""
        self._known = {}

    def put(self, key: str, value: Any) -> None:
        self._new[key] = value

    def save(self) -> None:
        """Add new entries to the file; on a full or read-only disk only this process has them."""
        if not self._new:
            return
        # Another process may have saved since: its entries stay, ours are added.
        self._known = {**self._known, **_read(self.path), **self._new}
        self._new = {}
        text = json.dumps({"schema": _SCHEMA, "entries": self._known})
        write_own(self.path, text.encode())


def is_time(value: Any) -> TypeGuard[float]:
    """Whether an entry is a number of seconds: what a file says may be anything.

    >>> is_time(0.5), is_time(True), is_time(float("nan")), is_time([0.5])
    (True, False, False, False)
    """
    return type(value) is float and 0 <= value < math.inf


def digest(words: Iterable[str]) -> str:
    """A short key for many words, the same in every process."""
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:24]


def _read(path: Path) -> dict[str, Any]:
    content = read_own(path)
    try:
        data = json.loads(content or b"")
    except (ValueError, RecursionError, MemoryError):
        return {}
    if not isinstance(data, dict) or data.get("schema") != _SCHEMA:
        return {}
    entries = data.get("entries")
    return entries if isinstance(entries, dict) else {}
