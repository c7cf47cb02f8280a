"""Norms by the root of the mean square: the module, the function, and what spells them out."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nhwc
from nhwc import kernels

from .test_native import Net, images, lowered

pytestmark = pytest.mark.skipif(
    not kernels.available(), reason=kernels.unavailable() or "the kernels are available"
)


def rooted(x, dim=-1, eps=1e-6):
    return x * torch.rsqrt(x.pow(2).mean(dim, keepdim=True) + eps)


SPELLED = {
    "rows": (lambda x: rooted(x), (2, 7, 24)),
    "channels of images": (lambda x: rooted(x, 1), (2, 24, 5, 7)),
    "channels of volumes": (lambda x: rooted(x, (1,)), (2, 24, 3, 5, 7)),
    "channels that were moved": (
        lambda x: rooted(x.movedim(1, -1)).movedim(-1, 1),
        (2, 24, 3, 5, 7),
    ),
    "another dimension": (lambda x: rooted(x, 1), (2, 7, 24)),
    "the other way round": (
        lambda x: torch.rsqrt(torch.mean(x * x, (-1,), keepdim=True) + 1e-6) * x,
        (2, 7, 24),
    ),
    "with a root": (
        lambda x: x / torch.sqrt(1e-6 + x.square().mean(dim=-1, keepdim=True)),
        (2, 7, 24),
    ),
    "with casts": (
        lambda x: x.float() * (x.to(torch.float32).pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt(),
        (2, 7, 24),
    ),
}


@pytest.mark.parametrize("name", SPELLED)
@torch.no_grad()
def test_a_norm_that_is_spelled_out_is_one_call(name):
    function, shape = SPELLED[name]
    (x,) = images(shape)
    graph, program, chosen = lowered(function, x)
    moves = 2 if name == "channels that were moved" else 0
    assert chosen == ["nhwc"] * (1 + moves)
    torch.testing.assert_close(program(x), graph(x), rtol=1e-5, atol=1e-6)


OTHERS = {
    "a mean over two dimensions": lambda x: rooted(x, (-1, -2)),
    "no dimension kept": lambda x: x[0] * torch.rsqrt(x[0].pow(2).mean(-1) + 1e-6),
    "a sum": lambda x: x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6),
    "a third power": lambda x: x * torch.rsqrt(x.pow(3).abs().mean(-1, keepdim=True) + 1e-6),
    "of something else": lambda x: x * torch.rsqrt(x.relu().pow(2).mean(-1, True) + 1e-6),
    "in float64 between": lambda x: (
        x * torch.rsqrt(x.to(torch.float64).pow(2).mean(-1, keepdim=True) + 1e-6)
    ),
    "several times what is added": lambda x: (
        x * torch.rsqrt(torch.add(x.pow(2).mean(-1, keepdim=True), 0.1, alpha=3))
    ),
    "rounded down": lambda x: torch.div(
        x, torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6), rounding_mode="floor"
    ),
    "no root": lambda x: x * (x.pow(2).mean(-1, keepdim=True) + 1e-6),
    "a root that divides": lambda x: torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) / x,
}


@pytest.mark.parametrize("name", OTHERS)
@torch.no_grad()
def test_what_is_no_such_norm_stays(name):
    (x,) = images((2, 7, 7))
    graph, program, chosen = lowered(OTHERS[name], x)
    assert len(chosen) > 2
    torch.testing.assert_close(program(x), graph(x), rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_what_others_read_of_a_norm_is_computed_for_them():
    def both(x):
        mean = x.pow(2).mean(-1, keepdim=True)
        return x * torch.rsqrt(mean + 1e-6), mean

    (x,) = images((2, 7, 24))
    graph, program, chosen = lowered(both, x)
    assert len(chosen) == 3
    torch.testing.assert_close(program(x), graph(x), rtol=1e-5, atol=1e-6)


class Blocks(Net):
    def __init__(self):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 24, 2, 2), nn.RMSNorm(24, eps=1e-5)
        self.mix, self.bare = nn.Linear(24, 24), nn.RMSNorm(24, elementwise_affine=False)
        self.weight = nn.Parameter(torch.rand(24))

    def forward(self, x):
        x = self.stem(x).flatten(2).transpose(1, 2)
        x = x + self.mix(self.norm(x))
        return F.rms_norm(self.bare(x), (24,), self.weight)


@torch.no_grad()
def test_modules_and_functions_are_planned_saved_and_loaded(tmp_path):
    net, (x,) = Blocks().eval(), images((2, 3, 8, 8))
    net.norm.weight.copy_(torch.rand(24))
    fused = nhwc.fuse(net)
    _, program, chosen = lowered(fused, x)
    assert all(name.startswith("nhwc") for name in chosen), chosen
    torch.testing.assert_close(program(x), net(x), rtol=1e-4, atol=1e-5)
    fast = nhwc.optimize(net, x)
    torch.testing.assert_close(fast(x), net(x), rtol=1e-4, atol=1e-5)
    nhwc.save(fast, tmp_path / "blocks.nhwc")
    torch.testing.assert_close(nhwc.load(tmp_path / "blocks.nhwc")(x), net(x), rtol=1e-4, atol=1e-5)
    net.norm.weight.mul_(2)
    torch.testing.assert_close(nhwc.fuse(net)(x), net(x))
