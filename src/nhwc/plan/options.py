"""What may serve a layer, and how long that takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..formats import Format
from ..memory import is_time


@dataclass(frozen=True)
class Option:
    """A candidate for a layer, with the layouts it reads and writes and the time it took."""

    kernel: str
    reads: Format | None
    writes: Format | None
    seconds: float

    @property
    def native(self) -> bool:
        """Whether it is a kernel of ours, which can share a program with others of ours."""
        return self.kernel.startswith("nhwc")

    @property
    def label(self) -> str:
        return f"{self.kernel} {self.reads}" if self.reads else self.kernel

    def to_dict(self) -> dict[str, Any]:
        names = [str(x) if x else None for x in (self.reads, self.writes)]
        return {"kernel": self.kernel, "reads": names[0], "writes": names[1], "s": self.seconds}

    @classmethod
    def of(cls, data: dict[str, Any]) -> Option:
        reads, writes = (Format(x) if x else None for x in (data["reads"], data["writes"]))
        if not isinstance(data["kernel"], str) or not is_time(data["s"]):
            raise ValueError(f"no option: {data}")
        return cls(data["kernel"], reads, writes, data["s"])


Options = dict[str, tuple[Option, ...]]


def remembered(data: Any) -> tuple[Option, ...] | None:
    """The options that `Option.to_dict` made `data` of; None if it did not."""
    try:
        return tuple(Option.of(item) for item in data) or None
    except (TypeError, KeyError, ValueError):
        return None
