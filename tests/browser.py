"""A headless Chromium for the tests that look at pages as a person would."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

needs_browser = [
    pytest.mark.browser,
    pytest.mark.skipif(
        not (shutil.which("chromium") and shutil.which("chromedriver")),
        reason="chromium and chromedriver are not installed",
    ),
]

FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    # A page that is looked at while its colours change is between two themes.
    "--force-prefers-reduced-motion",
    "--window-size=1360,1400",
]


@contextlib.contextmanager
def opened(page: Path, *, network: bool = False) -> Iterator:
    """Yield a driver with `page` loaded; fail at the end if the console complained of anything.

    With `network` its log "performance" has every request.
    """
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    with tempfile.TemporaryDirectory() as profile:
        for flag in (*FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        logs = {"browser": "ALL", **({"performance": "ALL"} if network else {})}
        options.set_capability("goog:loggingPrefs", logs)
        service = webdriver.ChromeService(shutil.which("chromedriver"))
        driver = webdriver.Chrome(options=options, service=service)
        try:
            driver.get(page.as_uri())
            yield driver
            assert driver.get_log("browser") == []
        finally:
            driver.quit()


PHONE, DESK = (390, 844), (1360, 1000)


def resized(browser, size: tuple[int, int]) -> None:
    """Lay the page out as on a screen of this size; a window cannot be made so narrow."""
    width, height = size
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def cut_off(browser) -> list[str]:
    """What reaches beyond the page's right edge, or beyond a box that hides what does not fit."""
    return browser.execute_script(f"{_CHECKS}\nreturn cutOff();")


def faint(browser) -> list[str]:
    """Texts whose contrast is below 4.5, or below 3 where they are large, as WCAG 2 counts it."""
    return browser.execute_script(f"{_CHECKS}\nreturn faint();")


_CHECKS = Path(__file__).with_name("page_checks.js").read_text()
