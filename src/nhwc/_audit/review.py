"""An audit held against a repository: where its findings stand, which are new, which fail."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..watch.calls import CallSite
from . import Audit
from .baseline import Baseline, Known, known_by
from .findings import Finding, is_note
from .locations import Location, located, named_from


@dataclass(frozen=True)
class Reviewed:
    """One finding: where it stands, whether the baseline knows it, whether it fails the build."""

    finding: Finding
    key: Known
    location: Location | None
    """The line of the operator's call, whosever code that is."""
    known: bool
    fails: bool
    own: Location | None
    """The line to show it at: that of the call, or the model's definition if that is elsewhere."""

    @property
    def level(self) -> str:
        """How loudly a tool should say it: error, warning or note."""
        if self.fails:
            return "error"
        return "note" if self.known or is_note(self.finding) else "warning"


@dataclass(frozen=True)
class Review:
    """An audit, its findings as a repository sees them, and what the baseline had besides."""

    audit: Audit
    findings: tuple[Reviewed, ...]
    model: str
    """The model's name as the repository knows it, from whichever folder it was audited."""
    stale: tuple[Known, ...] = ()
    """Entries of the baseline that were not found any more."""
    baseline: str = ""
    """The name of the baseline's file; empty without one."""
    slower: bool = False
    """Whether channels last was to be no slower than contiguous, and is."""

    @property
    def new(self) -> tuple[Reviewed, ...]:
        return tuple(one for one in self.findings if not one.known)

    @property
    def failed(self) -> bool:
        """Whether the build should fail."""
        return self.slower or any(one.fails for one in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """The audit's values; with a baseline, also which findings are new and what is stale."""
        data = self.audit.to_dict()
        if self.baseline:
            data["baseline"] = {
                "file": self.baseline,
                "new": [place for place, one in enumerate(self.findings) if not one.known],
                "stale": [vars(entry) for entry in self.stale],
            }
        return data


def review(
    audit: Audit,
    root: Path,
    *,
    fail_on: Collection[str] = (),
    baseline: Baseline | None = None,
    baseline_name: str = "",
    definition: CallSite | None = None,
) -> Review:
    """Hold `audit` against the repository at `root`, and against a baseline if there is one.

    `fail_on` has `lost`, `copies` or `slower`. `definition` is where the model is defined: findings
    in the code of packages are shown there, if it lies in the repository.
    """
    keys = [known_by(finding, audit.model, root) for finding in audit.findings]
    model = named_from(root, audit.model)
    known, stale = (baseline or Baseline()).split(model, keys)
    home = located(definition, root) if definition else None
    home = home if home and home.inside else None
    reviewed = []
    for finding, key, is_known in zip(audit.findings, keys, known, strict=True):
        location = located(finding.site, root)
        reviewed.append(
            Reviewed(
                finding=finding,
                key=key,
                location=location,
                known=is_known,
                fails=not is_known and _fails(finding, fail_on),
                own=location if home is None or (location and location.inside) else home,
            )
        )
    compared = audit.comparison
    slower = "slower" in fail_on and compared is not None and compared.verdict == "slower"
    return Review(audit, tuple(reviewed), model, tuple(stale), baseline_name, slower)


def _fails(finding: Finding, fail_on: Collection[str]) -> bool:
    copies = bool(finding.payers or finding.copied_bytes)
    return ("lost" in fail_on and not is_note(finding)) or ("copies" in fail_on and copies)
