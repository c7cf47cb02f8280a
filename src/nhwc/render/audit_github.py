"""An audit as annotations on lines of a pull request: workflow commands of GitHub Actions."""

from __future__ import annotations

from .._audit.review import Review, Reviewed
from ..shown import printable
from .audit_review import counted, place, story, title
from .text import plural, shape

MOST = 10
"""GitHub shows as many errors, warnings and notices of one step, and drops the rest in silence."""

_COMMANDS = {"error": "error", "warning": "warning", "note": "notice"}


def audit_github(review: Review) -> str:
    """Render a command for each new finding, and in the last line how many there are.

    What is beyond GitHub's limit stands in the log as plain text, and so does what is stale.
    """
    audit = review.audit
    lines = []
    for level, name in _COMMANDS.items():
        found = [one for one in review.new if one.level == level]
        lines += [command(name, story(review, one), _where(one)) for one in found[:MOST]]
        for one in found[MOST:]:
            lines.append(
                f"{name}, beyond the {MOST} that are annotated: {title(one)}, {place(one)}"
            )
    if review.slower:
        told = "Channels last is slower than contiguous on this machine."
        lines.append(command("error", told, {"title": f"{audit.model} is slower"}))
    # A line that begins with two colons would be a command.
    lines += [printable(f"stale in {review.baseline}: {one}", keep="") for one in review.stale]
    inputs = ", ".join(shape(dims) for dims in audit.inputs)
    operators = plural(len(audit.calls), "operator")
    what = printable(f"nhwc audit {audit.model} {inputs}", keep="")
    lines.append(f"{what}: {operators}, {counted(review)}")
    return "\n".join(lines) + "\n"


def command(name: str, message: str, properties: dict[str, str | int]) -> str:
    """Write one workflow command, escaped as GitHub's own toolkit does.

    >>> command("error", "100 %\\nlost", {"file": "a,b.py", "line": 3})
    '::error file=a%2Cb.py,line=3::100 %25%0Alost'
    """
    given = ",".join(f"{key}={_property(str(value))}" for key, value in properties.items())
    return f"::{name} {given}::{_data(message)}"


def _where(one: Reviewed) -> dict[str, str | int]:
    found = one.own
    if found is None or not found.inside:
        return {"title": title(one)}
    return {
        "file": found.path,
        "line": found.line,
        "col": found.first_column,
        "endColumn": found.last_column,
        "title": title(one),
    }


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
