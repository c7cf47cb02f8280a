"""Results in notebooks: framed pages, or text; bars; and docs/notebook.ipynb."""

import ast
import html
import inspect
import json
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from benchmarks.notebook import CELLS, PATH
from torch import nn

import nhwc
from nhwc import audit
from nhwc._bench import Case, Progress, compare
from nhwc._ops import Difference, check_rules
from nhwc._ops.rules import Rule, Section
from nhwc._train import Point, Recipe, Training
from nhwc.displayed import Displayed, html_of, text_of
from nhwc.notebook import Bar
from nhwc.pictures.html import memory_html
from nhwc.render.audit_html import audit_html

from ..browser import needs_browser, opened
from ..made_up import one
from ..ops.test_page import example_table

NET = nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8), nn.Conv2d(8, 8, 3))
NAME = "<img src=x onerror=\"document.title='taken'\"> '&amp;</pre>"


def example():
    return audit(NET, torch.rand(1, 3, 9, 9), name=NAME)


def test_every_result_knows_how_it_looks():
    shown = set(Displayed.__subclasses__())
    assert {kind.__name__ for kind in shown} >= {"Audit", "Benchmark", "OperatorTable"}
    assert shown == set(html_of.registry) - {object} == set(text_of.registry) - {object}
    for result in (example(), one(), example_table()):
        frame = result._repr_html_()
        text = result._repr_mimebundle_(include=None, exclude=None)["text/plain"]
        assert frame.count("<iframe") == frame.count("</iframe>") == 1
        assert str(result) == text
        assert len(text) < 5000
        # Where a frame is taken out, what stands beside it tells the same.
        assert frame.startswith(f"<div><pre>{html.escape(text)}</pre>")


def test_a_small_result_shows_the_words_of_the_command_line():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.BatchNorm2d(8)).eval()
    report = nhwc.fuse(net).report
    point = Point("train", 0, 1, 1, 1, 1, 1, 9, 9, 2, 2, 50, 50, 90, 90, 0.1)
    training = Training(Recipe(), (point,), one().environment)
    (rule,) = check_rules(
        sections=[Section("s", (Rule("a claim", "1", "x = torch.rand(1, 2)\n'<1>'"),))]
    )
    shown = {
        "nothing got slower": compare(one(), one()),
        "2-D float32: keeps -&gt; loses": Difference(
            "pad", "forward", 2, "float32", "keeps", "loses"
        ),
        "1: 0 + 1": next(part for part in report if part.applied),
        "its input comes from 2, not from a convolution": report,
        "Loss 2.00": training,
        "FAIL  a claim: &lt;1&gt;, not 1": rule,
    }
    for words, result in shown.items():
        frame = result._repr_html_()
        text = result._repr_mimebundle_()["text/plain"]
        assert frame.startswith(f"<pre>{html.escape(text)}</pre>")
        assert words in frame, frame
    # A rule's tensors are drawn below its program.
    assert memory_html(rule.drawn[0].memory) in rule._repr_html_()


@needs_browser[0]
@needs_browser[1]
@pytest.mark.parametrize(("back", "theme"), [("#fff", "light"), ("rgb(17 17 17)", "dark")])
def test_the_page_is_whole_in_its_frame_and_apart_from_the_notebook(back, theme, tmp_path):
    from selenium.webdriver.common.by import By

    result = example()
    path = tmp_path / "notebook.html"
    style = f"body {{ background: {back} }} h1, button {{ display: none }}"
    path.write_text(
        f"<!doctype html><style>{style}</style>"
        f"<h1 id=own>own</h1>{result._repr_html_()}{result._repr_html_()}"
    )
    with opened(path) as browser:
        frames = browser.find_elements(By.TAG_NAME, "iframe")
        assert len(frames) == 2
        assert browser.find_elements(By.TAG_NAME, "pre") == []
        assert browser.title != "taken"
        inside = "return arguments[0].contentDocument.documentElement"
        assert browser.execute_script(f"{inside}.dataset.theme", frames[0]) == theme
        whole = browser.execute_script(f"{inside}.offsetHeight", frames[0])
        assert (
            float(frames[0].get_attribute("style").partition("height: ")[2].partition("p")[0]) > 0
        )
        assert frames[0].size["height"] == min(whole, 800)
        own = browser.execute_script("return getComputedStyle(own).font")
        browser.switch_to.frame(frames[0])
        assert browser.find_element(By.TAG_NAME, "h1").is_displayed()
        assert browser.find_element(By.TAG_NAME, "h1").text.startswith("<img")
        browser.find_element(By.CSS_SELECTOR, ".cell.lost").click()
        assert "instance_norm" in browser.find_element(By.CSS_SELECTOR, "#detail h3").text
        browser.switch_to.default_content()
        assert browser.execute_script("return getComputedStyle(own).font") == own


def test_the_page_in_the_frame_is_that_of_the_command_line():
    result = example()
    frame = result._repr_html_()
    srcdoc = frame.partition("srcdoc='")[2].partition("'")[0]
    for entity, character in (("&lt;", "<"), ("&#39;", "'"), ("&amp;", "&")):
        srcdoc = srcdoc.replace(entity, character)
    assert srcdoc == audit_html(result)


class Kernel:
    """IPython inside of a kernel, as far as a bar asks for it."""

    def __init__(self, kernel: object):
        self.shown = []
        self.display = SimpleNamespace(display=self.begin)
        self.shell = SimpleNamespace(kernel=kernel)

    def get_ipython(self):
        return self.shell

    def begin(self, data, raw, display_id):
        assert (data, raw, display_id) == ({}, True, True)
        return self

    def update(self, data, raw):
        self.shown.append(data.get("text/html"))


@pytest.fixture
def kernel(monkeypatch, request):
    made = Kernel(request.param)
    monkeypatch.setitem(sys.modules, "IPython", made)
    monkeypatch.setitem(sys.modules, "IPython.display", made.display)
    return made


@pytest.mark.parametrize("kernel", [object()], indirect=True)
def test_a_bar_tells_of_every_verb_and_goes(kernel, monkeypatch):
    monkeypatch.setattr("nhwc.notebook._EVERY_S", 0.0)
    case = Case("net", ((1, 3, 8, 8),), 1)
    with Bar() as bar:
        bar("capturing <the graph>")
        bar(1, 4, "grid_sample")
        bar(Progress(case, "warming up", 0.5, 60.0))
        with pytest.raises(ZeroDivisionError), Bar() as other:
            other(1 / 0)
    assert kernel.shown[0] == "<progress></progress> capturing &lt;the graph&gt;"
    assert kernel.shown[1].startswith('<progress value="0.25"></progress> 25% grid_sample, ')
    assert kernel.shown[2].endswith("50% net 1x3x8x8, 1 thread: warming up, 1 min 0 s left")
    assert kernel.shown[3:] == [None, None]


@pytest.mark.parametrize("kernel", [None], indirect=True)
def test_a_bar_shows_nothing_outside_of_a_notebook(kernel, capsys):
    with Bar() as bar:
        bar("capturing the graph")
    assert kernel.shown == []
    assert capsys.readouterr() == ("", "")


def test_a_line_of_a_cell_goes_by_the_cells_name(monkeypatch):
    named = {"/tmp/1.py": ("Cell", "In[3]")}
    shell = SimpleNamespace(compile=SimpleNamespace(format_code_name=named.get))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    site = example().calls[0].site
    assert type(site)("", "", "/tmp/1.py", 7, "").place == "In[3]:7"
    assert "In[" not in site.place


def instead(function, result):
    """A stand-in that takes what `function` takes, and has `result` at once."""

    def answer(*args, **options):
        inspect.signature(function).bind(*args, **options)
        return result

    return answer


def test_the_cells_of_the_notebook_run(monkeypatch):
    # Both start processes; their own tests run them.
    monkeypatch.setattr(nhwc, "bench", instead(nhwc.bench, one()))
    monkeypatch.setattr(nhwc, "ops", instead(nhwc.ops, example_table()))
    book = json.loads(PATH.read_text())
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in book["cells"]]
    assert cells == list(CELLS), "run: python -m benchmarks.notebook"
    names = {"__name__": "cell"}
    for cell in book["cells"]:
        if cell["cell_type"] != "code":
            continue
        tree = ast.parse("".join(cell["source"]))
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "notebook.ipynb", "exec"), names)
        kept = [one["data"] for one in cell["outputs"]]
        if last is None:
            assert kept == []
            continue
        result = eval(compile(ast.Expression(last.value), "notebook.ipynb", "eval"), names)
        assert result._repr_html_().startswith("<div><pre>")
        (data,) = kept
        assert "".join(data["text/html"]).startswith("<div><pre>")
        assert "".join(data["text/plain"])
    assert not re.search(r"ipykernel|/home/|/root/|site-packages", PATH.read_text())
