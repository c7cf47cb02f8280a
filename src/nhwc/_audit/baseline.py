"""A baseline: the findings of an earlier audit, which fail no build; new ones do.

A finding is known again by the code of its line, not by the number of the line, which shifts with
every edit above it. Where the same code stands in several lines of a file, they are counted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from ..machine.documents import Document, misfits
from .findings import Finding
from .locations import named_from, path_from

DOCUMENT = Document(
    "nhwc audit baseline", 1, "baseline of nhwc audit", "Write it with --update-baseline."
)


@dataclass(frozen=True, order=True)
class Known:
    """What a finding is known by."""

    model: str
    kind: str
    operator: str
    file: str
    code: str
    """The line of source without its blanks, or the module where there is no line."""

    def __str__(self) -> str:
        return f"{self.kind} {self.operator}  {self.file or '(no source line)'}  {self.code}"


@dataclass(frozen=True)
class Baseline:
    """The findings that are known, of one model or of several."""

    known: tuple[Known, ...] = ()

    def split(self, model: str, found: Iterable[Known]) -> tuple[list[bool], list[Known]]:
        """Say of each of `found` whether it is known, and which entries of `model` are stale."""
        left = Counter(entry for entry in self.known if entry.model == model)
        known = []
        for one in found:
            known.append(left[one] > 0)
            left[one] -= 1
        return known, sorted((+left).elements())

    def updated(self, model: str, found: Iterable[Known]) -> Baseline:
        """This baseline with `found` in place of what it knew of `model`."""
        others = (entry for entry in self.known if entry.model != model)
        return Baseline(tuple(sorted((*others, *found))))

    def to_json(self) -> str:
        """The text of the file: one finding a line, sorted, so that a change reads well."""
        lines = [json.dumps(asdict(entry), ensure_ascii=False) for entry in sorted(self.known)]
        findings = "".join(f"\n  {line}," for line in lines).rstrip(",")
        head = json.dumps({"schema": DOCUMENT.schema, "kind": DOCUMENT.word})[:-1]
        return f'{head}, "findings": [{findings}\n]}}\n'


def known_by(finding: Finding, model: str, root: Path) -> Known:
    """What `finding` is known by in the repository at `root`."""
    site = finding.site
    return Known(
        model=named_from(root, model),
        kind=finding.kind,
        operator=finding.operator,
        file=path_from(root, site.file) if site.file else "",
        code=" ".join(site.source.split()) or site.module,
    )


def load_baseline(path: Path) -> Baseline:
    """Read what `Baseline.to_json` wrote."""
    data = DOCUMENT.read(path)
    try:
        baseline = Baseline(tuple(Known(**entry) for entry in data["findings"]))
    except (KeyError, TypeError) as error:
        raise DOCUMENT.damaged(str(path), repr(error)) from error
    for wrong in misfits(baseline, Baseline, "the baseline"):
        raise DOCUMENT.damaged(str(path), wrong)
    return baseline
