"""Words about reviewed findings that text, annotations, SARIF and JUnit share."""

from __future__ import annotations

from .._audit.findings import KINDS
from .._audit.review import Review, Reviewed
from ..shown import printable
from .audit_text import modules_of, what_happened
from .text import milliseconds, paint, plural


def title(one: Reviewed) -> str:
    """The finding in one line."""
    return f"{operator(one)} {KINDS[one.finding.kind]}"


def operator(one: Reviewed) -> str:
    """The operator, and how often the line calls it."""
    count = len(one.finding.calls)
    times = f" x{count}" if count > 1 else ""
    return printable(one.finding.operator, keep="") + times


def story(review: Review, one: Reviewed) -> str:
    """The finding in a paragraph: what it costs, where it happens, what to change."""
    finding = one.finding
    cost = f" It costs {milliseconds(finding.cost_s)}, {finding.share:.1%} of a run."
    parts = [
        f"{what_happened(review.audit, finding)}, {modules_of(review.audit, finding)}.",
        cost if finding.cost_s else "",
        f" {finding.remedy}",
        f" The call: {finding.site.source} ({place(one)})."
        if one.location not in (None, one.own)
        else "",
    ]
    return printable("".join(parts), keep="")


def place(one: Reviewed) -> str:
    """File and line of the call; its module where no line is known."""
    found = one.location
    module = one.finding.site.module
    text = f"{found.path}:{found.line}" if found else f"in {module or 'the model'}"
    return printable(text, keep="")


def counted(review: Review) -> str:
    """How many findings there are, and how many of them the baseline knows."""
    if not review.baseline:
        return plural(len(review.findings), "finding")
    known = len(review.findings) - len(review.new)
    return f"{plural(len(review.new), 'new finding')}, {known} known, {len(review.stale)} stale"


def baseline_text(review: Review, *, color: bool = False) -> str:
    """Render what the baseline says of an audit: what is new, and what has gone."""
    lines = [f"baseline {review.baseline}: {counted(review)}"]
    for one in review.new:
        label = paint("new  ", "red" if one.fails else "yellow", color)
        lines.append(f"  {label}  {title(one)}  {place(one)}")
    lines += [f"  {paint('stale', 'dim', color)}  {entry}" for entry in review.stale]
    if review.stale:
        lines.append("  Take out what is stale with --update-baseline.")
    return "\n".join(lines) + "\n"
