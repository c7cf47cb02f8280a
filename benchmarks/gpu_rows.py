"""What a step on a GPU found: rows in a file, written whole after each of them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nhwc.machine.disk import replace_file
from nhwc.machine.timing import Comparison, Samples

WHOLE = "finished"
"""How a step ended that left nothing out."""


@dataclass
class Rows:
    """The rows of one step, and how it ended."""

    path: Path
    step: str
    ended: str = "not finished"
    seconds: float = 0.0
    environment: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Rows:
        data = json.loads(path.read_text())
        return cls(path, **data)

    def write(self) -> None:
        data = asdict(self)
        del data["path"]
        replace_file(self.path, [json.dumps(data, indent=1).encode() + b"\n"])

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        self.write()

    def end(self, how: str, seconds: float) -> None:
        self.ended, self.seconds = how, round(seconds, 1)
        self.write()


def comparison(row: dict[str, Any], before: str, after: str) -> Comparison | None:
    """How many times as fast `after` is, of two lists of seconds taken in turns."""
    times = [row.get("seconds", {}).get(name) for name in (before, after)]
    if not all(times):
        return None
    first, second = (Samples(tuple(seconds)) for seconds in times)
    return Comparison(first, second)
