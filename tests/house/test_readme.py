"""What the README shows must run."""

import re
from pathlib import Path

import pytest
from benchmarks.performance import SECTIONS, SUMMED

README = Path(__file__).parents[2] / "README.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.parametrize("code", blocks("python"), ids=lambda code: code.splitlines()[0][:40])
def test_python_blocks_run(code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})


def test_every_command_exists():
    from nhwc.cli import VERBS

    named = set(re.findall(r"^(?:\$ )?nhwc (\w+)", README.read_text(), re.MULTILINE))
    assert named
    assert named <= set(VERBS)


def test_every_local_link_leads_somewhere():
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", README.read_text())
    assert [link for link in links if not (README.parent / link).exists()] == []


def test_no_race_is_left_out():
    suites = ("Every engine", "What people deploy", "Models of other packages", "Volumes")
    raced = {title for title, *_ in SECTIONS if title.startswith(suites) or "amilies" in title}
    assert {title for _, title in SUMMED} == raced
