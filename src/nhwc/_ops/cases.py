"""The findings of single calls, and the table row that sums them up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .table import ASPECTS, Outcome, Tally


@dataclass(frozen=True)
class Observation:
    """The finding of one call: what happened to the format, and the reason in words."""

    dims: int
    aspect: str
    outcome: Outcome
    example: str


def summarize(cases: Sequence[Observation], dtype: str) -> tuple[Tally, ...]:
    """Put the cases of one dtype together, one row for each aspect and number of dimensions."""
    rows = []
    for dims in (4, 5):
        for aspect in ASPECTS:
            group = [case for case in cases if (case.dims, case.aspect) == (dims, aspect)]
            if group:
                rows.append(_row(group, dtype))
    return tuple(rows)


def _row(group: Sequence[Observation], dtype: str) -> Tally:
    # Calls whose results have no format of their own count only if there are no others.
    telling = [c for c in group if c.outcome not in (Outcome.NONE, Outcome.VIEW)] or group
    outcomes = {case.outcome for case in telling}
    worst = min(telling, key=lambda case: list(Outcome).index(case.outcome))
    outcome = worst.outcome
    if outcome is Outcome.LOSES and outcomes & {Outcome.KEEPS, Outcome.CONVERTS}:
        outcome = Outcome.SOMETIMES
    hit = sum(case.outcome is worst.outcome for case in telling)
    first = group[0]
    return Tally(first.dims, dtype, first.aspect, outcome, hit, len(telling), worst.example)
