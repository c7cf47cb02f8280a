"""Results in a notebook: the page that the command line writes, in a frame; small ones as text."""

from __future__ import annotations

import html
from collections.abc import Callable
from importlib.resources import files
from typing import Any

from .._audit import Audit
from .._audit.step import FirstStep
from .._bench import Benchmark, Changes
from .._ops import Difference, OperatorTable, RuleResult
from .._optimize import OptimizeReport
from .._train import Training
from ..displayed import html_of, text_of
from ..graph.report import FuseReport, PassReport
from ..pictures.html import memory_html
from .audit_html import audit_html
from .audit_text import audit_text
from .bench_html import bench_html
from .bench_text import bench_text, changes_text
from .fuse_text import fuse_text, pass_text
from .ops_html import ops_html
from .ops_rules_text import rule_text
from .ops_text import difference_text, ops_text
from .optimize_html import optimize_html
from .optimize_text import optimize_text
from .step_text import step_text
from .text import to_show
from .train_text import training_text

HEIGHT = 800
"""The most pixels that a page takes up; what is longer scrolls inside of its frame."""


def framed(page: str, text: str) -> str:
    """Put a page into a frame, where its styles and the notebook's do not touch each other.

    The text stands there until the page is loaded, and for good where frames are taken out, as on
    GitHub and in notebooks that are not trusted.
    """
    script = (files(__package__) / "templates" / "frame.js").read_text(encoding="utf-8")
    return (
        f"<div><pre>{html.escape(text)}</pre>"
        f'<iframe title="nhwc" style="width: 100%; max-height: {HEIGHT}px; border: 0" '
        # Pages hold many double quotes, which need no escape between single ones.
        f"onload='{_attribute(script)}' srcdoc='{_attribute(page)}'></iframe></div>"
    )


def _lines(text: str) -> str:
    """Text as the command line would print it: what is small needs no page."""
    return f"<pre>{html.escape(text)}</pre>"


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace("'", "&#39;").replace("<", "&lt;")


def _shown(
    kind: type, text: Callable[[Any], str], page: Callable[[Any], str] | None = None
) -> None:
    """Say what results of a kind look like: a page if they have one, beside their text."""
    text_of.register(kind, lambda result: to_show(text(result)))
    if page is None:
        html_of.register(kind, lambda result: _lines(text(result)))
    else:
        html_of.register(kind, lambda result: framed(page(result), text(result)))


_shown(Audit, audit_text, audit_html)
_shown(Benchmark, bench_text, bench_html)
_shown(OperatorTable, ops_text, ops_html)
_shown(
    OptimizeReport,
    lambda result: optimize_text(result, result.model),
    lambda result: optimize_html(result, result.model),
)
_shown(Changes, changes_text)
_shown(Difference, lambda result: difference_text([result]).partition("\n")[0])
_shown(PassReport, pass_text)
_shown(FuseReport, fuse_text)
_shown(Training, training_text)
_shown(RuleResult, rule_text)
_shown(FirstStep, lambda result: f"{step_text(result)}\n\n{audit_text(result.audit)}")


@html_of.register
def _(result: RuleResult) -> str:
    return "".join([_lines(rule_text(result)), *(memory_html(one.memory) for one in result.drawn)])


@html_of.register
def _(result: FirstStep) -> str:
    return _lines(step_text(result)) + framed(audit_html(result.audit), audit_text(result.audit))
