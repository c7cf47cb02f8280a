"""Compare two runs of a benchmark, to find what got slower."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..displayed import Displayed
from ..errors import InputError
from ..machine.environment import Environment
from ..machine.timing import Comparison
from .results import Benchmark, Case


@dataclass(frozen=True)
class Change:
    """One variant of one case, then and now; the ratio says how many times faster it is now."""

    case: Case
    variant: str
    comparison: Comparison

    @property
    def verdict(self) -> str:
        return self.comparison.verdict


@dataclass(frozen=True)
class Failed:
    """One variant of one case that was measured then and failed now."""

    case: Case
    variant: str
    failure: str


@dataclass(frozen=True)
class Changes(Displayed):
    """Every variant of every case that both runs measured, and those that failed in the second."""

    before: Environment
    after: Environment
    changes: tuple[Change, ...]
    failed: tuple[Failed, ...] = ()

    @property
    def slower(self) -> tuple[Change, ...]:
        return tuple(change for change in self.changes if change.verdict == "slower")

    @property
    def same_machine(self) -> bool:
        """Whether both runs had the same hardware, so that only software explains a change."""
        parts = ("processor", "instruction_set", "cores", "device")
        return all(getattr(self.before, part) == getattr(self.after, part) for part in parts)

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": 1,
            "kind": "bench_changes",
            "before": self.before.to_dict(),
            "after": self.after.to_dict(),
            "changes": [
                {
                    "case": asdict(change.case),
                    "variant": change.variant,
                    "before_s": change.comparison.before.median_s,
                    "after_s": change.comparison.after.median_s,
                    "ratio": change.comparison.ratio,
                    "interval": list(change.comparison.interval),
                    "verdict": change.verdict,
                }
                for change in self.changes
            ],
            "failed": [asdict(one) for one in self.failed],
        }


def compare(old: Benchmark, new: Benchmark) -> Changes:
    """Compare two runs case by case. Their turns are not paired, so the intervals are wider."""
    earlier = {row.case: row for row in old.rows}
    changes, failed = [], []
    for row in new.rows:
        known = earlier.get(row.case)
        for measurement in row.measured:
            before = known.measurement(measurement.variant) if known else None
            if before is not None:
                comparison = Comparison(before.per_turn, measurement.per_turn, paired=False)
                changes.append(Change(row.case, measurement.variant, comparison))
        said = {m.variant: m.failure for m in row.measurements}
        for measurement in known.measured if known else ():
            failure = row.failure or said.get(measurement.variant)
            if failure:
                failed.append(Failed(row.case, measurement.variant, failure))
    if not changes and not failed:
        raise InputError(
            "the two results have no model, shape and variant in common. "
            "Measure the same cases in both."
        )
    return Changes(old.environment, new.environment, tuple(changes), tuple(failed))
