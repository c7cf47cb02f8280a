"""The guide for those who write operators: its code runs, and its commands say what it shows."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nhwc.cli import main

GUIDE = Path(__file__).parents[2] / "docs" / "writing-operators.md"
FILE = "# my_operators.py"


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", GUIDE.read_text(), re.DOTALL)


def outcomes(text):
    return re.findall(r"^(?:my_operators|  4-D).*", text, re.MULTILINE)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("g++"), reason="no g++")
def test_everything_in_the_guide_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "96")
    (source,), (build,), (shown,) = blocks("cpp"), blocks("sh"), blocks("console")
    Path("guide.cpp").write_text(source)
    paths = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    # What the compiler is asked to make fast takes it three times as long.
    subprocess.run(["bash", "-ec", build.replace("-O2", "-O0")], check=True, env=paths)
    names = {"__name__": "guide"}
    for code in blocks("python"):
        if code.startswith(FILE):
            Path("my_operators.py").write_text(code)
        else:
            exec(compile(code, GUIDE.name, "exec"), names)

    command, _, expected = shown.partition("\n")
    capsys.readouterr()
    assert main(command.removeprefix("$ nhwc ").split()) == 0
    # Which kernel copied is told by names that a version of torch has; the outcome is by all.
    assert outcomes(capsys.readouterr().out) == outcomes(expected)
