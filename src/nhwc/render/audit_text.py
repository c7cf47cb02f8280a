"""An audit for the terminal."""

from __future__ import annotations

from collections import Counter

from .._audit import Audit
from .._audit.divergence import Agreement
from .._audit.findings import KINDS, Finding
from ..shown import printable
from ..watch.effects import short_name
from .audit_reorders_text import reorders_text
from .text import milliseconds, paint, plural, shape, size, width, wrap

_COLORS = {"lost": "red", "misread": "red"}

_KNOWN_TO_DIFFER = {
    "group_norm": (
        "In channels last torch takes the variance from sums of squares, which loses digits where "
        "the mean is large beside the deviation. nhwc.optimize computes it without; elsewhere keep "
        "what it reads contiguous."
    ),
}


def audit_text(audit: Audit, *, color: bool = False) -> str:
    """Render the verdict, then one paragraph per finding."""
    inputs = ", ".join(shape(dims) for dims in audit.inputs)
    name = printable(audit.model, keep="")
    head = wrap(f"{name}  {inputs}  {audit.environment}", "", "  ")
    lines = [head.replace(name, paint(name, "bold", color), 1)]
    verdict = wrap(_verdict(audit), "", "  ")
    lines.append(verdict.replace("clean", paint("clean", "green", color), 1))
    for finding in audit.findings:
        lines += ["", *_finding(audit, finding, color)]
    compared = comparison_words(audit)
    lines += [""] * bool(compared) + [wrap(text, "", "  ") for text in compared]
    if audit.reorders is not None:
        lines += ["", *reorders_text(audit.reorders, color=color)]
    lines += ["", *(wrap(f"not visible: {text}", "") for text in audit.unseen)]
    return "\n".join(lines).rstrip() + "\n"


def _verdict(audit: Audit) -> str:
    counts = audit.counts
    if not audit.calls:
        return "nothing seen: the model calls no operator, or calls them in threads of its own"
    head = f"{plural(len(audit.calls), 'operator')}, {milliseconds(audit.run_s)} a run"
    head += " on a busy machine" * audit.busy
    if audit.clean:
        return f"{'clean' if audit.judged else 'nothing to judge'}: {head}, {clean_words(audit)}"
    parts = [
        _how_many(counts["loses"] + counts["misreads"], "lose", "the format"),
        _how_many(counts["converts"], "convert", "on request"),
        _how_many(counts["restores"], "pay", "to restore it"),
        f"conversions cost {milliseconds(audit.cost_s)} ({audit.cost_s / audit.run_s:.1%})",
    ]
    return f"{head}: " + ", ".join(part for part in parts if part)


def clean_words(audit: Audit) -> str:
    """Count what the calls did, in words, for an audit in which none lost the format."""
    counts = audit.counts
    if not audit.judged:
        return "none on an image (a tensor of 4 or 5 dimensions, or a list of images)"
    parts = [
        _how_many(counts["keeps"], "keep", "it"),
        _how_many(counts["restores"], "make", "it"),
        _how_many(counts["views"], "move", "nothing"),
        _how_many(counts["plain"], "get", "none to keep"),
        _how_many(counts["neutral"], "work", "on no image"),
    ]
    return "channels last is never lost: " + ", ".join(part for part in parts if part)


def _how_many(count: int, verb: str, rest: str) -> str:
    return f"{count} {verb if count > 1 else verb + 's'} {rest}" if count else ""


def _finding(audit: Audit, finding: Finding, color: bool) -> list[str]:
    label = f"{finding.kind.upper():<11}"
    times = f" x{len(finding.calls)}" if len(finding.calls) > 1 else ""
    cost = f"{milliseconds(finding.cost_s)}, {finding.share:.1%}" if finding.cost_s else ""
    places = [finding.site.place] * bool(finding.site.file) + [modules_of(audit, finding)]
    if len("  ".join(places)) <= width() - 4:
        places = ["  ".join(places)]
    called = f"{finding.operator}{times}"
    head = wrap(f"{label} {called}  {cost}".rstrip(), "", "    ")
    head = head.replace(label, paint(label, _COLORS.get(finding.kind, "yellow"), color), 1)
    lines = [head.replace(called, paint(called, "bold", color), 1)]
    lines += [f"    {paint(printable(place, keep=''), 'blue', color)}" for place in places]
    if finding.site.source:
        source = wrap(finding.site.source, "    ", "        ").splitlines()
        lines += [paint(line, "dim", color) for line in source]
    lines.append(wrap(f"{what_happened(audit, finding)}. {finding.remedy}", "    "))
    return lines


def what_happened(audit: Audit, finding: Finding) -> str:
    """Say what the operator did to the format, and what that cost later calls."""
    text = KINDS[finding.kind]
    if finding.payers:
        names = Counter(audit.calls[i].operator.rpartition(".")[2] for i in finding.payers)
        payers = " and ".join(plural(n, f"{name} call") for name, n in names.most_common(2))
        back = "" if finding.kind == "unconverted" else " back"
        text += f"; {payers} later {'pays' if len(finding.payers) == 1 else 'pay'} to convert{back}"
    if finding.copied_bytes:
        text += f"; {size(finding.copied_bytes)} copied"
    return text[0].upper() + text[1:]


def comparison_words(audit: Audit) -> list[str]:
    """Say how fast the two formats were and whether they agree, where they were compared."""
    found = []
    if audit.comparison is not None:
        ratio, (low, high) = audit.comparison.ratio, audit.comparison.interval
        found.append(
            f"channels last against contiguous: {ratio:.2f}x ({low:.2f} to {high:.2f}), "
            f"{audit.comparison.verdict}"
        )
    if audit.agreement is not None:
        found.append(agreement_words(audit.agreement))
    return found


def agreement_words(agreement: Agreement) -> str:
    """Say whether both formats give the same values, and where the first that differ arise."""
    made = f"{plural(agreement.calls, 'call')} made in both formats"
    if agreement.first is not None:
        first = agreement.first
        why = _KNOWN_TO_DIFFER.get(
            short_name(first.operator),
            "Its kernel computes something else in channels last, or it reads memory by strides: "
            "keep what it reads contiguous.",
        )
        return (
            f"{made}: `{first.operator}` is the first whose values differ, by {first.error:.2g} of "
            f"the largest, {first.site.words}. {why}"
        )
    if agreement.result is not None:
        return (
            f"{made} agree, and the model's result differs by {agreement.result.error:.2g} of the "
            "largest value: look for code that asks for strides or is_contiguous()."
        )
    if not agreement.calls:
        return "the model gives the same values in both formats"
    return f"{made} give the same values, and so does the model"


def modules_of(audit: Audit, finding: Finding) -> str:
    """Name the first of the modules that it happens in."""
    sites = [audit.calls[i].site for i in finding.calls] or [finding.site]
    names = list(dict.fromkeys(site.module for site in sites))
    rest = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"in {names[0] or 'the model'}{rest}"
