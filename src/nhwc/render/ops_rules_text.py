"""The rules of memory formats and how they came out, for a terminal and in Markdown."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from .._ops import RuleResult
from .text import paint, plural, width, wrap

WORDS = {True: "pass", False: "FAIL", None: "skip"}
COLORS = {True: "green", False: "red", None: "dim"}


def rules_text(found: Sequence[RuleResult], *, color: bool = False) -> str:
    """Render a line for each rule, with the expected outcome where the rule fails."""
    wide = min(max(len(rule.claim) for rule in found), width() - 30)
    lines = []
    for title, rules in itertools.groupby(found, lambda rule: rule.section):
        lines += [paint(title, "bold", color)]
        for rule in rules:
            word = WORDS[rule.passed]
            line = f"{word}  {rule.claim:<{wide}}  {outcome(rule)}"
            if len(line) > width():
                claim = wrap(f"{word}  {rule.claim}", "", 6 * " ")
                line = f"{claim}\n{wrap(outcome(rule), 6 * ' ')}"
            lines.append(line.replace(word, paint(word, COLORS[rule.passed], color), 1))
        lines.append("")
    return "\n".join([*lines, summary(found), ""])


def rule_text(rule: RuleResult) -> str:
    """One rule with its program, as it came out here."""
    return f"{WORDS[rule.passed]}  {rule.claim}: {outcome(rule)}\n\n{rule.program}\n"


def outcome(rule: RuleResult) -> str:
    """What was measured, with what should have been, and what it is on other machines."""
    if rule.passed is False:
        return f"{rule.measured}, not {rule.expected}"
    if rule.elsewhere and rule.passed:
        other = rule.expected if rule.measured == rule.elsewhere else rule.elsewhere
        return f"{rule.measured}; on other machines {other}"
    return rule.measured


def summary(found: Sequence[RuleResult]) -> str:
    passed = sum(rule.passed is True for rule in found)
    failed = sum(rule.passed is False for rule in found)
    skipped = len(found) - passed - failed
    tried = f", {skipped} could not be tried" if skipped else ""
    return f"{passed} of {plural(len(found), 'rule')} hold, {failed} do not{tried}"


def rules_markdown(found: Sequence[RuleResult]) -> str:
    """Render a table with the expected and the measured outcomes."""
    lines = ["| rule | expected | measured | |", "|---|---|---|---|"]
    for rule in found:
        expected = " or ".join(f"`{e}`" for e in (rule.expected, rule.elsewhere) if e)
        cells = (rule.claim, expected, f"`{rule.measured}`", WORDS[rule.passed])
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", summary(found), ""])
