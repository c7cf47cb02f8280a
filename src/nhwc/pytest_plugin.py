"""A plugin that pytest finds by itself: the fixture `keeps_format`, the option `--nhwc-report`.

pytest imports this file in every run where nhwc is installed, whatever project it tests. So nothing
large is imported here, torch least of all, before the first test asks for the fixture.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from . import Audit

_PAGE = "nhwc_page"
"""The property of a test that names a page; JUnit's XML of pytest shows it, too."""

_LONGEST = 120
"""A test's name may be longer than that of a file."""


def pytest_addoption(parser: pytest.Parser) -> None:
    words = "write a page for each model that the fixture keeps_format audits"
    parser.getgroup("nhwc").addoption("--nhwc-report", metavar="DIR", help=words)


@pytest.fixture
def keeps_format(request: pytest.FixtureRequest) -> Callable[..., Audit]:
    """Audit a model, and fail the test if an operator drops channels last: keeps_format(model, x).

    Takes what `nhwc.audit` takes, and returns the audit.
    """
    from ._audit import audit
    from .testing import assert_kept

    count = 0

    def check(model: Any, *inputs: Any, **options: Any) -> Audit:
        __tracebackhide__ = True
        nonlocal count
        count += 1
        report = audit(model, *inputs, **options)
        page = _written(report, request, count)
        assert_kept(report, f"\npage: {page}" if page else "")
        return report

    return check


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say where the pages are. Under xdist the workers wrote them, and their reports name them."""
    reports = [one for reports in terminalreporter.stats.values() for one in reports]
    properties = (pair for one in reports for pair in getattr(one, "user_properties", ()))
    pages = sorted({page for name, page in properties if name == _PAGE})
    if pages:
        plural = "s" if len(pages) > 1 else ""
        terminalreporter.write_line(f"nhwc: {len(pages)} page{plural} in {Path(pages[0]).parent}")


def _written(report: Audit, request: pytest.FixtureRequest, count: int) -> Path | None:
    """Write the page of an audit, if that is asked for: the `count`th of its test."""
    folder = request.config.getoption("--nhwc-report")
    if folder is None:
        return None
    from .errors import InputError
    from .machine.disk import replace_file
    from .render.audit_html import audit_html

    page = Path(
        request.config.invocation_params.dir, folder, _file_name(request.node.nodeid, count)
    )
    text = audit_html(report).encode()
    try:
        page.parent.mkdir(parents=True, exist_ok=True)
        replace_file(page, [text])
    except OSError as error:
        why = error.strerror or error
        raise InputError(
            f"--nhwc-report {folder} cannot be written to: {why}. Name a folder."
        ) from error
    request.node.user_properties.append((_PAGE, str(page)))
    return page


def _file_name(test: str, count: int) -> str:
    """A name of a file for the page of a test, another for each test.

    >>> _file_name("tests/test_net.py::test_it[2]", 1)
    'tests_test_net.py_test_it_2_-8d62223c.html'
    """
    # A file system counts bytes, of which a letter may be several.
    name = re.sub(r"[^\w.-]+", "_", test).encode()[:_LONGEST].decode(errors="ignore")
    number = f"-{count}" if count > 1 else ""
    return f"{name}-{hashlib.sha256(test.encode()).hexdigest()[:8]}{number}.html"
