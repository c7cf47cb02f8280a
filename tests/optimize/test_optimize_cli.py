"""nhwc optimize: what it prints, writes and refuses."""

import json
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from nhwc import load, optimize
from nhwc._optimize import stages
from nhwc.cli import main
from nhwc.machine.others import Others
from nhwc.render.optimize_html import optimize_html
from nhwc.render.optimize_text import optimize_text

from ..browser import needs_browser, opened
from ..made_up_reports import optimized
from ..optimizing import Aliasing, force, residual

MODEL = """
from torch import nn

class Shifted(nn.Conv2d):
    def forward(self, x, y):
        return super().forward(x) + y

def shifted():
    return Shifted(3, 4, 1)

def tiny():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))
"""


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "my.py"
    path.write_text(MODEL)
    return f"{path}:tiny"


def test_it_prints_passes_layers_errors_and_times(model, capsys, monkeypatch):
    monkeypatch.setattr("nhwc._optimize.stages.winner", lambda compared: ("plan", ""))
    assert main(["optimize", model, "--input", "2x3x12x12"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for expected in (
        "2x3x12x12 float32", "fold_bn_into_conv           1 change", "nothing to do:",
        "plan for 2x3x12x12 float32: 2 layers", "verified against float64 in 3 comparisons",
        "as it was given", "after the passes", "with chosen kernels", "<- returned",
    ):  # fmt: skip
        assert expected in out
    lines = [line.removesuffix(" <- returned") for line in out.splitlines()]
    for stage in ("after the passes", "with chosen kernels"):
        assert any(re.search(rf"{stage} .*\d\.\d\dx of [\d.]+ [mµ]?s$", line) for line in lines)


def test_it_saves_and_loads_by_path_and_draws(model, tmp_path, capsys):
    file, report = tmp_path / "m.nhwc", tmp_path / "m.html"
    words = [model, "--input", "1x3x12x12", "--also", "2x3x9x9", "-o", str(file)]
    assert main(["optimize", *words, "--report", str(report)]) == 0
    assert capsys.readouterr().err == f"wrote {file}\nwrote {report}\n"
    assert load(file)(torch.zeros(1, 3, 12, 12)).shape == (1, 4, 10, 10)
    text = report.read_text()
    assert "Memory format from input to output" in text
    assert "http" not in text
    assert main(["optimize", str(file), "--input", "1x3x12x12", "--format", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["schema"], data["model"]) == (1, str(file))
    assert data["verification"]["passed"] is True


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("o.html", "--report o.html"),
        ("o.HTM", "--report o.HTM"),
        ("o.json", "--format json > o.json"),
        ("o.txt", "--format text > o.txt"),
    ],
)
def test_a_model_is_not_saved_under_the_name_of_a_report(
    name, instead, model, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(["optimize", model, "--input", "1x3x12x12", "-o", name]) == 2
    assert capsys.readouterr() == (
        "",
        f"error: -o {name} would save the model under the name of a report. "
        f"For the report use {instead}; for the model -o FILE.nhwc.\n",
    )
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize(
    ("name", "instead"),
    [("r.json", "--format json > r.json"), ("r.TXT", "--format text > r.TXT")],
)
def test_a_page_is_not_written_under_another_ending(
    name, instead, model, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    assert main(["optimize", model, "--input", "1x3x12x12", "--report", name]) == 2
    assert capsys.readouterr() == (
        "",
        f"error: --report {name} would be a page of HTML. Name it .html, or use {instead}.\n",
    )
    assert not (tmp_path / name).exists()


def test_what_cannot_be_saved_has_its_report_and_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.py").write_text(
        "from torch import nn\n"
        "class Odd(nn.Conv2d):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x) if x.sum() > 0 else x\n"
        "def odd():\n"
        "    return Odd(3, 4, 3)\n"
    )
    words = ["optimize", "my.py:odd", "--input", "1x3x8x8", "-o", "my.nhwc"]
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert "as it was given" in out
    assert err.startswith(
        "error: the model cannot be saved: model: it calls an Odd, whose own code"
    )
    assert err.count("\n") == 1
    assert not (tmp_path / "my.nhwc").exists()


def test_other_shapes_of_several_inputs_are_planned(model, capsys):
    inputs = ["--input", "1x3x8x8", "--input", "4x1x1"]
    also = ["--also", "2x3x8x8", "--also", "4x1x1", "--also", "1x3x6x6", "--also", "1x1"]
    words = [model.replace("tiny", "shifted"), *inputs, *also]
    assert main(["optimize", *words, "--format", "json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["verification"]["checks"]) >= 3


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--input", "1x5x12x12"], "raised RuntimeError on 1x5x12x12"),
        (["--report", "nowhere/x.html"], "nowhere is no folder"),
        (["--also", "3"], "vision model needs 4"),
        (["--input", "1x3x8x8", "--input", "8", "--also", "2x3x8x8"], "--input is given 2 times"),
    ],
)
def test_bad_input_is_one_line(model, words, says, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["optimize", model, *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert says in err
    assert err.count("\n") == 1


def test_what_was_left_alone_is_in_the_text():
    class Reused(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.bn = nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3)

        def forward(self, x):
            y = self.conv(x)
            return self.bn(y) + y

    x = torch.randn(1, 3, 8, 8)
    report = force(Reused().eval(), x).report
    (folding,) = (one for one in report.passes if one.name == "fold_bn_into_conv")
    reason = folding.skipped[0].reason
    assert reason.split(" ")[0] in optimize_text(report, "reused")
    text = optimize_text(force(Aliasing().eval(), x).report, "aliasing")
    assert "(Aliasing) stays" in text
    # Whether a kernel is faster for so small a layer is for timing to say.
    assert "plan for conv, 1x3x8x8 float32" in text or "no kernel is faster" in text


@needs_browser[1]
@needs_browser[0]
def test_the_page_answers(tmp_path):
    from selenium.webdriver.common.by import By

    report = force(residual(), torch.randn(2, 3, 20, 18)).report
    page = tmp_path / "page.html"
    page.write_text(optimize_html(report, "<net>"))
    with opened(page) as browser:

        def all_of(selector):
            return browser.find_elements(By.CSS_SELECTOR, selector)

        assert browser.title.startswith("<net> 2x3x20x18")
        assert len(all_of(".stage")) == 3
        assert all_of("#audits-part") == []
        layers = report.plans[0].layers
        assert len(all_of(".layers tbody tr")) == len(layers)
        assert len(all_of(".option.won")) == len(layers)
        all_of("input[type=search]")[0].send_keys("conv2d")
        shown = [row for row in all_of(".layers tbody tr") if row.is_displayed()]
        assert len(shown) == 3
        pieces = all_of(".strip.tall .piece")
        pieces[0].click()
        assert len(all_of("tr.chosen")) == 1
        assert all_of("#passes details.more") != []
        theme = browser.execute_script("return document.documentElement.dataset.theme")
        all_of("#theme")[0].click()
        assert theme != browser.execute_script("return document.documentElement.dataset.theme")


def test_what_slower_kernels_cost_is_told_where_it_counts():
    (plan,) = optimized().plans
    assert "not the fastest alone: 1 kernel, by 2 ms in all" in plan.sureness
    assert "not the fastest" not in replace(plan, layers_s=0.5).sureness
    assert "by 2000 ms in all" in replace(plan, layers=plan.layers[1:] * 1000).sureness


@pytest.mark.parametrize(
    ("others", "remembered", "busy"),
    [
        (Others(0.1, 2), False, False),
        (Others(1.0, 2), False, True),
        (Others(1.0, 2), True, False),
        (None, False, False),
    ],
)
def test_a_busy_machine_is_named_where_times_were_taken_on_it(others, remembered, busy):
    report = replace(optimized(), others=others, remembered=remembered)
    text = optimize_text(report, "net")
    assert (report.busy, "on a busy machine" in text) == (busy, busy)
    assert ("Meanwhile other programs had 1.0 of 2 cores" in text) is busy


def test_what_others_have_of_the_cores_is_watched_while_a_model_is_optimized(monkeypatch):
    """Whatever the machine does meanwhile: the report says what was seen."""
    monkeypatch.setattr(stages, "watch_others", lambda: lambda: Others(1.25, 2))
    report = optimize(nn.Conv2d(3, 8, 3).eval(), torch.rand(1, 3, 8, 8)).report
    assert report.to_dict()["others"] == {"taken": 1.25, "cores": 2}
