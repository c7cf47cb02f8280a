"""Cases of each kernel for GPUs against torch: `python -m tests.plan.triton_cases KERNEL DEVICE`.

A process of its own, since Triton decides when it is imported whether it compiles or interprets.
"""

import itertools
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nhwc import kernels
from nhwc.machine.whole import whole_float32
from nhwc.operators.activations import NamedActivation, in_torch
from nhwc.plan import ahead, gpu, others
from nhwc.plan.gpu import launch
from nhwc.plan.gpu.launch import Block
from nhwc.plan.specs import Affine, Convolution, Linear
from nhwc.zoo import randomize_batchnorm_

from ..optimizing import force

DEVICE = "cuda" if "cuda" in sys.argv else "cpu"
LAST = torch.channels_last
NUMBERS = {"hardtanh": (0.0, 6.0), "leaky_relu": (0.1,), "prelu": (0.2,)}
CURVES = ("sigmoid", "silu", "gelu", "gelu_tanh", "tanh", "mish", "elu", "selu", "softplus")
SPELLED = ("quick_gelu", "erf_gelu", "tanh_gelu", "squared_relu")
NAMES = ("relu", "hardswish", "hardsigmoid", *CURVES, *SPELLED)
ACTIVATIONS = [None, *(NamedActivation(name, NUMBERS.get(name, ())) for name in (*NUMBERS, *NAMES))]
BLOCKS = [Block(16, 32, 32, 4, 2), Block(64, 32, 32, 4, 2)]
WAYS = {torch.float32: ["ieee"]}
if DEVICE == "cuda":
    BLOCKS = [launch._BLOCKS[place] for place in (0, 2, 7)]
    WAYS = {
        torch.float32: ["ieee", "tf32", "tf32x3"],
        torch.float16: ["ieee"],
        torch.bfloat16: ["ieee"],
    }


def random(*shape, dtype=torch.float32):
    return torch.randn(shape, device=DEVICE).to(dtype)


def near(found, expected, way="ieee"):
    assert found.shape == expected.shape
    layout = LAST if found.ndim == 4 else torch.contiguous_format
    assert found.is_contiguous(memory_format=layout)
    allowed = max(2e-5 if way != "tf32" else 2e-3, 2 * torch.finfo(found.dtype).eps)
    expected = expected.float()
    assert (found.float() - expected).abs().max() <= allowed * expected.abs().max()


def finish():
    for activation, last in itertools.product(ACTIVATIONS, (False, True)):
        layout, inner = (LAST, 1) if last else (torch.contiguous_format, 12)
        x, residual = (random(2, 5, 3, 4).contiguous(memory_format=layout) for _ in range(2))
        scale, shift = random(5), random(5)
        spec = Affine((2, 5, 3, 4), True, activation, torch.float32, DEVICE)
        run = launch.finishing(spec, scale, shift, inner)
        summed = 4 * x * scale.view(-1, 1, 1) + shift.view(-1, 1, 1) + residual
        found = run(4 * x, residual)
        assert found.stride() == x.stride()
        torch.testing.assert_close(found, in_torch(activation)(summed), rtol=2e-6, atol=2e-6)
        assert run(x * float("nan"), residual).isnan().all()
        yield


def depthwise():
    sizes = [
        (5, (9, 7), (3, 3), (1, 1), (1, 1), (1, 1)),
        (40, (5, 20), (5, 5), (2, 2), (2, 2), (1, 1)),
        (70, (3, 4), (7, 7), (1, 1), (3, 3), (1, 1)),
        (16, (9, 9), (3, 1), (2, 1), (1, 0), (1, 1)),
        (8, (12, 11), (3, 3), (1, 2), (2, 2), (2, 2)),
    ]
    for (c, sides, taps, stride, padding, apart), adds, dtype in itertools.product(
        sizes, (False, True), WAYS
    ):
        x = random(2, c, *sides, dtype=dtype).contiguous(memory_format=LAST)
        weight, bias = random(c, 1, *taps, dtype=dtype), random(c, dtype=dtype)
        exact = F.conv2d(x.float(), weight.float(), bias.float(), stride, padding, apart, c)
        residual = [random(*exact.shape, dtype=dtype).contiguous(memory_format=LAST)] * adds
        spec = Convolution(
            tuple(x.shape), tuple(weight.shape), stride, padding, apart, c, True, adds,
            NamedActivation("silu"), dtype, DEVICE,
        )  # fmt: skip
        found = launch.depthwise(spec, weight, bias)(x, *residual)
        near(found, F.silu(exact + residual[0].float() if adds else exact))
        yield


def convolve():
    sizes = [
        ((16, 24), 1, (7, 5), (1, 1), (1, 1), (0, 0), (1, 1), None),
        ((16, 24), 1, (7, 5), (1, 1), (2, 2), (0, 0), (1, 1), None),
        ((20, 40), 1, (6, 9), (3, 3), (1, 1), (1, 1), (1, 1), None),
        ((32, 48), 2, (8, 8), (3, 3), (2, 2), (1, 1), (1, 1), None),
        ((16, 16), 1, (11, 10), (3, 5), (1, 2), (2, 2), (2, 1), None),
        ((16, 16), 1, (8, 8), (3, 3), (2, 2), (0, 0), (1, 1), (1, 1)),
        ((64, 64), 4, (5, 5), (1, 1), (1, 1), (0, 0), (1, 1), None),
    ]
    for size, adds, dtype in itertools.product(sizes, (False, True), WAYS):
        (c, filters), groups, sides, taps, stride, padding, apart, behind = size
        x = random(2, c, *sides, dtype=dtype).contiguous(memory_format=LAST)
        weight, bias = (
            random(filters, c // groups, *taps, dtype=dtype),
            random(filters, dtype=dtype),
        )
        ends = zip(reversed(padding), reversed(behind or padding), strict=True)
        padded = F.pad(x.float(), [side for pair in ends for side in pair])
        exact = F.conv2d(padded, weight.float(), bias.float(), stride, 0, apart, groups)
        residual = [random(*exact.shape, dtype=dtype).contiguous(memory_format=LAST)] * adds
        spec = Convolution(
            tuple(x.shape), tuple(weight.shape), stride, padding, apart, groups, True, adds,
            NamedActivation("relu"), dtype, DEVICE, behind,
        )  # fmt: skip
        for block, way in itertools.product(BLOCKS, WAYS[dtype]):
            found = launch.product(spec, block, way, weight, bias)(x, *residual)
            near(found, F.relu(exact + residual[0].float() if adds else exact), way)
        yield


@torch.no_grad()
def linear():
    for shape, block in itertools.product(((7, 33), (2, 5, 40), (1, 16)), BLOCKS):
        layer, x = nn.Linear(shape[-1], 50).to(DEVICE), random(*shape)
        spec = Linear(
            shape, tuple(layer.weight.shape), True, False, NamedActivation("gelu"),
            torch.float32, DEVICE,
        )  # fmt: skip
        near(launch.product(spec, block, "ieee", layer.weight, layer.bias)(x), F.gelu(layer(x)))
        yield


class Mixed(nn.Module):
    """A layer for each kernel, with and without what may stand behind it."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.Hardswish())
        self.wide = nn.Sequential(nn.Conv2d(16, 40, 1), nn.BatchNorm2d(40), nn.SiLU())
        self.alone = nn.Sequential(nn.Conv2d(40, 40, 5, 1, 2, groups=40), nn.ReLU6())
        self.thin = nn.Conv2d(40, 16, 1)
        self.halves = nn.Sequential(nn.Conv2d(16, 32, 3, 2, 1, groups=2), nn.ReLU())
        self.norm = nn.BatchNorm2d(48)
        self.last = nn.Linear(48, 10)

    def forward(self, x):
        x = self.stem(x)
        x = F.relu(x + self.thin(self.alone(self.wide(x))))
        x = F.gelu(self.norm(torch.cat([self.halves(x), F.max_pool2d(x, 2)], 1)))
        first, second = x.chunk(2, 1)
        return F.gelu(self.last(torch.cat([second, first], 1).mean((2, 3))))


@torch.no_grad()
def plan():
    """A plan of nothing but these kernels, wherever there is one, in the processor's memory."""
    known = others.kernels_for
    with pytest.MonkeyPatch.context() as patch:
        on_gpu = lambda spec: gpu.kernels_for_gpu(replace(spec, device="cuda")) or known(spec)
        patch.setattr(others, "kernels_for", on_gpu)
        patch.setattr(kernels, "available", lambda: False)
        patch.setattr(gpu, "_fused_by_cudnn", lambda spec: ())
        patch.setattr(gpu, "rounds_convolutions", lambda: False)
        patch.setattr(ahead, "_has_room", lambda *given: True)
        # The interpreter changes Triton's own module while it runs: it is for one thread.
        patch.setattr(ahead, "ThreadPoolExecutor", lambda workers: ThreadPoolExecutor(1))
        patch.setattr(launch, "unavailable", lambda device: None)
        patch.setattr(launch, "blocks", lambda spec, precision: (Block(32, 32, 32, 4, 2),))
        model = randomize_batchnorm_(Mixed()).eval()
        for layout in (torch.contiguous_format, LAST):
            x = random(2, 3, 12, 12).contiguous(memory_format=layout)
            fast = force(model, x, remeasure=True)
            words = fast.report.plans[0].to_dict()["layers"]
            assert sum("triton" in one["chosen"]["kernel"] for one in words) == 7
            torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-5)
            yield


if __name__ == "__main__":
    torch.manual_seed(0)
    numpy.seterr(all="ignore")
    cases = {
        function.__name__: function for function in (finish, depthwise, convolve, linear, plan)
    }
    with whole_float32():
        print(sum(1 for _ in cases[sys.argv[1]]()))
