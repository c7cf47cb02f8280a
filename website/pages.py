"""Pages of docs made into pages of the site: links, drawings of memory, reports in frames.

What is written in docs reads well where it lies, too. Three things become more on the site:

- a block of code that begins with ```python show is run, and every tensor that it hands to
  `nhwc.show` is drawn below it;
- a comment <!-- report: NAME --> becomes the report NAME, in a frame;
- a link to a file of the repository leads to a page that shows this file.
"""

from __future__ import annotations

import html
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock
from urllib.parse import unquote

import torch

import nhwc
from nhwc.pictures import memory_of
from nhwc.pictures.html import memory_fragment

from .navigation import DOCS, ROOT
from .reports import REPORTS, TABLE

FILES = "files"
"""The folder of the site for files of the repository that are no page of docs."""

HOMES = {ROOT / "README.md": "index", ROOT / "CONTRIBUTING.md": "contributing"}
"""Files outside of docs that are pages, or whose place a page takes."""

LANGUAGES = {".py": "python", ".yml": "yaml", ".yaml": "yaml", ".json": "json", ".c": "c"}

_LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^()\s]+)\)")
_FENCE = re.compile(r"^(`{3,})(.*?)\n(.*?)^\1[ ]*$", re.DOTALL | re.MULTILINE)
_REPORT = re.compile(r"^<!-- report: (\S+) -->$", re.MULTILINE)


class DeadLink(Exception):
    """A link of a page to a file that is not there."""


@dataclass
class Site:
    """The folder that Sphinx reads; `shown` are files of the repository to make pages of."""

    source: Path
    shown: dict[Path, str] = field(default_factory=dict)

    def add(self, name: str, text: str, origin: Path) -> None:
        """Add a page: `text` in Markdown, whose links begin where `origin` lies."""
        target = self.source / f"{name}.md"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(self._converted(text, origin, name))

    def add_shown(self) -> None:
        """Add the pages of files that others link to, and of files that those link to."""
        done: set[Path] = set()
        while left := sorted(set(self.shown) - done):
            for file in left:
                self.add(self.shown[file], _shown(file), file / "any" if file.is_dir() else file)
                done.add(file)

    def _converted(self, text: str, origin: Path, name: str) -> str:
        parts, end = [], 0
        names: dict[str, object] = {}
        for fence in _FENCE.finditer(text):
            parts += [self._prose(text[end : fence.start()], origin, name), _code(fence, names)]
            end = fence.end()
        return "".join([*parts, self._prose(text[end:], origin, name)])

    def _prose(self, text: str, origin: Path, name: str) -> str:
        relink = _outside_of_code(lambda part: _LINK.sub(self._relink(origin, name), part))
        return _REPORT.sub(lambda found: frame(found[1]), relink(text))

    def _relink(self, origin: Path, name: str) -> Callable[[re.Match[str]], str]:
        def relinked(found: re.Match[str]) -> str:
            label, link = found[1], found[2]
            if re.match(r"\w+:|#", link):
                return found[0]
            path, _, anchor = link.partition("#")
            place = self._place((origin.parent / unquote(path)).resolve(), anchor, origin)
            there = os.path.relpath(place, Path(name).parent)
            return f"{label}({there}{'#' if anchor else ''}{anchor})"

        return relinked

    def _place(self, file: Path, anchor: str, origin: Path) -> str:
        """Where `file` lies in the folder that Sphinx reads."""
        if not file.exists():
            raise DeadLink(f"{origin.relative_to(ROOT)} links to {file}, which is not there.")
        if file == ROOT / "README.md" and anchor == "limits":
            return "limits.md"
        if file in HOMES:
            return f"{HOMES[file]}.md"
        if file.parent == DOCS and file.suffix in (".md", ".ipynb", ".png", ".svg"):
            return file.name
        self.shown.setdefault(file, f"{FILES}/{file.relative_to(ROOT)}")
        return f"{self.shown[file]}.md"


def frame(name: str) -> str:
    """Show the report `name`: a picture, or a page in a frame of its own.

    The frame is kept apart from the page around it: its scripts run, and reach nothing outside.
    """
    report = next(one for one in (*REPORTS, TABLE) if one.name == name)
    title, source = html.escape(report.title), f"reports/{name}"
    command = f"<code>nhwc {html.escape(' '.join(report.command))}</code>" if report.command else ""
    if name.endswith(".svg"):
        shown = f'<img src="{source}" alt="{title}">'
    else:
        shown = (
            f'<iframe class="report" title="{title}" src="{source}" sandbox="allow-scripts" '
            f'loading="lazy"></iframe>'
        )
    return _raw(
        f'<figure class="report">{shown}<figcaption>{title}. {command} '
        f'<a href="{source}" target="_blank">Open it alone</a></figcaption></figure>'
    )


def section(text: str, title: str) -> str:
    """The section of a Markdown text that begins with `## title`, as a page of its own."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    if not found:
        raise DeadLink(f"README.md has no section {title!r}.")
    return f"# {title}\n{found[1]}"


def _outside_of_code(change: Callable[[str], str]) -> Callable[[str], str]:
    """Apply `change` to what does not stand in backticks; the label of a link may hold some."""

    def changed(text: str) -> str:
        spans: list[str] = []

        def hide(found: re.Match[str]) -> str:
            spans.append(found[0])
            return f"\0{len(spans) - 1}\0"

        hidden = re.sub(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", hide, text, flags=re.DOTALL)
        return re.sub(r"\0(\d+)\0", lambda found: spans[int(found[1])], change(hidden))

    return changed


def _code(fence: re.Match[str], names: dict[str, object]) -> str:
    info, code = fence[2].strip(), fence[3]
    if info != "python show":
        return fence[0]
    return f"```python\n{code}```\n\n{_raw(drawn(code, names))}"


def drawn(code: str, names: dict[str, object]) -> str:
    """Run `code` with `names`, and draw each tensor that it hands to `nhwc.show`.

    >>> drawn("import torch, nhwc; nhwc.show(torch.zeros(1, 2, 1, 1))", {})
    '<div class="drawn"><div class="nhwc-memory">...</div></div>'
    """
    shown: list[str] = []

    def show(tensor: torch.Tensor) -> None:
        shown.append(memory_fragment(memory_of(tensor)))

    torch.manual_seed(0)
    with mock.patch.object(nhwc, "show", show):
        exec(compile(code, "a block of docs", "exec"), names)
    return f'<div class="drawn">{"".join(shown)}</div>'


def _raw(text: str) -> str:
    return f"```{{raw}} html\n{text}\n```\n"


def _shown(file: Path) -> str:
    """A page that shows a file of the repository, or what a folder of it holds."""
    name = file.relative_to(ROOT)
    orphan = "---\norphan: true\n---\n\n"
    if file.is_dir():
        rows = (f"| {_entry(one)} | {one.stat().st_size:,} |" for one in sorted(file.iterdir()))
        return "\n".join([f"{orphan}# {name}", "", "| file | bytes |", "|---|---:|", *rows, ""])
    text = file.read_text()
    if file.suffix == ".md":
        return orphan + text
    language = LANGUAGES.get(file.suffix, "text")
    return f"{orphan}# {name}\n\n``````{language}\n{text.rstrip()}\n``````\n"


def _entry(file: Path) -> str:
    return f"[{file.name}]({file.name})" if file.suffix == ".md" else f"`{file.name}`"
