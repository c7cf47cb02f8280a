"""docs/conformance.md, from the ledgers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .judging import FAILED, REFUSED, VERBS, VERDICTS, WRONG
from .ledger import Ledger

_MOST = 12
"""How many reasons of one kind the page names."""


def page(titles: dict[str, str], ledgers: Sequence[Ledger]) -> str:
    parts = [_HEAD, *_table(titles, ledgers)]
    for ledger in ledgers:
        parts += ["", f"## {ledger.suite}", "", titles[ledger.suite]]
        parts += _reasons(ledger, REFUSED, "Refused, each in one line")
        parts += _reasons(ledger, WRONG, "Wrong")
        parts += _reasons(ledger, FAILED, "Failed")
    return "\n".join(parts) + "\n"


def _table(titles: dict[str, str], ledgers: Sequence[Ledger]) -> list[str]:
    lines = [f"| suite | verb | {' | '.join(VERDICTS)} |", "|---|---|" + "---|" * len(VERDICTS)]
    for ledger in ledgers:
        for verb in VERBS:
            numbers = [ledger.counts[verb, verdict] for verdict in VERDICTS]
            if any(numbers):
                cells = " | ".join(f"{number:,}" for number in numbers)
                lines.append(f"| {ledger.suite} | {verb} | {cells} |")
    return lines


def _reasons(ledger: Ledger, verdict: str, title: str) -> list[str]:
    """The reasons of a verdict, those of most cases first, with one case of each."""
    counts: Counter[tuple[str, str]] = Counter()
    first: dict[tuple[str, str], str] = {}
    for one in ledger.told(verdict):
        key = (one.verb, _plain(one.why))
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

Written by `python -m benchmarks.conformance -o docs/conformance.md` from what the runs of
`python -m benchmarks.conformance SUITE` left. Each case is a model; each verb is asked about it,
and the result must answer as eager PyTorch does: values, types, shapes, strides, what shares memory
with what, what happens to the inputs, and the kind of error. *Right* is all of that; *refused* is
one clear line before any answer; *wrong* differs in any of it; *failed* is any other error.
"""
