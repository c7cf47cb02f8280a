"""A drawing in a notebook: it looks the same whatever the styles around it, and changes none."""

import itertools

import pytest
import torch

import nhwc

from ..browser import DESK, PHONE, cut_off, faint, needs_browser, opened, resized

HOSTILE = """<style>
.jp-Cell .jp-Output div { color: hotpink; margin: 9px; }
.jp-Cell span { font-size: 30px; width: 200px; }
.jp-Output * { text-transform: uppercase; border: 3px solid lime; }
b { background: red; } .jp-Output > div { float: left; width: 50px; }
</style>"""
LOOKS = """
const looks = (e) => {
  const style = getComputedStyle(e), box = e.getBoundingClientRect();
  return [...style].map((p) => `${p}: ${style.getPropertyValue(p)}`).concat(box.width, box.height);
};
return [...document.querySelectorAll(".nhwc-memory, .nhwc-memory *")].map(looks);
"""
THEMES = ["light", "dark"]
GROUND = {"light": "rgb(255, 255, 255)", "dark": "rgb(28, 31, 37)"}
NOTEBOOKS = {
    "jupyter": {"light": 'data-jp-theme-light="true"', "dark": 'data-jp-theme-light="false"'},
    "vscode": {"light": 'class="vscode-light"', "dark": 'class="vscode-dark"'},
    "none": {"light": "", "dark": ""},
}


def page(body, head="", attributes=""):
    start = f'<!doctype html><meta charset="utf-8"><link rel="icon" href="data:,">{head}'
    return f"{start}<body {attributes}><div class='jp-Cell'><div class='jp-Output'>{body}"


@pytest.fixture(scope="module")
def drawing():
    images = torch.empty(1, 6, 2, 3, memory_format=torch.channels_last)
    return nhwc.show(images[:, :4])._repr_html_()


@needs_browser[0]
@needs_browser[1]
def test_styles_of_a_notebook_stay_outside_and_ours_inside(drawing, tmp_path):
    path, about = tmp_path / "page.html", "<b class='m-cell'>about</b>"
    own = "return getComputedStyle(document.querySelector('body b')).cssText"
    path.write_text(page(drawing))
    with opened(path) as browser:
        looks = browser.execute_script(LOOKS)
        path.write_text(page(drawing, HOSTILE))
        browser.get(path.as_uri())
        hostile = browser.execute_script(LOOKS)
        assert len(hostile) == len(looks)
        changed = [set(now) - set(then) for now, then in zip(hostile, looks, strict=True)]
        assert [change for change in changed if change] == []
        plain, beside = (
            (path.write_text(page(body)), browser.get(path.as_uri()), browser.execute_script(own))[
                2
            ]
            for body in (about, about + drawing)
        )
        assert plain == beside


@needs_browser[0]
@needs_browser[1]
def test_it_follows_the_theme_fits_and_can_be_read(drawing, tmp_path):
    """Where the notebook says nothing of its theme, the system's decides."""
    path = tmp_path / "page.html"
    path.write_text(page(drawing))
    with opened(path) as browser:
        for notebook, theme in itertools.product(NOTEBOOKS, THEMES):
            opposite = THEMES[1 - THEMES.index(theme)]
            system = theme if notebook == "none" else opposite
            media = [{"name": "prefers-color-scheme", "value": system}]
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
            path.write_text(page(drawing, attributes=NOTEBOOKS[notebook][theme]))
            browser.get(path.as_uri())
            ground = (
                "return getComputedStyle(document.querySelector('.nhwc-memory')).backgroundColor"
            )
            assert browser.execute_script(ground) == GROUND[theme]
            for size in (PHONE, DESK):
                resized(browser, size)
                assert cut_off(browser) == []
                assert faint(browser) == []
