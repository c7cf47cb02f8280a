"""The rules of memory formats and how they came out, for a terminal and in Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from .._ops import RuleResult
from .text import paint, plural

WORDS = {True: "pass", False: "FAIL", None: "skip"}
COLORS = {True: "green", False: "red", None: "dim"}


def rules_text(found: Sequence[RuleResult], *, color: bool = False) -> str:
    """Render a line for each rule, with the expected outcome where the rule fails."""
    wide = max(len(rule.claim) for rule in found)
    lines = []
    for rule in found:
        word = paint(WORDS[rule.passed], COLORS[rule.passed], color)
        wanted = f", not {rule.expected}" if rule.passed is False else ""
        lines.append(f"{word}  {rule.claim:<{wide}}  {rule.measured}{wanted}")
    return "\n".join([*lines, "", summary(found), ""])


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
        cells = (rule.claim, f"`{rule.expected}`", f"`{rule.measured}`", WORDS[rule.passed])
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", summary(found), ""])
