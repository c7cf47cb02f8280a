"""The kernels for GPUs, which Triton's interpreter runs on any processor, and a GPU on itself."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    ],
)
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("device", ["interpreter", GPU])
@pytest.mark.parametrize("kernel", ["finish", "depthwise", "convolve", "linear"])
def test_a_kernel_answers_as_torch_does(kernel, device):
    assert cases(kernel, device) > 3


def test_a_plan_of_these_kernels_answers_as_torch_does():
    assert cases("plan", "interpreter") == 2


def cases(kernel, device):
    """How many cases of the kernel there are, all of which passed."""
    pytest.importorskip("triton")
    interpreted = {"TRITON_INTERPRET": "1"} if device == "interpreter" else {}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.plan.triton_cases", kernel, device],
        env={**os.environ, **interpreted},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return int(done.stdout.split()[-1])
