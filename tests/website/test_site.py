"""The site: a place for every page, every public name in the reference, code that runs."""

import importlib
import re

import pytest
from website.api import names
from website.navigation import DOCS, faults, written

import nhwc

NEW = ("channels-last", "audit", "optimize", "train", "torch-compile", "questions")
"""Pages whose code runs here, in seconds; that of `index` is the README's."""


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


@pytest.mark.parametrize("page", NEW)
def test_code_of_pages_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (DOCS / f"{page}.md").read_text()
    names = {"__name__": page}
    for code in re.findall(r"^```python.*?\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        exec(compile(code, f"{page}.md", "exec"), names)


def test_links_of_docs_lead_somewhere():
    dead = []
    for page in DOCS.glob("*.md"):
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for link in re.findall(r"\]\((?!\w+:|#)([^()#\s]+)", re.sub(r"`[^`]*`", "", text)):
            if not (DOCS / link).exists():
                dead.append(f"{page.name}: {link}")
    assert dead == []
