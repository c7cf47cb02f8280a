"""The measurements of operators: outcomes, rows, one operator, the whole table."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path

from ..displayed import Displayed
from ..machine.documents import Document, misfits

DOCUMENT = Document(
    "nhwc operators", 1, "table of operators", "Measure again: nhwc ops -o table.json."
)


class Outcome(Enum):
    """What an operator does to channels last; the worst outcome comes first."""

    WRONG = "wrong values"
    ERROR = "error"
    LOSES = "loses"
    SOMETIMES = "sometimes loses"
    CONVERTS = "converts inside"
    KEEPS = "keeps"
    VIEW = "view"
    NONE = "no format"
    UNCHECKED = "not checked"

    def __str__(self) -> str:
        return self.value


MEANING = {
    Outcome.WRONG: "other values than for the same numbers in NCHW",
    Outcome.ERROR: "raises for NHWC what it computes for NCHW, or the process dies",
    Outcome.LOSES: "channels last in, another format out",
    Outcome.SOMETIMES: "loses the format with some arguments, keeps it with others",
    Outcome.CONVERTS: "copies a whole tensor to another layout inside, which NCHW need not",
    Outcome.KEEPS: "channels last in, channels last out, no copy",
    Outcome.VIEW: "returns a view of its input's memory, whose strides follow from the input's",
    Outcome.NONE: "no result has as many dimensions as the input, or its strides say nothing",
    Outcome.UNCHECKED: "could not be run here; the reason stands beside it",
}

ASPECTS = ("forward", "backward", "in-place", "out", "mixed", "slice")
"""Forward and gradient; the in-place and `out=` forms; operands of both formats; channel slice."""


@dataclass(frozen=True)
class Tally:
    """All cases of one aspect, in one number of dimensions and one dtype."""

    dims: int
    dtype: str
    aspect: str
    outcome: Outcome
    cases: int
    of: int
    example: str


@dataclass(frozen=True)
class Speed:
    """NCHW timed against NHWC in turns; `ratio` is how many times faster NHWC is."""

    case: str
    shape: str
    dtype: str
    nchw_s: float
    nhwc_s: float
    ratio: float
    interval: tuple[float, float]

    @classmethod
    def from_list(cls, values: list) -> Speed:
        case, shape, dtype, nchw_s, nhwc_s, ratio, (low, high) = values
        return cls(case, shape, dtype, nchw_s, nhwc_s, ratio, (low, high))

    @property
    def slower(self) -> bool:
        """Clearly slower in NHWC: the whole interval lies more than a tenth below NCHW."""
        return self.interval[1] < 0.9


@dataclass(frozen=True)
class Operator:
    """One operator, or one variant of it, with all that was measured.

    >>> pool = Operator("nn.functional.max_pool2d", "", "pooling")
    >>> pool.title, str(pool.outcome("forward"))  # nothing was measured yet
    ('nn.functional.max_pool2d', 'not checked')
    """

    name: str
    variant: str
    group: str
    rows: tuple[Tally, ...] = ()
    speeds: tuple[Speed, ...] = ()
    problem: str | None = None

    @property
    def title(self) -> str:
        return f"{self.name} ({self.variant})" if self.variant else self.name

    def row(self, aspect: str, dims: int, dtype: str | None = None) -> Tally | None:
        """Return the row asked for; without `dtype`, that of the first dtype measured."""
        for row in self.rows:
            if (row.aspect, row.dims) == (aspect, dims) and dtype in (None, row.dtype):
                return row
        return None

    def outcome(self, aspect: str = "forward", dims: int | None = None) -> Outcome:
        """Return the outcome of one aspect; without `dims`, that in 4-D or else in 5-D."""
        found = (self.row(aspect, d) for d in ((4, 5) if dims is None else (dims,)))
        return next((row.outcome for row in found if row), Outcome.UNCHECKED)

    @property
    def slower(self) -> bool:
        """Whether any call that was timed is clearly slower in NHWC."""
        return any(speed.slower for speed in self.speeds)

    @property
    def reason(self) -> str:
        """The reason for the outcome of the forward pass."""
        found = (self.row("forward", dims) for dims in (4, 5))
        return next((row.example for row in found if row), self.problem or "")

    def answers_to(self, word: str) -> bool:
        """Whether a user who types `word` means this operator.

        >>> Operator("nn.functional.pad", "reflect", "nn function").answers_to("pad")
        True
        """
        last = self.name.rpartition(".")[2]
        names = (self.name, last, self.title, f"{self.name}.{self.variant}", f"torch.{self.name}")
        return any(fnmatchcase(name, word) for name in names)


@dataclass(frozen=True)
class OperatorTable(Displayed):
    """Every operator of one torch on one device.

    >>> pool = Operator("nn.functional.max_pool2d", "", "pooling")
    >>> table = OperatorTable({"torch": "2.13.0"}, "cpu", ("float32",), (pool,))
    >>> table.count("forward")  # how many operators keep the format, lose it, ...
    {}
    >>> table.to_dict()["schema"]
    1
    """

    environment: dict[str, str | int]
    device: str
    dtypes: tuple[str, ...]
    operators: tuple[Operator, ...]
    left_out: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    seconds: float = 0.0

    def count(self, aspect: str = "forward", dims: int = 4) -> dict[Outcome, int]:
        """Count the operators with each outcome, among those where the aspect was measured."""
        found = [op.outcome(aspect, dims) for op in self.operators if op.row(aspect, dims)]
        return {outcome: found.count(outcome) for outcome in Outcome if outcome in found}

    def to_dict(self) -> dict[str, object]:
        return {
            "schema": DOCUMENT.schema,
            "kind": DOCUMENT.word,
            "environment": self.environment,
            "device": self.device,
            "dtypes": list(self.dtypes),
            "seconds": round(self.seconds, 1),
            "notes": list(self.notes),
            "operators": [operator_to_dict(op) for op in self.operators],
            "left_out": self.left_out,
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), separators=(",", ":"), ensure_ascii=False) + "\n"

    @classmethod
    def from_dict(cls, data: dict) -> OperatorTable:
        return cls(
            environment=data["environment"],
            device=data["device"],
            dtypes=tuple(data["dtypes"]),
            operators=tuple(operator_from_dict(op) for op in data["operators"]),
            left_out=data["left_out"],
            notes=tuple(data["notes"]),
            seconds=data["seconds"],
        )


def operator_to_dict(op: Operator) -> dict[str, object]:
    """Return plain values. Rows that differ only in dtype are merged, as most operators' do."""
    merged: dict[tuple, list[str]] = {}
    for row in op.rows:
        key = (row.aspect, row.dims, row.outcome.value, row.cases, row.of, row.example)
        merged.setdefault(key, []).append(row.dtype)
    data: dict[str, object] = {"name": op.name, "variant": op.variant, "group": op.group}
    data["rows"] = [[*key, dtypes] for key, dtypes in merged.items()]
    if op.speeds:
        data["speeds"] = [list(vars(speed).values()) for speed in op.speeds]
    if op.problem:
        data["problem"] = op.problem
    return data


def operator_from_dict(data: dict) -> Operator:
    rows = tuple(
        Tally(dims, dtype, aspect, Outcome(outcome), cases, of, example)
        for aspect, dims, outcome, cases, of, example, dtypes in data["rows"]
        for dtype in dtypes
    )
    speeds = tuple(Speed.from_list(values) for values in data.get("speeds", ()))
    return Operator(data["name"], data["variant"], data["group"], rows, speeds, data.get("problem"))


def load_table(path: str | Path) -> OperatorTable:
    """Read a table that `OperatorTable.to_json` wrote."""
    data = DOCUMENT.read(path)
    for name in ("dtypes", "operators", "notes"):
        if not isinstance(data.get(name), list):
            raise DOCUMENT.damaged(str(path), f"its {name} are no list")
    try:
        table = OperatorTable.from_dict(data)
    except (KeyError, TypeError, ValueError) as error:
        raise DOCUMENT.damaged(str(path), repr(error)) from error
    rows = (row for operator in table.operators for row in operator.rows)
    unknown = (f"there is no aspect {r.aspect!r}" for r in rows if r.aspect not in ASPECTS)
    for wrong in chain(misfits(table, OperatorTable, "the table"), unknown):
        raise DOCUMENT.damaged(str(path), wrong)
    return table
