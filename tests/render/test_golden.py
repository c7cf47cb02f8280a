"""Every text and page, made from results that never ran, is what `golden/` holds.

`make golden` writes the files anew; look at what changed before you commit them.
"""

import difflib
import re
from dataclasses import replace
from pathlib import Path

import pytest

from nhwc._bench import Benchmark, compare
from nhwc._bench.engines import ENGINES
from nhwc._ops import Outcome, RuleResult, difference
from nhwc._train import Point
from nhwc.render.audit_html import audit_html
from nhwc.render.audit_text import audit_text
from nhwc.render.bench_csv import bench_csv
from nhwc.render.bench_engines_text import engines_text
from nhwc.render.bench_html import bench_html
from nhwc.render.bench_text import bench_text, changes_text
from nhwc.render.ops_html import ops_html
from nhwc.render.ops_markdown import ops_markdown
from nhwc.render.ops_rules_text import rules_markdown, rules_text
from nhwc.render.ops_text import difference_text, ops_text
from nhwc.render.optimize_html import optimize_html
from nhwc.render.optimize_text import optimize_text
from nhwc.render.train_text import log_line

from ..browser import DESK, needs_browser, opened, resized
from ..made_up import HERE, measured, one, suite
from ..made_up_reports import audited, optimized
from ..ops.test_page import example_table

GOLDEN = Path(__file__).parent / "golden"
LAST = "channels_last"
RULES = (
    RuleResult("Moves", "permute makes the same strides", "x.permute(0, 2)", LAST, LAST, True),
    RuleResult("Moves", "a pointwise operator preserves", "x + 1", LAST, "contiguous", False),
    RuleResult("Moves", "cuda() preserves", "x.cuda()", LAST, "not tried: no such device", None),
)


def table():
    return replace(example_table(), environment=HERE.to_dict())


def slower():
    """The changes between two runs of one case, of which one variant got slower."""
    old = one()
    [row] = old.rows
    times = {m.variant: measured(m.variant, 0.03) for m in row.measurements if not m.failure}
    return compare(old, Benchmark(HERE, (replace(row, measurements=tuple(times.values())),)))


def changed():
    """The differences between a table and one where the first operator keeps the format."""
    new = table()
    first, *others = new.operators
    kept = tuple(replace(row, outcome=Outcome.KEEPS) for row in first.rows)
    return difference(new, replace(new, operators=(replace(first, rows=kept), *others)))


def log():
    numbers = (0.198, 0.312, 1010.5, 641.9, 1.71, 0.96, 51.0, 52.6, 100.0, 100.0, 0.1)
    points = (Point(phase, 0, 10, 125, 10, *numbers) for phase in ("train", "val"))
    return "".join(f"{log_line(point)}\n" for point in points)


TEXTS = {
    "audit.txt": lambda: audit_text(audited()),
    "bench-case.txt": lambda: bench_text(one()),
    "bench-suite.txt": lambda: bench_text(suite()),
    "bench-suite.csv": lambda: bench_csv(suite()),
    "bench-changes.txt": lambda: changes_text(slower()),
    "ops.txt": lambda: ops_text(table()),
    "ops.md": lambda: ops_markdown(table()),
    "ops-changes.txt": lambda: difference_text(changed()),
    "ops-rules.txt": lambda: rules_text(RULES),
    "ops-rules.md": lambda: rules_markdown(RULES),
    "optimize.txt": lambda: optimize_text(optimized(), "net"),
    "train.txt": log,
}

PAGES = {
    "audit.page": lambda: audit_html(audited()),
    "bench-case.page": lambda: bench_html(one()),
    "bench-suite.page": lambda: bench_html(suite()),
    "ops.page": lambda: ops_html(table()),
    "optimize.page": lambda: optimize_html(optimized(), "net"),
}


def held(name, text, renew):
    """Hold `text` against the file of that name, or write the file."""
    file = GOLDEN / name
    # The last digits of a number are the processor's.
    text = re.sub(r"\d+\.\d{6,}", lambda number: f"{float(number[0]):.6g}", text)
    if renew:
        file.write_text(text, encoding="utf-8")
        return
    lines = file.read_text(encoding="utf-8").splitlines(), text.splitlines()
    changes = "\n".join(difflib.unified_diff(*lines, "golden", "now", lineterm="", n=1))
    assert not changes, f"{name} is another; if that is meant, `make golden`:\n{changes}"


@pytest.mark.parametrize("name", TEXTS)
def test_texts(name, monkeypatch, request):
    monkeypatch.setenv("COLUMNS", "96")
    held(name, TEXTS[name](), request.config.getoption("--renew"))


@pytest.mark.parametrize("name", [name for name in TEXTS if name.endswith(".txt")])
def test_no_report_is_wider_than_the_terminal(name, monkeypatch):
    if name == "train.txt":
        pytest.skip("a log has a line for each batch")
    monkeypatch.setenv("COLUMNS", "60")
    assert [line for line in TEXTS[name]().splitlines() if len(line) > 60] == []


def test_what_is_longer_than_its_column_goes_on_below(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    whole = table()
    first = whole.operators[0]
    dtypes = ("float32", "float64", "bfloat16", "float16", "uint8")
    rows = tuple(replace(first.rows[0], dtype=dtype) for dtype in dtypes)
    rule = replace(RULES[0], claim="a claim " * 9, measured="RuntimeError: a tensor " * 4)
    texts = (
        ops_text(replace(whole, operators=(replace(first, rows=rows),))),
        rules_text((*RULES, rule)),
        engines_text(ENGINES),
    )
    for text in texts:
        assert [line for line in text.splitlines() if len(line) > 60] == []
    assert " ".join(dtypes) in " ".join(texts[0].split())


def test_a_plan_is_no_wider_than_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    report = optimized()
    plan = report.plans[0]
    layers = tuple(replace(layer, name=f"backbone.{layer.name}.conv") for layer in plan.layers)
    text = optimize_text(replace(report, plans=(replace(plan, layers=layers),)), "net")
    shown = text[text.index("plan for") : text.index("verified")]
    assert "slowest layers" in shown
    assert [line for line in shown.splitlines() if len(line) > 60] == []


@needs_browser[0]
@needs_browser[1]
def test_pages_as_they_are_read(tmp_path, request):
    files = {name: tmp_path / f"{name}.html" for name in PAGES}
    for name, file in files.items():
        file.write_text(PAGES[name]())
    with opened(files["audit.page"]) as browser:
        for name, file in files.items():
            browser.get(file.as_uri())
            resized(browser, DESK)
            text = browser.execute_script("return document.body.innerText")
            lines = [line.rstrip() for line in text.splitlines() if line.strip()]
            held(name, "\n".join(lines) + "\n", request.config.getoption("--renew"))


def test_each_file_has_a_test():
    assert {file.name for file in GOLDEN.iterdir()} == {*TEXTS, *PAGES}
