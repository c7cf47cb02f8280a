"""What the recipes print: the few lines of a result that decide; `nhwc audit` tells all of it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import nhwc
from nhwc.optimized import Optimized


def small_asked(words: str | None, argv: Sequence[str] | None) -> bool:
    """Read the one option that all recipes have: networks and images small enough for a trial."""
    parser = argparse.ArgumentParser(
        description=words, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="a few layers, for a trial in seconds")
    return parser.parse_args(argv).small


def tell_audit(name: str, audit: nhwc.Audit) -> None:
    """Say where a model leaves channels last, and what that costs."""
    found = audit.findings
    said = f"places to look at: {len(found)}" if found else "keeps channels last throughout"
    print(f"{name}: {len(audit.calls)} operators, {said}")
    for one in found:
        where = one.site.place if one.site.line else one.site.module
        print(f"  {one.kind}: {one.operator} x{max(1, len(one.calls))}, {where}")


def tell_gain(name: str, fast: Optimized) -> None:
    """Say what an optimization gained, how sure that is, and how right its answers are."""
    report = fast.report
    gain, worst = report.comparison, report.verification.worst
    low, high = gain.interval
    print(f"{name}: {gain.ratio:.2f}x as fast ({low:.2f} to {high:.2f}), {gain.verdict}")
    if worst is not None:
        print(f"  error {worst.error:.1e}, eager's own {worst.eager_error:.1e}")
    if report.reason:
        print(f"  {report.reason}")
