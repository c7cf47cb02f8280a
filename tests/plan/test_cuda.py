"""The plan on a GPU: run `pytest -m gpu` where there is one."""

import gc
from collections import OrderedDict
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import nhwc

from ..optimizing import close, force, residual

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@torch.no_grad()
def test_a_plan_is_one_cuda_graph_with_fresh_results():
    from nhwc.plan.gpu.graphs import CudaGraph

    model = residual().cuda()
    x = torch.randn(2, 3, 20, 18, device="cuda")
    fast = force(model, x)
    (program,) = fast._programs.values()
    assert isinstance(program, CudaGraph)
    first, second = fast(x), fast(-x)
    close(first, model(x), 1e-3)
    close(second, model(-x), 1e-3)


@dataclass
class Output:
    scores: torch.Tensor
    others: OrderedDict


class Wraps(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = residual()

    def forward(self, x):
        return Output(self.model(x), OrderedDict(twice=2 * x))


@torch.no_grad()
def test_results_in_a_dataclass_are_fresh_too():
    model = Wraps().cuda().eval()
    x = torch.randn(2, 3, 20, 18, device="cuda")
    fast = force(model, x)
    first, second = fast(x), fast(-x)
    assert type(first) is Output
    assert type(first.others) is OrderedDict
    close(first.scores, model(x).scores, 1e-3)
    close(second.scores, model(-x).scores, 1e-3)
    close(first.others["twice"], 2 * x, 0)


@torch.no_grad()
def test_a_graph_keeps_the_weights_that_its_kernels_read():
    """A CUDA graph knows them by their addresses, where anything may lie once they are freed."""
    model = residual().cuda()
    x = torch.randn(2, 3, 20, 18, device="cuda")
    fast = force(model, x)
    gc.collect()
    others = [torch.randn(size, device="cuda") for size in (64, 512, 4096) for _ in range(200)]
    close(fast(x), model(x), 1e-3)
    assert all(other.isfinite().all() for other in others)


def test_a_saved_model_is_planned_for_the_device_where_it_is_loaded(tmp_path):
    model = residual().cuda()
    x = torch.randn(2, 3, 20, 18, device="cuda")
    nhwc.save(force(model, x), tmp_path / "model.nhwc")
    fast = nhwc.load(tmp_path / "model.nhwc", device="cuda")
    assert fast.serves((x,))
    with torch.no_grad():
        close(fast(x), model(x), 1e-3)


class Waits(nn.Module):
    """Looks at its numbers on the host, which no CUDA graph can hold."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x):
        return self.conv(x).cpu().to(x.device).relu()


@torch.no_grad()
def test_what_waits_for_the_host_runs_without_a_graph():
    model = Waits().cuda().eval()
    x, stream = torch.randn(2, 3, 20, 18, device="cuda"), torch.cuda.current_stream()
    fast = force(model, x)
    close(fast(x), model(x), 1e-3)
    assert torch.cuda.current_stream() == stream


class Writes(nn.Module):
    """Leaves its result in its input."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x):
        return x.copy_(self.conv(x).relu())


@torch.no_grad()
def test_what_a_model_writes_into_its_input_is_there():
    model = Writes().cuda().eval()
    x = torch.randn(2, 3, 20, 18, device="cuda")
    given, other = x.clone(), x.clone()
    force(model, x.clone())(given)
    model(other)
    close(given, other, 1e-3)


@torch.no_grad()
def test_what_is_not_finite_stays_so():
    model = residual().cuda()
    x = torch.randn(2, 3, 20, 18, device="cuda")
    fast = force(model, x)
    x[0, 1, 3, 4] = float("nan")
    assert torch.equal(fast(x).isnan(), model(x).isnan())


@torch.no_grad()
def test_a_model_in_half_precision():
    model = residual().cuda().half()
    x = torch.randn(2, 3, 20, 18, device="cuda").half()
    close(force(model, x)(x), model(x), 2e-2)


@pytest.mark.parametrize("residual_add", [False, True])
@torch.no_grad()
def test_cudnns_fused_convolution(residual_add):
    from nhwc.operators.activations import NamedActivation
    from nhwc.plan.gpu import kernels_for_gpu
    from nhwc.plan.specs import Convolution

    conv = nn.Conv2d(8, 8, 3, padding=1).cuda()
    x, other = torch.randn(2, 2, 8, 9, 9, device="cuda")
    spec = Convolution(
        tuple(x.shape), tuple(conv.weight.shape), (1, 1), (1, 1), (1, 1), 1, True, residual_add,
        NamedActivation("relu"), torch.float32, "cuda:0",
    )  # fmt: skip
    expected = torch.relu(conv(x) + other if residual_add else conv(x))
    found = [one for one in kernels_for_gpu(spec) if one.name == "cudnn"]
    assert len(found) == 2
    for one in found:
        run = one.prepare(conv.weight, conv.bias)
        close(run(x, other) if residual_add else run(x), expected, 1e-3)
