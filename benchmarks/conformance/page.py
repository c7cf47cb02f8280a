"""docs/conformance.md and the numbers in the README, from the ledgers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from nhwc.kernels.language.isa import ALL

from .judging import FAILED, REFUSED, RIGHT, VERDICTS, WRONG
from .ledger import Ledger
from .verbs import VERBS

README = Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- conformance -->", "<!-- end of conformance -->"

SUITES = {
    "opinfo": "torch's own operator tests (`torch.testing._internal`): each sample as a model.",
    "weights": "The same samples, with all tensors but the first as weights of the model.",
    "modules": "torch's own module tests (`torch.testing._internal`): each sample of each module.",
    "onnx": "The backend tests of ONNX that onnx2torch reads and torch answers rightly.",
    "models": "Models of torchvision and timm: forward, features, scripted, traced again.",
    "shapes": "Convolutions of oneDNN's tests and of well-known networks, by each kernel here.",
    "networks": "Random networks of layers, views and writes, from 10,000 on of structures that "
    "papers name; values are held against float64.",
}

_MOST = 12
"""How many reasons of one kind the page names."""


def recorded() -> list[Ledger]:
    """Every ledger that has rows: suite by suite, and within it by instruction set."""
    ledgers = [Ledger.read(suite, isa.name) for suite in SUITES for isa in ALL]
    return [ledger for ledger in ledgers if ledger.rows]


def page(ledgers: Sequence[Ledger]) -> str:
    parts = [_HEAD, *_overview(ledgers), "", "By what was asked:", "", *_table(ledgers)]
    said: set[str] = set()
    for ledger in ledgers:
        if ledger.suite not in said:
            parts += ["", f"## {ledger.suite}", "", SUITES[ledger.suite]]
            said.add(ledger.suite)
        where = ", ".join(f"{name} {value}" for name, value in ledger.where.items())
        parts += ["", f"Kernels for {ledger.kernels}, run with {where}."]
        parts += _reasons(ledger, REFUSED, "Refused, each in one line")
        parts += _reasons(ledger, RIGHT, "Right, though farther off than eager")
        parts += _reasons(ledger, WRONG, "Wrong")
        parts += _reasons(ledger, FAILED, "Failed")
    return "\n".join(parts) + "\n"


def summary(ledgers: Sequence[Ledger]) -> str:
    """The paragraph in the README."""
    kernels = {ledger.kernels for ledger in ledgers}
    of = {verdict: sum(_verdicts(ledger)[verdict] for ledger in ledgers) for verdict in VERDICTS}
    return (
        f"{sum(ledger.cases for ledger in ledgers):,} cases of "
        f"{len({ledger.suite for ledger in ledgers})} suites, with kernels for "
        f"{', '.join(isa.name for isa in ALL if isa.name in kernels)}, were asked "
        f"{sum(of.values()):,} questions: {of[RIGHT]:,} answers were right, {of[REFUSED]:,} "
        f"refused with a reason, {of[WRONG]:,} wrong, {of[FAILED]:,} failed otherwise. "
        "[docs/conformance.md](docs/conformance.md) names the suites, the machine, and each reason."
    )


def renew(ledgers: Sequence[Ledger]) -> None:
    """Write the summary into the README, between its two marks."""
    before, _, rest = README.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    README.write_text(f"{before}{BEGIN}\n{summary(ledgers)}\n{END}{after}")


def _overview(ledgers: Sequence[Ledger]) -> list[str]:
    lines = [
        f"| suite | kernels | groups run | cases | {' | '.join(VERDICTS)} |",
        "|---|---|---|---|" + "---|" * len(VERDICTS),
    ]
    for ledger in ledgers:
        of = _verdicts(ledger)
        numbers = (ledger.cases, *(of[verdict] for verdict in VERDICTS))
        cells = " | ".join(f"{number:,}" for number in numbers)
        run = f"{len(ledger.rows):,} of {ledger.groups:,}"
        lines.append(f"| [{ledger.suite}](#{ledger.suite}) | {ledger.kernels} | {run} | {cells} |")
    return lines


def _verdicts(ledger: Ledger) -> Counter[str]:
    found: Counter[str] = Counter()
    for (_, verdict), number in ledger.counts.items():
        found[verdict] += number
    return found


def _table(ledgers: Sequence[Ledger]) -> list[str]:
    lines = [f"| suite | verb | {' | '.join(VERDICTS)} |", "|---|---|" + "---|" * len(VERDICTS)]
    counts: dict[str, Counter[tuple[str, str]]] = {}
    for ledger in ledgers:
        counts[ledger.suite] = counts.get(ledger.suite, Counter()) + ledger.counts
    for suite, count in counts.items():
        for verb in VERBS:
            numbers = [count[verb, verdict] for verdict in VERDICTS]
            if any(numbers):
                cells = " | ".join(f"{number:,}" for number in numbers)
                lines.append(f"| {suite} | {verb} | {cells} |")
    return lines


def _reasons(ledger: Ledger, verdict: str, title: str) -> list[str]:
    """The reasons of a verdict, those of most cases first, with one case of each."""
    counts: Counter[tuple[str, str]] = Counter()
    first: dict[tuple[str, str], str] = {}
    for one in ledger.told(verdict):
        # Of these, the numbers are what there is to say.
        key = (one.verb, one.why if verdict == RIGHT else _plain(one.why))
        counts[key] += 1
        first.setdefault(key, one.case)
    if not counts:
        return []
    lines = ["", f"**{title}**", "", "| cases | verb | reason | one of them |", "|---|---|---|---|"]
    lines += [
        f"| {number} | {verb} | {why} | {first[verb, why]} |"
        for (verb, why), number in counts.most_common(_MOST)
    ]
    rest = counts.most_common()[_MOST:]
    if rest:
        lines.append(f"| {sum(n for _, n in rest)} | | {len(rest)} other reasons | |")
    return lines


def _plain(why: str) -> str:
    """A reason as a cell of a table, the same for numbers that differ."""
    digits = "".join("#" if c.isdigit() else c for c in why[:160])
    while "##" in digits:
        digits = digits.replace("##", "#")
    return digits.replace("|", "\\|").replace("\n", " ")


_HEAD = """# Conformance

Tests of others, run against this package. Written by
`python -m benchmarks.conformance -o docs/conformance.md` from what the runs of
`python -m benchmarks.conformance SUITE --seconds N` left in
[benchmarks/results](../benchmarks/results/conformance); a run goes on where the last one stopped.

Each case is a model; each verb is asked about it, and the result must answer as eager PyTorch does:
values, types, shapes, strides, what shares memory with what, what happens to the inputs, and the
kind of error; the example that a verb is shown must stay as it was. The strides of circular
padding, bilinear sampling and instance norms are free in channels last: eager loses the format,
and a pass keeps it.
*Right* is all of that; *refused* is one clear line before any answer; *wrong* differs in any of it;
*failed* is any other error. Of random networks, models and shapes, values are held against float64
and strides are free:
an answer may be sixteen times as far off as eager's. One that is farther off is held against the
model itself, in float64, with the numbers of its inputs and weights, and of what its layers answer,
moved by at most one rounding of float32: sixteen times the error that this makes is allowed, too,
and such answers are named below with their errors. `plan` is `optimize` with kernels that a lot
chose among all that are offered, and the plan returned whether it won or not. Behind `compile` the
answer is held against Dynamo's own with its `eager` backend, and only models with weights are
asked, since the backend leaves all else to Dynamo; behind `script` and `trace` only models are
asked that torch itself can script and trace, and for gradients, whose strides are free, only cases
that have some.

A row stays as it came out until its group is asked again (`--again`), also where what it found has
been mended since.
"""
