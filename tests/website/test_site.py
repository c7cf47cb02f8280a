"""The site: a place for every page, every public name in the reference, code that runs."""

import importlib
import re
import shlex
from pathlib import Path

import pytest
from website.api import names
from website.navigation import DOCS, faults, written

import nhwc
from nhwc.cli import VERBS, make_parser

README = Path(__file__).parents[2] / "README.md"
ELSEWHERE = {"index": "the README's", "writing-operators": "tests/ops", "kernels": "a sketch"}
"""Pages whose code does not run here, and why."""

SLOW = ("bench", "memory", "ops")

PAGES = [README, *sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("upstream/*.md"))]


def fenced(text, word):
    """The blocks of code whose first line begins with `word`."""
    return re.findall(rf"^```{word}[^\n]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def runnable():
    return [page.stem for page in sorted(DOCS.glob("*.md")) if fenced(page.read_text(), "python")]


def commands(text):
    """The words of each `nhwc VERB ...` in blocks of code, and in lines between backticks."""
    blocks = "".join(fenced(text, "")).replace("\\\n", " ")
    prose = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    verb = f"(?:{'|'.join(VERBS)})"
    lines = re.findall(rf"^(?:\$ )?nhwc ({verb} .+)", blocks, re.MULTILINE)
    lines += re.findall(rf"`nhwc ({verb} [^`]+)`", prose)
    return [shlex.split(line, comments=True) for line in lines]


def test_every_page_has_a_place():
    assert faults() == []


def test_a_page_without_a_place_ends_the_build(tmp_path):
    for page in written().values():
        (tmp_path / page.name).touch()
    (tmp_path / "stray.md").touch()
    assert faults(tmp_path) == [
        "docs/stray has no place: give it one in website/navigation.py",
    ]
    (tmp_path / "audit.md").unlink()
    assert "website/navigation.py names audit, and docs has no such page" in faults(tmp_path)


def test_the_reference_has_every_public_name():
    """What it names beside `nhwc.__all__` is there, too."""
    assert {name.removeprefix("nhwc.") for name in names()} >= set(nhwc.__all__)
    for name in names():
        module, _, attribute = name.rpartition(".")
        assert getattr(importlib.import_module(module), attribute).__doc__


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.slow if page in SLOW else ())
        for page in runnable()
        if page not in ELSEWHERE
    ],
)
def test_code_of_pages_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {"__name__": page}
    for code in fenced((DOCS / f"{page}.md").read_text(), "python"):
        exec(compile(code, f"{page}.md", "exec"), names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_pages_are_understood(page):
    """Each option is one that there is, and takes what stands behind it."""
    parser, _ = make_parser(VERBS)
    for words in commands(page.read_text()):
        assert parser.parse_known_args(words)[1] == [], words


def test_links_of_docs_lead_somewhere():
    dead = []
    for page in DOCS.glob("*.md"):
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for link in re.findall(r"\]\((?!\w+:|#)([^()#\s]+)", re.sub(r"`[^`]*`", "", text)):
            if not (DOCS / link).exists():
                dead.append(f"{page.name}: {link}")
    assert dead == []
