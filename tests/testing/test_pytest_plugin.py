"""The plugin as pytest finds it: by the entry point that pyproject.toml declares."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import nhwc

ROOT = Path(__file__).parents[2]
DOCUMENTED = ROOT / "docs" / "ci.md"

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="no tomllib")


@pytest.fixture
def run(tmp_path):
    """Runs pytest on a file of tests, in a process and a folder of their own."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = tmp_path / "site" / "plugin_of_nhwc-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin-of-nhwc\nVersion: 0\n")
    points = project["entry-points"]["pytest11"].items()
    lines = ["[pytest11]", *(f"{name} = {module}" for name, module in points)]
    (info / "entry_points.txt").write_text("\n".join(lines))
    folder = tmp_path / "project"
    folder.mkdir()
    paths = (str(info.parent), str(Path(nhwc.__file__).parents[1]), os.environ.get("PYTHONPATH"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}

    def go(tests, *words):
        (folder / "test_it.py").write_text(tests)
        line = [sys.executable, "-m", "pytest", "-W", "error", "-p", "no:cacheprovider", *words]
        return subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True)

    return go


UNUSED = """
import sys

def test_nothing_large_is_imported():
    assert "nhwc.pytest_plugin" in sys.modules
    large = {"torch", "numpy", "numba", "nhwc._audit", "nhwc.testing", "nhwc.render"}
    assert not large & set(sys.modules)
"""


def test_a_project_that_does_not_use_it_pays_nothing(run):
    done = run(UNUSED)
    assert done.returncode == 0, done.stdout


USED = """
import pytest
import torch
from torch import nn

@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.InstanceNorm2d])
def test_net(keeps_format, norm):
    x = torch.rand(2, 3, 9, 9)
    keeps_format(nn.Conv2d(3, 8, 3), x)
    report = keeps_format(nn.Sequential(nn.Conv2d(3, 8, 3), norm(8), nn.Conv2d(8, 8, 3)), x)
    assert report.clean
"""


def test_it_fails_for_a_loss_and_writes_a_page_for_each_model(run, tmp_path):
    (documented,) = re.findall(r"```python\n(.*?)```", DOCUMENTED.read_text(), re.DOTALL)
    done = run(USED + documented, "--nhwc-report", "pages", "--junitxml", "results.xml")
    folder = tmp_path / "project" / "pages"
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed, 2 passed" in done.stdout
    assert "1 place loses channels last" in done.stdout
    assert "LOST        torch.nn.functional.instance_norm" in done.stdout
    assert f"nhwc: 5 pages in {folder}" in done.stdout
    # The frames of the fixture are left out of the traceback: it ends in the user's test.
    assert "pytest_plugin.py" not in done.stdout
    pages = sorted(folder.iterdir())
    assert len(pages) == 5
    assert all("<!doctype html>" in page.read_text() for page in pages)
    (named,) = re.findall(r"^E +page: (.*)$", done.stdout, re.MULTILINE)
    assert Path(named) in pages
    assert "loses" in Path(named).read_text()
    assert named in (tmp_path / "project" / "results.xml").read_text()


def test_what_is_no_folder_is_refused_in_words(run):
    folder = "test_it.py/pages"
    done = run(USED, "--nhwc-report", folder, "-k", "BatchNorm2d")
    assert done.returncode == 1
    said = rf"InputError: --nhwc-report {folder} cannot be written to: .*\. Name a folder\."
    assert re.search(said, done.stdout)
