"""An audit as JUnit's XML, which CI servers read as the results of tests."""

from __future__ import annotations

import re
from xml.etree import ElementTree as Tree

from .._audit.review import Review, Reviewed
from ..shown import printable
from ..watch.calls import CallSite
from ..watch.effects import Effect
from .audit_review import counted, place, story, title

_NO_XML = re.compile("[^\t\n\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def audit_junit(review: Review) -> str:
    """Render a test for each finding, and one for each other line that worked on images.

    A test fails for what fails the build, and for every new loss of the format. What the baseline
    knows is skipped. Other findings pass and are told in the output of their test.
    """
    audit = review.audit
    suite = Tree.Element("testsuite", name=_clean(f"nhwc audit {review.model}"))
    told = set()
    for one in review.findings:
        _tell(_case(suite, one.finding.operator, one.finding.site), review, one)
        told.add((one.finding.operator, one.finding.site.place))
    for call, outcome in zip(audit.calls, audit.outcomes, strict=True):
        key = (call.operator, call.site.place)
        if outcome.effect is not Effect.NEUTRAL and key not in told:
            _case(suite, call.operator, call.site)
            told.add(key)
    if review.slower:
        case = Tree.SubElement(
            suite, "testcase", name="channels last is no slower", classname=_clean(review.model)
        )
        Tree.SubElement(case, "failure", message="slower than contiguous", type="slower")
    out = Tree.SubElement(suite, "system-out")
    out.text = _clean("\n".join([counted(review), *(f"stale: {e}" for e in review.stale)]))
    for attribute, tag in (("failures", "failure"), ("skipped", "skipped"), ("tests", "testcase")):
        suite.set(attribute, str(len(suite.findall(f".//{tag}"))))
    suite.set("errors", "0")
    suite.set("time", f"{audit.run_s:.6f}")
    suites = Tree.Element("testsuites")
    suites.append(suite)
    Tree.indent(suites)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + Tree.tostring(suites, "unicode") + "\n"


def _case(suite: Tree.Element, operator: str, site: CallSite) -> Tree.Element:
    return Tree.SubElement(
        suite, "testcase", name=_clean(operator), classname=_clean(site.place), time="0"
    )


def _tell(case: Tree.Element, review: Review, one: Reviewed) -> None:
    text = _clean(story(review, one))
    case.set("time", f"{one.finding.cost_s:.6f}")
    if one.own is not None and one.own.inside:
        case.set("file", _clean(one.own.path))
        case.set("line", str(one.own.line))
    if one.known:
        Tree.SubElement(case, "skipped", message=_clean(f"known by {review.baseline}"))
    elif one.level != "note":
        failure = Tree.SubElement(
            case, "failure", message=_clean(title(one)), type=one.finding.kind
        )
        failure.text = f"{place(one)}\n{_clean(one.finding.site.source)}\n{text}"
    else:
        Tree.SubElement(case, "system-out").text = text


def _clean(text: str) -> str:
    """`text` without characters that XML cannot express."""
    return _NO_XML.sub("\ufffd", printable(text))
