"""Build the site: python -m website.build

It writes build/site. Reports of the verbs, which take a minute or two, are made where they are
missing; `make docs` removes those of the last time before.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from nhwc.pictures.html import memory_styles

from .api import api_page
from .navigation import DOCS, ROOT, SECTIONS, faults, written
from .pages import Site, section
from .reports import make_reports

HERE = Path(__file__).parent
BUILD = ROOT / "build"
SOURCE, REPORTS, SITE = BUILD / "site-source", BUILD / "reports", BUILD / "site"


def main() -> int:
    if wrong := faults():
        print("\n".join(f"error: {line}" for line in wrong), file=sys.stderr)
        return 2
    make_reports(REPORTS)
    gather(SOURCE)
    return render(SOURCE, SITE)


def gather(source: Path) -> None:
    """Write all that Sphinx reads into the folder `source`."""
    shutil.rmtree(source, ignore_errors=True)
    site = Site(source)
    for name, file in sorted(written().items()):
        if file.suffix == ".md":
            site.add(name, file.read_text() + (_contents() if name == "index" else ""), file)
        else:
            shutil.copy(file, source / file.name)
    readme = ROOT / "README.md"
    site.add("limits", section(readme.read_text(), "Limits"), readme)
    site.add("contributing", (ROOT / "CONTRIBUTING.md").read_text(), ROOT / "CONTRIBUTING.md")
    (source / "api.md").write_text(api_page())
    site.add_shown()
    for picture in (*DOCS.glob("*.png"), *DOCS.glob("*.svg")):
        shutil.copy(picture, source)
    shutil.copy(HERE / "conf.py", source)
    shutil.copytree(HERE / "static", source / "_static")
    (source / "_static" / "memory.css").write_text(memory_styles())
    shutil.copytree(REPORTS, source / "_extra" / "reports")


def render(source: Path, target: Path) -> int:
    """Let Sphinx write the pages; whatever it warns of is an error."""
    from sphinx.cmd.build import build_main

    # Sphinx writes no time into a page then, and the same input gives the same output.
    os.environ.setdefault("SOURCE_DATE_EPOCH", "0")
    shutil.rmtree(target, ignore_errors=True)
    doctrees = ["-d", str(BUILD / "site-doctrees")]
    failed = build_main(
        ["-b", "html", "-W", "--keep-going", "-q", "-E", *doctrees, str(source), str(target)]
    )
    if not failed:
        (target / ".buildinfo").unlink(missing_ok=True)
        print(f"the site: {target / 'index.html'}", file=sys.stderr)
    return failed


def _contents() -> str:
    """The navigation, which Sphinx wants on its first page."""
    parts = [
        "\n".join(
            [
                "",
                "```{toctree}",
                ":hidden:",
                f":caption: {section.title}",
                "",
                *section.pages,
                "```",
                "",
            ]
        )
        for section in SECTIONS
    ]
    return "".join(parts)


if __name__ == "__main__":
    sys.exit(main())
