"""No kernel reads or writes beside its buffers: there lie pages that kill who touches them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs mprotect")


def python(code, *args):
    root = Path(__file__).parents[2]
    return subprocess.run([sys.executable, *code, *args], capture_output=True, text=True, cwd=root)


def test_kernels_stay_inside_their_buffers(isa):
    done = python(["-m", "tests.kernels.guarded"], "60")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "all inside 60" in done.stdout


def test_steps_stay_inside_their_buffers(isa):
    done = python(["-m", "tests.kernels.guarded_steps"], "12")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "all inside" in done.stdout


def test_the_guard_kills():
    code = "import torch; from tests.kernels.guarded import guarded; import ctypes\n"
    code += "t = guarded(torch.zeros(8), True); ctypes.string_at(t.data_ptr() + 32, 1)"
    assert python(["-c", code]).returncode != 0
