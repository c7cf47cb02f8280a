"""Reports of what the passes changed in a model, what they left, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ..displayed import Displayed


@dataclass(frozen=True)
class Site:
    """One place that a pass looked at, and changed or left as it was for `reason`.

    A changed site may have a `reason` too: a note for the reader.
    """

    where: str
    what: str
    applied: bool
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "where": self.where,
            "what": self.what,
            "applied": self.applied,
            "reason": self.reason,
        }


@dataclass(frozen=True)
class PassReport(Displayed):
    """Every site that one pass looked at, in the order of the graph, and how long it took.

    >>> PassReport("fold", (Site("bn1", "conv1 + bn1", True),)).applied
    (Site(where='bn1', what='conv1 + bn1', applied=True, reason=''),)
    """

    name: str
    sites: tuple[Site, ...] = ()
    seconds: float = 0.0

    @property
    def applied(self) -> tuple[Site, ...]:
        return tuple(site for site in self.sites if site.applied)

    @property
    def skipped(self) -> tuple[Site, ...]:
        return tuple(site for site in self.sites if not site.applied)

    def to_dict(self) -> dict[str, Any]:
        sites = [site.to_dict() for site in self.sites]
        return {"schema": 1, "name": self.name, "sites": sites, "seconds": self.seconds}


@dataclass(frozen=True)
class Opaque:
    """A part of the model that could not be traced; `path` is empty for the whole model."""

    path: str
    kind: str
    reason: str

    def to_dict(self) -> dict[str, Any]:
        return {"path": self.path, "kind": self.kind, "reason": self.reason}


@dataclass(frozen=True)
class FuseReport(Displayed):
    """The report of `fuse`: pass by pass, and the parts that could not be traced."""

    passes: tuple[PassReport, ...]
    opaque: tuple[Opaque, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def sites(self) -> tuple[Site, ...]:
        """Every batch norm of the model, folded or not."""
        return tuple(site for report in self.passes for site in report.sites if _folds(report))

    @property
    def applied(self) -> tuple[Site, ...]:
        return tuple(site for site in self.sites if site.applied)

    @property
    def skipped(self) -> tuple[Site, ...]:
        return tuple(site for site in self.sites if not site.applied)

    def __iter__(self) -> Iterator[PassReport]:
        return iter(self.passes)

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "passes": [report.to_dict() for report in self.passes],
            "opaque": [part.to_dict() for part in self.opaque],
            "notes": list(self.notes),
        }


def _folds(report: PassReport) -> bool:
    return report.name.startswith("fold_bn")
