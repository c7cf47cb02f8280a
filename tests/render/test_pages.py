"""Every page fits a phone, can be read, and can be used by the keyboard alone."""

import json
import re
from dataclasses import replace

import pytest
import torch
from benchmarks.zoo_tables import html
from torch import nn

from nhwc import audit
from nhwc._bench import Benchmark, Case, Published, Row
from nhwc._ops import check_rules
from nhwc._ops.rules import SECTIONS, Rule, Section
from nhwc.render.audit_html import audit_html
from nhwc.render.bench_html import bench_html
from nhwc.render.bench_text import bench_text
from nhwc.render.ops_html import ops_html
from nhwc.render.ops_rules_html import rules_html
from nhwc.render.optimize_html import optimize_html
from nhwc.render.page import page

from ..browser import DESK, PHONE, cut_off, faint, needs_browser, opened, resized
from ..made_up import HERE, measured, one, suite
from ..ops.test_page import example_table
from ..optimizing import force, residual

EVIL = "<img src=x onerror=\"document['title']='taken'\">"
WORD = "/a/path/without/any/space" * 20
NAMES = [
    "nhwc projected depthwise", "nhwc expanded depthwise", "nhwc", "onednn", "torch",
    *(f"nhwc kernel {number}" for number in range(12)),
]  # fmt: skip


class Lossy(nn.Module):
    """Loses the format in one place and converts in another; the remedies have code in them."""

    def __init__(self):
        super().__init__()
        self.add_module(EVIL, nn.Conv2d(3, 8, 3))
        self.norm, self.last = nn.InstanceNorm2d(8), nn.Conv2d(8, 8, 3)

    def forward(self, x):
        y = self.norm(self._modules[EVIL](x))
        return torch.cat([y[:, :4].contiguous(), y[:, 4:]], dim=1) + self.last(y).mean()


def optimized():
    """A report with more kernels than anyone has colours for."""
    report = force(residual(), torch.randn(2, 3, 20, 18)).report
    text = optimize_html(report, f"a long name of a model without any space {EVIL}" + "x" * 60)
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])
    plan = data["plans"][0]
    [layer] = [layer for layer in plan["layers"] if layer["kernels"]][:1]
    plan["layers"] = [
        layer | {"name": f"stage.{name}", "chosen": {"kernel": name, "layout": "x", "seconds": 1.0}}
        for name in NAMES
    ]
    data["reason"] = f"`torch` is as fast {WORD}"
    data["verification"]["checks"][0]["error"] = float("nan")
    calls = [
        {"operator": "conv2d", "module": "a", "effect": effect, "seconds": 0.1}
        for effect in ("loses", "converts", "keeps", "plain", "neutral")
    ]
    counts = {"loses": 1, "misreads": 0}
    data["audits"] = {"before": {"calls": calls, "counts": counts, "clean": False}}
    return page("optimize", data["name"], data)


def broken():
    made = suite()
    return replace(made, rows=(*made.rows[:-1], replace(made.rows[-1], failure=f"no {WORD}")))


ROW = {"outcome": "right", "reason": "", "lost_before": 13, "lost_after": 0, "ratio": 2.5}
WRONG = Section("what fails", (Rule(EVIL, EVIL * 9, repr(EVIL)),))
PAGES = {
    "audit": lambda: audit_html(audit(Lossy(), torch.rand(2, 3, 9, 9), name=EVIL, reorders=True)),
    "optimize": optimized,
    "one case": lambda: bench_html(one()),
    "suite": lambda: bench_html(broken()),
    "ops": lambda: ops_html(example_table()),
    "rules": lambda: rules_html(check_rules(sections=[SECTIONS[2], WRONG]), HERE),
    "zoo": lambda: html(
        {
            "timm:a_model_with_a_rather_long_name.of_many_words": ROW,
            "bad": ROW | {"outcome": "WRONG", "reason": f"output {EVIL}", "input": [[3, 8, 8]]},
            "no": ROW | {"outcome": "refused", "reason": "because of " + "words " * 30},
        }
    ),
}


@pytest.fixture(scope="module", params=PAGES)
def file(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(PAGES[request.param]())
    return path


@needs_browser[0]
@needs_browser[1]
def test_it_fits_and_can_be_read(file):
    with opened(file) as browser:
        for theme in ("light", "dark"):
            browser.get(f"about:blank#{theme}")
            browser.get(f"{file.as_uri()}#{theme}")
            for size in (PHONE, DESK):
                resized(browser, size)
                assert cut_off(browser) == [], (theme, size)
                assert faint(browser) == [], (theme, size)
        # What opens on a click is no wider.
        browser.execute_script(
            """
            for (const row of document.querySelectorAll("summary")) row.click();
            document.querySelector("tr.op")?.click();
            """
        )
        resized(browser, PHONE)
        assert cut_off(browser) == []
        assert faint(browser) == []


def prefers(browser, theme):
    """Let the system ask for this theme; return what the page shows, and its own controls."""
    features = [{"name": "prefers-color-scheme", "value": theme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    return browser.execute_async_script(
        """
        const scheme = () => getComputedStyle(root).colorScheme;
        const tell = () => arguments[0](`${root.dataset.theme} ${scheme()}`);
        requestAnimationFrame(() => requestAnimationFrame(tell));
        """
    )


@needs_browser[0]
@needs_browser[1]
def test_it_follows_the_system_until_somebody_chooses(file):
    with opened(file) as browser:
        for theme in ("dark", "light", "dark"):
            assert prefers(browser, theme) == f"{theme} {theme}"
        browser.execute_script("document.querySelector('#theme').click()")
        for theme in ("light", "dark"):
            assert prefers(browser, theme) == "light light"


@needs_browser[0]
@needs_browser[1]
def test_what_torch_computes_and_why_stands_on_a_phone(tmp_path):
    found = {
        "operator": "instance_norm",
        "seconds": 0.1,
        "share": 0.4,
        "places": ["instance_norm_1"],
    }
    text = optimize_html(force(residual(), torch.randn(2, 3, 20, 18)).report, "a")
    data = json.loads(re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1])
    data["plans"][0]["fallbacks"] = [found | {"reason": "no kernel of ours takes such a shape"}]
    path = tmp_path / "page.html"
    path.write_text(page("optimize", data["name"], data))
    with opened(path) as browser:
        resized(browser, PHONE)
        ends = """
            const cells = [...document.querySelectorAll(".fallbacks td")];
            return cells.map((cell) => cell.getBoundingClientRect().right);
        """
        assert max(browser.execute_script(ends)) < PHONE[0]


@needs_browser[0]
@needs_browser[1]
def test_names_are_text_and_code_is_code(file):
    from selenium.webdriver.common.by import By

    with opened(file) as browser:
        assert browser.title != "taken"
        assert browser.find_elements(By.TAG_NAME, "img") == []
        shown = browser.find_element(By.TAG_NAME, "body").text
        assert not re.search(r"`[^`\n]+`", shown), shown


def pressed(browser, *keys):
    from selenium.webdriver.common.action_chains import ActionChains

    ActionChains(browser).send_keys(*keys).perform()
    return browser.switch_to.active_element


@pytest.mark.parametrize("name", ["audit", "optimize"])
@needs_browser[0]
@needs_browser[1]
def test_bars_of_time_are_walked_with_the_keyboard(name, tmp_path):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    path = tmp_path / "page.html"
    path.write_text(PAGES[name]())
    with opened(path) as browser:
        bar = browser.find_element(By.CSS_SELECTOR, "#strip, .strip.tall")
        pieces = bar.find_elements(By.CSS_SELECTOR, "*")
        assert bar.get_attribute("role") == "group"
        assert "arrow keys" in bar.get_attribute("aria-label")
        assert all(piece.tag_name == "button" for piece in pieces)
        assert all(" ms" in piece.get_attribute("aria-label") for piece in pieces)
        assert [piece.get_attribute("tabindex") for piece in pieces[:2]] == ["0", "-1"]
        clear = ("transparent", "rgba(0, 0, 0, 0)", "rgb(255, 255, 255)")
        colours = [piece.value_of_css_property("background-color") for piece in pieces]
        assert not set(colours) & {*clear, "rgba(255, 255, 255, 1)"}

        for _ in range(200):
            if pressed(browser, Keys.TAB) == pieces[0]:
                break
        assert browser.switch_to.active_element == pieces[0]
        assert pressed(browser, Keys.ARROW_RIGHT) == pieces[1]
        assert pressed(browser, Keys.END) == pieces[-1]
        assert pressed(browser, Keys.HOME, Keys.ARROW_RIGHT) == pieces[1]
        said = pieces[1].get_attribute("aria-label")
        assert browser.find_element(By.ID, "tip").text == said
        pressed(browser, Keys.ENTER)
        if name == "audit":
            assert browser.find_element(By.CSS_SELECTOR, "#detail h3").text in said
        else:
            row = browser.find_element(By.CSS_SELECTOR, "tr.chosen td")
            assert said.startswith(row.text)
            assert len(set(colours)) == len(NAMES)


def test_what_would_end_the_data_early_is_escaped():
    names = ["</script>", "<!-- <script>", "{{title}}", "{{nothing}}", EVIL]
    text = page("audit", "{{data}}", names)
    assert "<title>{{data}}</title>" in text
    payload = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)[1]
    assert json.loads(payload) == names
    assert "<" not in payload


def test_numbers_that_are_none_leave_the_page_readable():
    payload = re.search(r'id="data">(.*?)</script>', page("audit", "", [float("nan"), {"x": 1.5}]))
    assert json.loads(payload[1]) == [None, {"x": 1.5}]


def test_a_wild_spread_is_told_as_a_factor():
    calm, wild = measured("eager", 1.0), measured("fused", 0.5, noise=0.5)
    turns = tuple((0.001,) if place % 3 else (1.0,) for place in range(len(wild.turns)))
    case = Case("net", ((1, 3, 8, 8),), 1)
    text = bench_text(Benchmark(HERE, (Row(case, (calm, replace(wild, turns=turns))),)))
    spread = replace(wild, turns=turns).per_turn.spread
    assert spread >= 1
    assert f"by {spread:.3g} times its median" in " ".join(text.split())


def test_a_published_figure_that_does_not_hold_reads_so_once():
    claim = Published(1.3, 1.8, "eager", "fused", "somewhere")
    slow = (measured("eager", 1.0), measured("fused", 1.0))
    row = Row(Case("net", ((1, 3, 8, 8),), 1), slow, published=claim)
    text = " ".join(bench_text(Benchmark(HERE, (row,))).split())
    assert row.judgement == "not here"
    assert text.count("(somewhere): not here") == 1
    assert "here here" not in text
