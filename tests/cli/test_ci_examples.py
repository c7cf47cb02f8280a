"""The examples in docs/ci, run as GitHub and pre-commit run them."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import nhwc
from nhwc.cli import main

ROOT = Path(__file__).parents[2]
NET = """
from torch import nn

def build():
    return nn.Sequential(nn.Conv2d(3, 8, 3), {norm}, nn.Conv2d(8, 8, 3))
"""


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A user's repository, whose baseline knows nothing, and whose model loses the format since."""
    folder = tmp_path / "repository"
    (folder / "models").mkdir(parents=True)
    monkeypatch.chdir(folder)
    write("nn.ReLU()")
    line = ["--baseline", "nhwc-baseline.json", "--update-baseline", "-q"]
    assert main(["audit", "models/net.py:build", "--input", "1x3x64x64", *line]) == 0
    write("nn.InstanceNorm2d(8)")
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "nhwc").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m nhwc "$@"\n')
    (commands / "nhwc").chmod(0o755)
    here = {"PATH": f"{commands}:{os.environ['PATH']}", "PRE_COMMIT_HOME": str(tmp_path / "hooks")}
    sources = (str(Path(nhwc.__file__).parents[1]), os.environ.get("PYTHONPATH"))
    here["PYTHONPATH"] = os.pathsep.join(filter(None, sources))
    for name, value in here.items():
        monkeypatch.setenv(name, value)
    git("init", "-q")
    git("add", ".")
    return folder


def write(norm):
    Path("models/net.py").write_text(NET.format(norm=norm))


def git(*words, folder=None):
    own = ("-c", "user.name=x", "-c", "user.email=x@example.com")
    done = subprocess.run(["git", *own, *words], cwd=folder, capture_output=True, check=True)
    return done.stdout.decode().strip()


def test_the_workflow_annotates_and_uploads(repository, capsys):
    workflow = yaml.safe_load((ROOT / "docs/ci/github-workflow.yml").read_text())
    steps = workflow["jobs"]["audit"]["steps"]
    commands = [shlex.split(step.get("run", "")) for step in steps]
    annotate, scan = (words[1:] for words in commands if words[:2] == ["nhwc", "audit"])

    assert main(annotate) == 1
    assert "instance_norm loses channels last::" in capsys.readouterr().out
    assert main(scan) == 0
    (uploaded,) = (s["with"]["sarif_file"] for s in steps if "upload-sarif" in s.get("uses", ""))
    (result,) = json.loads(Path(uploaded).read_text())["runs"][0]["results"]
    assert result["baselineState"] == "new"


def test_the_hook_refuses_a_commit_that_loses_the_format(repository, tmp_path):
    hooks = tmp_path / "nhwc"
    hooks.mkdir()
    (hooks / ".pre-commit-hooks.yaml").write_bytes((ROOT / ".pre-commit-hooks.yaml").read_bytes())
    git("init", "-q", folder=hooks)
    git("add", ".", folder=hooks)
    git("commit", "-qm", "hooks", folder=hooks)
    config = yaml.safe_load((ROOT / "docs/ci/pre-commit-config.yaml").read_text())
    config["repos"][0] |= {"repo": str(hooks), "rev": git("rev-parse", "HEAD", folder=hooks)}
    (repository / ".pre-commit-config.yaml").write_text(yaml.safe_dump(config))

    git("add", ".")
    line = [sys.executable, "-m", "pre_commit", "run"]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "LOST        torch.nn.functional.instance_norm" in done.stdout
    assert "1 new finding, 0 known, 0 stale" in done.stdout
