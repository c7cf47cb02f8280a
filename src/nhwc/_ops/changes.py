"""Compare two tables, of other versions of torch, devices or machines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ..displayed import Displayed
from .table import ASPECTS, Operator, OperatorTable


@dataclass(frozen=True)
class Difference(Displayed):
    """One entry that differs between two tables."""

    title: str
    aspect: str
    dims: int
    dtype: str
    before: str
    after: str

    def to_dict(self) -> dict[str, str | int]:
        return dict(vars(self))


def difference(old: OperatorTable, new: OperatorTable) -> tuple[Difference, ...]:
    """List what changed between two tables: torch versions, devices, machines.

    Dtypes that only one of the two measured are not compared.
    """
    before = {op.title: op for op in old.operators}
    after = {op.title: op for op in new.operators}
    dtypes = set(old.dtypes) & set(new.dtypes)
    found: list[Difference] = []
    for title in sorted(before.keys() | after.keys()):
        if title not in after or title not in before:
            words = ("listed", "absent") if title in before else ("absent", "listed")
            found.append(Difference(title, "", 0, "", *words))
        else:
            found.extend(_changes(before[title], after[title], dtypes))
    return tuple(found)


def _changes(a: Operator, b: Operator, dtypes: Iterable[str]) -> Iterator[Difference]:
    keys = {(r.aspect, r.dims, r.dtype) for r in (*a.rows, *b.rows) if r.dtype in dtypes}
    for key in sorted(keys, key=lambda k: (ASPECTS.index(k[0]), *k[1:])):
        words = [str(row.outcome) if (row := op.row(*key)) else "absent" for op in (a, b)]
        if words[0] != words[1]:
            yield Difference(a.title, *key, *words)
    timed = [{(speed.case, speed.dtype): speed for speed in op.speeds} for op in (a, b)]
    for case, dtype in sorted(timed[0].keys() & timed[1].keys()):
        slow = [speeds[case, dtype].slower for speeds in timed]
        if slow[0] != slow[1]:
            words = ["slower in NHWC" if s else "not slower in NHWC" for s in slow]
            dims = len(timed[0][case, dtype].shape.split("x"))
            yield Difference(a.title, f"speed, {case}", dims, dtype, *words)
