"""What oneDNN reorders inside its kernels: asked for, told, and nothing left changed."""

import contextlib
import os
import platform
import subprocess
import sys

import pytest
import torch
from torch import nn

from nhwc import audit, convert_
from nhwc._audit import reorders
from nhwc.render.audit_html import audit_html
from nhwc.render.audit_text import audit_text
from nhwc.testing import assert_keeps_format

from ..browser import needs_browser, opened
from ..nets import last

told = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available() or platform.machine() not in ("x86_64", "AMD64"),
    reason="which layers oneDNN reorders, and how, is known of x86",
)


def net():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Sequential(nn.Conv2d(16, 16, 3, padding=1))
    ).eval()


def image():
    return torch.rand(2, 3, 32, 32)


def sides(report):
    return report.reorders.contiguous, report.reorders.channels_last


@pytest.fixture(scope="module")
def report():
    return audit(net(), image(), reorders=True, name="net")


@told
@pytest.mark.processor
def test_an_nchw_run_reorders_images_and_an_nhwc_run_does_not(report):
    contiguous, channels_last = sides(report)
    layers = {p.site.module for p in contiguous.others}
    assert layers == {p.site.module for p in channels_last.others} == {"0", "2.0"}
    assert {(p.site.module, p.role) for p in contiguous.images} >= {
        ("0", "output"),
        ("2.0", "input"),
    }
    assert channels_last.images == ()
    for reorder in contiguous.images:
        assert "nchw" in reorder.path.split(" -> ")
        assert reorder.shape in ((2, 16, 32, 32), (2, 3, 32, 32))
        assert reorder.seconds > 0
        assert report.calls[reorder.call].site.module == reorder.site.module
        assert reorder.site.file == ""
    for inside in sides(report):
        assert {p.role for p in inside.weights} <= {"weight"}
    assert report.unseen == ()


@told
def test_text_and_data_show_each_of_them(report):
    data = report.to_dict()["reorders"]
    contiguous = report.reorders.contiguous
    shown = data["contiguous"]["primitives"]
    assert len(shown) == len(contiguous.primitives)
    assert sum(p["seconds"] for p in shown if p["role"] in ("input", "output")) == pytest.approx(
        data["contiguous"]["images_s"]
    )
    assert data["channels_last"]["images_s"] == 0
    text = audit_text(report)
    row = next(line for line in text.splitlines() if "images reordered " in line)
    assert row.split()[2:4] == [str(len(contiguous.images)), "in"]
    assert row.endswith("none")
    output = next(p for p in contiguous.images if p.role == "output")
    assert f"output 2x16x32x32 {output.path}" in text
    assert "images reordered in the contiguous run" in text
    assert "images reordered in the channels last run" not in text
    assert "not visible" not in text


@told
def test_the_backward_pass_and_a_model_taken_as_it_is_are_told_too():
    model = convert_(net())
    strides = [p.stride() for p in model.parameters()]
    report = audit(model, image(), reorders=True, backward=True)
    assert not report.converted
    contiguous, channels_last = sides(report)
    assert any(report.calls[p.call].backward for p in contiguous.images)
    assert channels_last.images == ()
    assert [p.stride() for p in model.parameters()] == strides
    assert all(p.grad is None for p in model.parameters())


@told
def test_it_is_asked_for():
    text = "reorders inside oneDNN's kernels: they are told with audit(..., reorders=True)"
    assert audit(net(), image()).unseen == (text,)
    assert audit(net(), image()).to_dict()["reorders"] is None
    assert_keeps_format(net(), image())


def test_where_it_cannot_be_had_the_report_says_why(monkeypatch):
    def reason(model, x):
        report = audit(model, x, reorders=True)
        assert report.reorders is None
        (text,) = report.unseen
        return text.removeprefix("reorders inside oneDNN's kernels: ")

    class OnlyLast(nn.Conv2d):
        def forward(self, x):
            if not x.is_contiguous(memory_format=torch.channels_last):
                raise ValueError("give me channels last")
            return super().forward(x)

    # The documented switch does nothing once any test has imported torch's own.
    torch._C._set_mkldnn_enabled(False)
    try:
        assert reason(net(), image()) == "oneDNN is switched off (torch.backends.mkldnn.enabled)"
    finally:
        torch._C._set_mkldnn_enabled(True)
    with monkeypatch.context() as patched:
        patched.setattr(torch.backends.mkldnn, "is_available", lambda: False)
        assert reason(net(), image()) == "this torch was built without oneDNN"
    with monkeypatch.context() as patched:
        patched.setattr(reorders, "stdout_taken", closed)
        assert "cannot be read (it is closed)" in reason(net(), image())
    if torch.backends.mkldnn.is_available():
        assert "no operator of this model runs in it" in reason(nn.ReLU(), image())
        found = reason(convert_(OnlyLast(3, 4, 3)), last(2, 3, 8, 8))
        assert found == "the model does not run contiguous (give me channels last)"


@contextlib.contextmanager
def closed(taken):
    raise OSError("it is closed")
    yield


class Says(nn.Conv2d):
    def forward(self, x):
        print("says")
        return super().forward(x)


@told
def test_what_the_model_prints_is_printed_and_the_profile_is_off_again(capfd):
    print("before")
    torch.zeros(1, 1, 1, 1).to_mkldnn()
    assert audit(Says(3, 16, 3), torch.rand(2, 3, 32, 32), reorders=True).reorders
    torch.zeros(1, 1, 1, 1).to_mkldnn()
    print("after")
    lines = capfd.readouterr().out.splitlines()
    assert (lines[0], lines[-1], set(lines[1:-1])) == ("before", "after", {"says"})


PROGRAM = """
import torch, nhwc
report = nhwc.audit(torch.nn.Conv2d(3, 16, 3), torch.rand(2, 3, 32, 32), reorders=True)
print("told of", len(report.reorders.contiguous.others), flush=True)
torch.zeros(1, 1, 1, 1).to_mkldnn()
"""


@told
def test_with_the_profile_on_by_its_owners_wish_it_stays_on_and_is_printed():
    env = {**os.environ, "ONEDNN_VERBOSE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=env, check=True
    )
    lines = done.stdout.splitlines()
    assert lines[-2] == "told of 1"
    assert ",reorder," in lines[-1]
    assert any(",convolution," in line for line in lines[:-2])
    assert not any("nhwc-call" in line for line in lines)


class TestPage:
    pytestmark = [told, *needs_browser]  # noqa: RUF012

    def test_it_draws_both_runs(self, report, tmp_path):
        path = tmp_path / "page.html"
        path.write_text(audit_html(report))
        contiguous, channels_last = sides(report)
        with opened(path) as browser:

            def all_of(selector):
                return browser.find_elements("css selector", selector)

            above, below = all_of("#onednn .primitives")
            for bar, inside in ((above, contiguous), (below, channels_last)):
                pieces = bar.find_elements("css selector", ".piece")
                assert len(pieces) == len(inside.primitives)
                labels = [piece.get_attribute("aria-label") for piece in pieces]
                assert all(
                    p.problem in label for p, label in zip(inside.primitives, labels, strict=True)
                )
                assert len(bar.find_elements("css selector", ".of-image")) == len(inside.images)
            assert "images reordered: none" in all_of("#onednn .run")[1].text
            rows = [row.text.split() for row in all_of("#onednn-table tr")[1:]]
            assert [row[0] for row in rows] == ["0", "2.0"]
            # The bars have one scale: as long as the time that they draw.
            seconds = [sum(p.seconds for p in side.primitives) for side in sides(report)]
            ratio = below.size["width"] / above.size["width"]
            assert ratio == pytest.approx(seconds[1] / seconds[0], rel=0.1)
            last_piece = below.find_elements("css selector", ".piece")[-1]
            end = last_piece.location["x"] + last_piece.size["width"]
            assert end == pytest.approx(below.location["x"] + below.size["width"], abs=2)

    def test_without_any_there_is_no_such_part(self, tmp_path):
        path = tmp_path / "page.html"
        path.write_text(audit_html(audit(net(), image())))
        with opened(path) as browser:
            assert browser.find_elements("css selector", "#onednn-part") == []
