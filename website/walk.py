"""Walk the site in a headless browser, as a person would: python -m website.walk

Every page, as on a phone and on a desk: no dead link or anchor, nothing on the console, no request
beyond the site's own files, no sideways scroll.
"""

from __future__ import annotations

import json
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.browser import opened, resized

from .build import SITE

SIZES = ((390, 844), (1280, 900))


class _Anchors(HTMLParser):
    """What a page links to, and where others may link to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.places: set[str] = {"", "top"}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name == "id" and value:
                self.places.add(value)
            elif value and (name == "src" or (name == "href" and tag in ("a", "link"))):
                self.links.append(value)


def dead_links(site: Path) -> list[str]:
    """Links and anchors of the pages in `site` that lead nowhere within it."""
    pages = {page: _Anchors(page.read_text()) for page in sorted(site.rglob("*.html"))}
    dead = []
    for page, found in pages.items():
        for link in found.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            known = pages.get(target)
            missing = known is not None and unquote(parts.fragment) not in known.places
            if not target.is_file() or (missing and page.parent.name != "reports"):
                dead.append(f"{page.relative_to(site)} links to {link}, which is not there")
    return dead


def looked_at(site: Path) -> list[str]:
    """What goes wrong when each page of `site` is opened, in each size."""
    wrong = []
    pages = [page for page in sorted(site.rglob("*.html")) if page.parent.name != "reports"]
    with opened(site / "index.html", network=True) as browser:
        for page in pages:
            for size in SIZES:
                resized(browser, size)
                browser.get(page.as_uri())
                width = browser.execute_script("return document.documentElement.scrollWidth")
                name = f"{page.relative_to(site)}, {size[0]} px wide"
                if width > size[0]:
                    wrong.append(f"{name}: scrolls sideways, {width} px")
                wrong += [f"{name}: {entry['message']}" for entry in browser.get_log("browser")]
                wrong += [f"{name}: asks for {url}" for url in _requests(browser)]
    return wrong


def _requests(browser) -> list[str]:  # type: ignore[no-untyped-def]
    """What hosts were asked for since the last question; chrome:// is the browser's own page."""
    urls = []
    for entry in browser.get_log("performance"):
        event = json.loads(entry["message"])["message"]
        if event["method"] == "Network.requestWillBeSent":
            urls.append(event["params"]["request"]["url"])
    return [url for url in urls if urlsplit(url).scheme in ("http", "https", "ws", "wss", "ftp")]


def main() -> int:
    wrong = [*dead_links(SITE), *looked_at(SITE)]
    print("\n".join(wrong) or "every page is well", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
