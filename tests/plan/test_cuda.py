"""The plan on a GPU. Written without one at hand: run `pytest -m gpu` where there is one."""

import pytest
import torch
from torch import nn

from ..optimize.test_optimize import close, force, residual

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@torch.no_grad()
def test_a_plan_is_one_cuda_graph_with_fresh_results():
    from nhwc.plan.cuda import CudaGraph

    model = residual().cuda()
    x = torch.randn(2, 3, 20, 18, device="cuda")
    fast = force(model, x)
    (program,) = fast._programs.values()
    assert isinstance(program, CudaGraph)
    first, second = fast(x), fast(-x)
    close(first, model(x), 1e-3)
    close(second, model(-x), 1e-3)


@pytest.mark.parametrize("residual_add", [False, True])
@torch.no_grad()
def test_cudnns_fused_convolution(residual_add):
    from nhwc.plan.activations import Activation

    from nhwc.plan.cuda import fused_convolutions
    from nhwc.plan.specs import Convolution

    conv = nn.Conv2d(8, 8, 3, padding=1).cuda()
    x, other = torch.randn(2, 2, 8, 9, 9, device="cuda")
    spec = Convolution(
        tuple(x.shape), tuple(conv.weight.shape), (1, 1), (1, 1), (1, 1), 1, True, residual_add,
        Activation("relu"), torch.float32, "cuda:0",
    )  # fmt: skip
    expected = torch.relu(conv(x) + other if residual_add else conv(x))
    found = fused_convolutions(spec)
    assert len(found) == 2
    for one in found:
        run = one.prepare(conv.weight, conv.bias)
        close(run(x, other) if residual_add else run(x), expected, 1e-3)
