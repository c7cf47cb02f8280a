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
HERE = Path(__file__).parent


@pytest.mark.parametrize("device", ["interpreter", GPU])
@pytest.mark.parametrize("kernel", ["finish", "depthwise", "convolve", "linear"])
def test_a_kernel_answers_as_torch_does(kernel, device):
    pytest.importorskip("triton")
    interpreted = {"TRITON_INTERPRET": "1"} if device == "interpreter" else {}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", HERE / "triton_cases.py", kernel, device],
        env={**os.environ, **interpreted},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout.split()[0]) > 3
