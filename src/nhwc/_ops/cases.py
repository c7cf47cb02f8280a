"""What single calls showed, and the row of the table that they make together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .table import ASPECTS, Outcome, Row


@dataclass(frozen=True)
class Case:
    """One call: what became of the format, and the reason in words."""

    dims: int
    aspect: str
    outcome: Outcome
    example: str


def summarize(cases: Sequence[Case], dtype: str) -> tuple[Row, ...]:
    """Put the cases of one dtype together, one row for each aspect and number of dimensions."""
    rows = []
    for dims in (4, 5):
        for aspect in ASPECTS:
            group = [case for case in cases if (case.dims, case.aspect) == (dims, aspect)]
            if group:
                rows.append(_row(group, dtype))
    return tuple(rows)


def _row(group: Sequence[Case], dtype: str) -> Row:
    # Calls whose results carry no format do not dilute those whose results do.
    telling = [c for c in group if c.outcome not in (Outcome.NONE, Outcome.VIEW)] or group
    outcomes = {case.outcome for case in telling}
    worst = min(telling, key=lambda case: list(Outcome).index(case.outcome))
    outcome = worst.outcome
    if outcome is Outcome.LOSES and outcomes & {Outcome.KEEPS, Outcome.CONVERTS}:
        outcome = Outcome.SOMETIMES
    hit = sum(case.outcome is worst.outcome for case in telling)
    first = group[0]
    return Row(first.dims, dtype, first.aspect, outcome, hit, len(telling), worst.example)
