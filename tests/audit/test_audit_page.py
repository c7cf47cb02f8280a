"""The audit's page, driven in a real browser."""

import re

import pytest
import torch
from torch import nn

from nhwc import audit
from nhwc.render.audit_html import audit_html
from nhwc.zoo import load_model

from ..browser import needs_browser, opened
from ..nets import Between

pytestmark = needs_browser


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    report = audit(load_model("shufflenet_v2_x0_5"), torch.rand(1, 3, 64, 64), name="<shuffle>")
    path = tmp_path_factory.mktemp("page") / "audit.html"
    path.write_text(audit_html(report))
    return path


def test_it_loads_nothing_from_outside(page):
    text = page.read_text()
    assert re.findall(r"""(?:src|href)=["'](?!data:)[^"']*""", text) == []
    assert re.findall(r"url\(|@import|fetch\(|XMLHttpRequest", text) == []


def test_it_opens_and_answers(page, tmp_path):
    from selenium.webdriver.common.by import By

    with opened(page) as browser:

        def all_of(selector):
            return browser.find_elements(By.CSS_SELECTOR, selector)

        assert browser.title.startswith("<shuffle> 1x3x64x64")
        assert "13 calls lose the format" in all_of("#verdict")[0].text
        assert len(all_of(".cell.lost")) == 13
        assert len(all_of(".finding")) == 2

        all_of(".finding")[1].click()
        assert "contiguous" in all_of("#detail h3")[0].text
        assert "shufflenetv2.py" in all_of("#detail .place")[0].text
        assert len(all_of(".cell.linked")) == 6

        all_of(".cell.lost")[0].click()
        assert all_of("#detail h3")[0].text.endswith("torch.cat")
        assert "loses channels last" in all_of("#detail .tag")[0].text
        rows = [row.text for row in all_of("#detail tr")]
        assert any(row.startswith("out 1×48×8×8 3072 64 8 1 contiguous") for row in rows), rows
        cause, payer = all_of("#detail button")
        assert cause.text.endswith("contiguous")
        payer.click()
        assert all_of("#detail h3")[0].text.endswith("conv2d")

        all_of("#search")[0].send_keys("stage4.3")
        shown = [cell for cell in all_of(".cell") if "dim" not in cell.get_attribute("class")]
        assert 0 < len(shown) < 30
        assert all("stage4.3" in cell.get_attribute("aria-label") for cell in shown)

        theme = browser.execute_script("return document.documentElement.dataset.theme")
        all_of("#theme")[0].click()
        other = browser.execute_script("return document.documentElement.dataset.theme")
        assert {theme, other} == {"light", "dark"}
        assert browser.save_screenshot(str(tmp_path / "page.png"))


def test_a_clean_model_and_its_filters(tmp_path):
    from selenium.webdriver.common.by import By

    path = tmp_path / "clean.html"
    path.write_text(audit_html(audit(Between(nn.ReLU()), torch.rand(2, 3, 8, 8))))
    with opened(path) as browser:
        assert "Clean." in browser.find_element(By.ID, "verdict").text
        assert browser.find_elements(By.CSS_SELECTOR, ".finding") == []
        browser.find_elements(By.CSS_SELECTOR, "#filters button")[1].click()
        assert len(browser.find_elements(By.CSS_SELECTOR, ".cell:not(.dim)")) == 3


def test_a_page_without_operators_has_no_empty_parts(tmp_path):
    from selenium.webdriver.common.by import By

    path = tmp_path / "nothing.html"
    path.write_text(audit_html(audit(nn.Identity(), torch.rand(2, 3, 8, 8), compare=True)))
    with opened(path) as browser:
        assert "Nothing seen." in browser.find_element(By.ID, "verdict").text
        titles = [title.text for title in browser.find_elements(By.TAG_NAME, "h2") if title.text]
        assert titles == ["Both formats"]
        assert not browser.find_element(By.ID, "detail").is_displayed()
        assert "The model gives the same values" in browser.find_element(By.ID, "formats").text


class Reused(nn.Module):
    """One image, that lost the format, which many layers read."""

    def __init__(self):
        super().__init__()
        self.norm, self.last = nn.InstanceNorm2d(4), nn.Conv2d(4, 8, 3)

    def forward(self, x):
        y = self.norm(x)
        return sum(self.last(y) for _ in range(43))


def test_calls_beyond_the_buttons_are_counted(tmp_path):
    from selenium.webdriver.common.by import By

    path = tmp_path / "audit.html"
    path.write_text(audit_html(audit(Reused(), torch.rand(1, 4, 8, 8))))
    with opened(path) as browser:
        browser.find_element(By.CSS_SELECTOR, ".cell.lost").click()
        detail = browser.find_element(By.ID, "detail")
        assert len(detail.find_elements(By.TAG_NAME, "button")) == 40
        assert "and 3 more" in detail.text
