"""What came out of each group of cases, kept from run to run, for each instruction set."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .judging import RIGHT, VERDICTS, Outcome

RESULTS = Path(__file__).parents[1] / "results" / "conformance"


@dataclass
class Row:
    """The outcomes of one group: how many of each, and those of which there is something to say."""

    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    told: list[Outcome] = field(default_factory=list)
    asked: set[str] = field(default_factory=set)
    """The verbs that this group was asked about, also where they had nothing to say of a case."""

    def add(self, outcome: Outcome) -> None:
        self.counts[outcome.verb, outcome.verdict] += 1
        if outcome.verdict != RIGHT or outcome.why:
            self.told.append(outcome)

    def update(self, more: Row) -> None:
        """Take over what other verbs said of the same group."""
        self.counts += more.counts
        self.told += more.told
        self.asked |= more.asked

    @property
    def cases(self) -> int:
        """How many cases were asked about: as many as the verb was that had most to say."""
        verbs = {verb for verb, _ in self.counts}
        return max((sum(self.counts[v, d] for d in VERDICTS) for v in verbs), default=0)

    def to_dict(self) -> dict[str, Any]:
        counts = {" ".join(key): number for key, number in sorted(self.counts.items())}
        told = [[one.case, one.verb, one.verdict, one.why] for one in self.told]
        row = {"asked": sorted(self.asked), "counts": counts}
        return row | ({"told": told} if told else {})

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Row:
        counts = Counter({(*k.rsplit(" ", 1),): n for k, n in data["counts"].items()})
        told = [Outcome(*one) for one in data.get("told", ())]
        return cls(counts, told, set(data["asked"]))  # type: ignore[arg-type]


@dataclass
class Ledger:
    """The rows of one suite with the kernels of one instruction set, in a file of their own."""

    suite: str
    kernels: str
    rows: dict[str, Row] = field(default_factory=dict)
    groups: int = 0
    """How many the suite has; some of them may have no row yet."""
    where: dict[str, str | int] = field(default_factory=dict)
    """The machine and the versions of the last run."""

    @property
    def path(self) -> Path:
        return RESULTS / self.kernels / f"{self.suite}.json"

    @classmethod
    def read(cls, suite: str, kernels: str) -> Ledger:
        ledger = cls(suite, kernels)
        if ledger.path.exists():
            stored = json.loads(ledger.path.read_text())
            ledger.rows = {group: Row.from_dict(row) for group, row in stored["rows"].items()}
            ledger.groups, ledger.where = stored["groups"], stored["where"]
        return ledger

    def lacking(self, group: str, verbs: Sequence[str]) -> list[str]:
        """Those of `verbs` that this group was not asked about."""
        asked = self.rows[group].asked if group in self.rows else set()
        return [verb for verb in verbs if verb not in asked]

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = [
            f"{json.dumps(group)}: {json.dumps(row.to_dict())}" for group, row in self._sorted()
        ]
        partial = self.path.with_suffix(".partial")
        head = f'"groups": {self.groups},\n"where": {json.dumps(self.where)},\n"rows": {{\n'
        partial.write_text("{\n" + head + ",\n".join(lines) + "\n}}\n")
        partial.replace(self.path)

    def _sorted(self) -> list[tuple[str, Row]]:
        return sorted(self.rows.items())

    @property
    def counts(self) -> Counter[tuple[str, str]]:
        return sum((row.counts for row in self.rows.values()), Counter())

    @property
    def cases(self) -> int:
        return sum(row.cases for row in self.rows.values())

    def told(self, verdict: str) -> Iterator[Outcome]:
        """The outcomes of this verdict, in the order of the groups."""
        for _, row in self._sorted():
            yield from (one for one in row.told if one.verdict == verdict)
