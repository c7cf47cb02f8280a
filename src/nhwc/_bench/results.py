"""The result of a benchmark: cases, measurements, rows. Raw times are stored, the rest derived."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from ..displayed import Displayed
from ..machine.documents import Document, misfits
from ..machine.environment import Environment
from ..machine.others import Others
from ..machine.timing import Comparison, Samples
from .engines import ENGINES, find_engine
from .floor import Floor

DOCUMENT = Document("bench", 1, "result of nhwc bench", "Measure again, with -o FILE.json.")


@dataclass(frozen=True)
class Case:
    """One thing to measure: a model, the shapes of its inputs, and how it is run.

    >>> str(Case("resnet50", ((4, 3, 224, 224),), threads=2))
    'resnet50 4x3x224x224, 2 threads'
    """

    model: str
    shapes: tuple[tuple[int, ...], ...]
    threads: int
    train: bool = False
    amp: bool = False
    device: str = "cpu"
    seed: int = 0
    weights: str | None = None

    @property
    def batch(self) -> int:
        return self.shapes[0][0]

    def with_batch(self, batch: int) -> Case:
        return replace(self, shapes=tuple((batch, *shape[1:]) for shape in self.shapes))

    def __str__(self) -> str:
        shapes = " ".join("x".join(map(str, shape)) for shape in self.shapes)
        threads = f"{self.threads} thread{'s' * (self.threads != 1)}"
        how = ", training step" * self.train + ", mixed precision" * self.amp
        where = f", {self.device}" if self.device != "cpu" else ""
        return f"{self.model} {shapes}, {threads}{how}{where}"


@dataclass(frozen=True)
class Measurement:
    """One variant of one case: its times, turn by turn, or why there are none.

    `error` is the largest difference from a float64 run, divided by that run's largest value; a
    variant with a larger error than the case allows is not timed. `peak_bytes` is the peak while
    it runs, less the memory held before the model was built; the peak of set-up does not count.
    `folded` and `left` count the batch norms of an engine whose step is to fold them.
    """

    variant: str
    turns: tuple[tuple[float, ...], ...] = ()
    setup_s: float = math.nan
    peak_bytes: int | None = None
    error: float = math.nan
    version: str = ""
    failure: str = ""
    folded: int | None = None
    left: int | None = None

    @property
    def samples(self) -> Samples:
        """The seconds of every call that was kept."""
        return Samples(tuple(second for turn in self.turns for second in turn))

    @property
    def per_turn(self) -> Samples:
        """The median of each turn, which pairs with that of the same turn of another variant."""
        return Samples(tuple(Samples(turn).median_s for turn in self.turns))

    @property
    def median_s(self) -> float:
        return self.per_turn.median_s


@dataclass(frozen=True)
class Published:
    """A figure from elsewhere: how many times faster `after` is said to be than `before`."""

    low: float | None
    high: float | None
    before: str
    after: str
    where: str

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return "faster"
        if self.low == self.high:
            return f"{self.low:.2f}x"
        return f"{self.low:.2f}-{self.high:.2f}x"


@dataclass(frozen=True)
class Row:
    """One case with all its variants, measured side by side in one run.

    `floor` is what its arithmetic alone would take, `others` what other programs had of the cores
    meanwhile; None where that is unknown.
    """

    case: Case
    measurements: tuple[Measurement, ...] = ()
    failure: str = ""
    propagation: str = ""
    published: Published | None = None
    floor: Floor | None = None
    others: Others | None = None

    @property
    def measured(self) -> tuple[Measurement, ...]:
        return tuple(m for m in self.measurements if not m.failure)

    def measurement(self, variant: str) -> Measurement | None:
        """The times of `variant`, or None where there are none."""
        return next((m for m in self.measured if m.variant == variant), None)

    def comparison(self, variant: str, baseline: str) -> Comparison | None:
        """How many times faster `variant` is than `baseline`, where both were measured."""
        before, after = self.measurement(baseline), self.measurement(variant)
        if before is None or after is None:
            return None
        return Comparison(before.per_turn, after.per_turn)

    @property
    def isolates(self) -> bool:
        """Whether folding alone was measured, in NCHW too: layouts and folding, no other engine."""
        names = {m.variant for m in self.measured}
        plain = {"eager", "channels_last"}
        return "fused_nchw" in names and all(find_engine(n).beyond for n in names - plain)

    def shown(self, variant: str, baseline: str) -> Comparison | None:
        """What a table shows: where folding is isolated, no gain that mixes layouts."""
        first = variant
        while before := find_engine(first).beyond:
            first = before
        mixes = first not in (variant, baseline)
        return None if self.isolates and mixes else self.comparison(variant, baseline)

    def gain(self, variant: str) -> Comparison | None:
        """What the engine's own step gains: its time beside that of the engine one step before."""
        before = find_engine(variant).beyond
        return self.comparison(variant, before) if before else None

    def best(self, *, ours: bool) -> Measurement | None:
        """The fastest of nhwc's own variants, or the fastest of all others."""
        field = [m for m in self.measured if find_engine(m.variant).ours == ours]
        return min(field, key=lambda m: m.median_s, default=None)

    def share_of_peak(self, variant: str) -> float | None:
        """The share of the machine's arithmetic that a call of `variant` reaches."""
        found = self.measurement(variant)
        return self.floor.seconds / found.median_s if self.floor and found else None

    @property
    def judgement(self) -> str:
        """The published figure on this machine: reproduced, exceeded, or not."""
        if self.published is None:
            return ""
        found = self.comparison(self.published.after, self.published.before)
        if found is None:
            return "not measured"
        low, high = found.interval
        bottom = self.published.low or 1.0
        top = self.published.high or math.inf
        if low > top:
            return "exceeded"
        known = self.published.low and found.verdict != "too noisy to tell"
        if found.ratio >= bottom and (known or found.verdict == "faster"):
            return "reproduced"
        return "not here" if high < bottom else "too noisy to tell"


@dataclass(frozen=True)
class Benchmark(Displayed):
    """Rows measured in one environment. `interrupted` means that some cases are missing.

    >>> import nhwc
    >>> empty = Benchmark(nhwc.Environment.here("cpu"), title="nothing yet")
    >>> empty.variants, empty.geometric_mean("optimized")
    ((), nan)
    >>> Benchmark.from_dict(empty.to_dict()) == empty
    True

    `nhwc.bench` returns one with a row for each model, batch and number of threads.
    """

    environment: Environment
    rows: tuple[Row, ...] = ()
    baseline: str = "eager"
    title: str = ""
    interrupted: bool = False

    @property
    def variants(self) -> tuple[str, ...]:
        """Every variant that appears, in the engines' own order."""
        seen = {m.variant for row in self.rows for m in row.measurements}
        return tuple(engine.name for engine in ENGINES if engine.name in seen)

    def geometric_mean(self, variant: str, baseline: str | None = None) -> float:
        """The mean speed-up of `variant` over the rows where both were measured; NaN if none."""
        found = (row.comparison(variant, baseline or self.baseline) for row in self.rows)
        return geometric_mean(comparison.ratio for comparison in found if comparison)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; `from_dict` reads them back."""
        return {
            "schema": DOCUMENT.schema,
            "kind": DOCUMENT.word,
            "title": self.title,
            "interrupted": self.interrupted,
            "baseline": self.baseline,
            "environment": self.environment.to_dict(),
            "rows": [_row_to_dict(row) for row in self.rows],
        }

    @classmethod
    def from_dict(cls, data: Any, where: str = "the result") -> Benchmark:
        """Read what `to_dict` wrote; raise FileError for anything else."""
        DOCUMENT.checked(data, where)
        try:
            result = cls(
                environment=Environment(**data["environment"]),
                rows=tuple(_row_from_dict(row) for row in data["rows"]),
                baseline=data["baseline"],
                title=data["title"],
                interrupted=data["interrupted"],
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise DOCUMENT.damaged(where, repr(error)) from error
        for wrong in chain(misfits(result, cls, "the result"), _nonsense(result)):
            raise DOCUMENT.damaged(where, wrong)
        return result


def load_benchmark(path: Path) -> Benchmark:
    """Read a result that was written with -o FILE.json."""
    return Benchmark.from_dict(DOCUMENT.read(path), str(path))


def _nonsense(result: Benchmark) -> Iterator[str]:
    """Say what in a result no run can have given."""
    claims = [row.published for row in result.rows if row.published]
    named = [result.baseline, *(name for one in claims for name in (one.before, one.after))]
    yield from (f"no variant is called {name!r}" for name in named if name not in _NAMES)
    for row in result.rows:
        sizes = [size for shape in row.case.shapes for size in shape]
        if not sizes or not all(row.case.shapes) or min(*sizes, row.case.threads) < 1:
            yield f"a case of {row.case.model} has no image or no thread"
        if row.floor and not _is_possible(row.floor):
            yield f"the floor of {row.case.model} is no time"
        if row.others and not 0 <= row.others.taken <= row.others.cores < math.inf:
            yield f"others had more cores beside {row.case.model} than there are"
        rounds = {len(found.turns) for found in row.measured}
        if len(rounds) > 1 or 0 in rounds:
            yield f"the variants of {row.case.model} had no turns, or not as many"
        if not all(0 <= m.error < math.inf and 0 <= m.setup_s < math.inf for m in row.measured):
            yield f"a variant of {row.case.model} was timed without an error or a set-up"
        for turn in (turn for found in row.measured for turn in found.turns):
            if not turn or not all(map(_is_time, turn)):
                yield f"a turn of {row.case.model} took no time that a clock shows"


def _is_possible(floor: Floor) -> bool:
    if floor.flop < 0 or floor.peak_flops <= 0:
        return False
    apart = not floor.handover_s or _is_time(floor.handover_s)
    return apart and floor.seconds < _LONGEST_S


def _is_time(seconds: float) -> bool:
    """Whether anybody can have measured it: ratios of others are no numbers."""
    return 1 / _LONGEST_S < seconds < _LONGEST_S


_LONGEST_S = 1e12

_NAMES = {engine.name for engine in ENGINES}


def geometric_mean(ratios: Iterable[float]) -> float:
    """The mean of speed-ups: twice as fast and half as fast cancel out.

    >>> geometric_mean([2.0, 0.5])
    1.0
    """
    logs = [math.log(ratio) for ratio in ratios]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def case_of(data: dict[str, Any]) -> Case:
    """Read a case from plain values."""
    return Case(**{**data, "shapes": _tuples(data["shapes"])})


def _row_to_dict(row: Row) -> dict[str, Any]:
    return {
        "case": asdict(row.case),
        "failure": row.failure,
        "propagation": row.propagation,
        "published": asdict(row.published) if row.published else None,
        "floor": asdict(row.floor) if row.floor else None,
        "others": asdict(row.others) if row.others else None,
        "measurements": [_measurement_to_dict(m) for m in row.measurements],
    }


def _measurement_to_dict(measurement: Measurement) -> dict[str, Any]:
    # JSON has numbers alone, and no clock has more digits than nanoseconds.
    infinite = lambda value: isinstance(value, float) and not math.isfinite(value)
    plain = {key: None if infinite(value) else value for key, value in vars(measurement).items()}
    plain["turns"] = [[round(second, 9) for second in turn] for turn in measurement.turns]
    return plain


def _row_from_dict(data: dict[str, Any]) -> Row:
    return Row(
        case=case_of(data["case"]),
        measurements=tuple(_measurement_from_dict(m) for m in data["measurements"]),
        failure=data["failure"],
        propagation=data["propagation"],
        published=Published(**data["published"]) if data["published"] else None,
        # Results that were written before these were measured have none.
        floor=Floor(**data["floor"]) if data.get("floor") else None,
        others=Others(**data["others"]) if data.get("others") else None,
    )


def _measurement_from_dict(data: dict[str, Any]) -> Measurement:
    plain = dict(data, turns=_tuples(data["turns"]))
    for key in ("setup_s", "error"):
        plain[key] = math.nan if plain[key] is None else plain[key]
    find_engine(plain["variant"])
    return Measurement(**plain)


def _tuples(nested: Sequence[Sequence[Any]]) -> tuple[tuple[Any, ...], ...]:
    return tuple(tuple(inner) for inner in nested)
