"""What is published holds all that its own tests read."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks import release

ROOT = Path(__file__).parents[2]
ALWAYS = {"README.md", "LICENSE", "pyproject.toml", ".gitignore"}
"""What hatchling puts into every source distribution."""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="no tomllib")
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="no checkout")
def test_the_source_distribution_is_the_repository():
    import tomllib

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    included = set(settings["tool"]["hatch"]["build"]["targets"]["sdist"]["include"])
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert {line.partition("/")[0] for line in listed.splitlines()} == included | ALWAYS


def test_the_version_is_written_once_and_copied_rightly():
    assert len(set(release.versions().values())) == 1


@pytest.mark.parametrize("given", [[], ["ARGS=tests/cli/test_cli.py"]])
def test_make_test_fails_with_any_of_its_passes(given):
    """Each pass is a line of its own, which ends `make` if it fails or finds no test."""
    # A make above this test would hand down what it was told itself.
    own = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    own.pop("ARGS", None)
    made = subprocess.run(
        ["make", "-n", "-o", ".venv/.ready", "test", "VENV=.venv", *given],
        cwd=ROOT, env=own, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    passes = [line for line in made.splitlines() if " -m pytest " in line]
    assert not any(mark in line for line in passes for mark in ("||", ";", "|"))
    narrow = [line for line in passes if "NHWC_ISA=" in line]
    assert len(passes) - len(narrow) == 1
    if given or subprocess.check_output(["uname", "-m"], text=True).strip() != "x86_64":
        assert narrow == []
    else:
        features = Path("/proc/cpuinfo")
        wide = features.exists() and " avx512f " in features.read_text()
        assert ["NHWC_ISA=avx2" in line for line in narrow] == [True] * wide + [False]
        assert all(line.endswith("-m processor") for line in narrow)
