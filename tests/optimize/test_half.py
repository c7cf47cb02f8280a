"""Encoders with decoders in half precision: optimized, verified and saved like any other model."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import nhwc
from nhwc.zoo import randomize_batchnorm_

from ..optimizing import force, runs_program
from ..processor import needing

NORMS = {
    "batch": nn.BatchNorm2d,
    "batch without weights": lambda c: nn.BatchNorm2d(c, affine=False),
    "group": lambda c: nn.GroupNorm(2, c),
    "instance": lambda c: nn.InstanceNorm2d(c, affine=True),
}


class Decoding(nn.Module):
    """Norms behind convolutions, before them, behind a `cat`; images made larger in two ways."""

    def __init__(self, norm):
        super().__init__()
        self.first, self.down = nn.Conv2d(3, 8, 3, 1, 1), nn.Conv2d(8, 16, 3, 2, 1, bias=False)
        self.up, self.behind = nn.ConvTranspose2d(16, 8, 2, 2), norm(8)
        self.inner, self.before, self.joined = norm(16), norm(8), norm(16)
        self.last = nn.Conv2d(16, 2, 1)

    def forward(self, x):
        wide = self.first(x)
        deep = F.silu(self.inner(self.down(F.relu(self.before(wide)))))
        both = torch.cat([self.behind(self.up(deep)), wide], 1)
        y = self.last(F.relu(self.joined(both)))
        return F.interpolate(y, scale_factor=2.0, mode="bilinear", align_corners=False).sigmoid()


@torch.no_grad()
@pytest.mark.parametrize("dtype", [needing(torch.float16), needing(torch.bfloat16)])
@pytest.mark.parametrize("wide_norms", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_a_decoder_in_half_precision(name, wide_norms, dtype, tmp_path):
    torch.manual_seed(0)
    model = randomize_batchnorm_(Decoding(NORMS[name])).eval().to(dtype)
    if wide_norms:
        for module in (model.inner, model.before, model.behind, model.joined):
            module.float()
    x = torch.rand(1, 3, 12, 12).to(dtype)
    fast = force(model, x)
    assert fast.report.verification.in_float64
    nhwc.save(fast, tmp_path / "m.nhwc")
    larger = torch.rand(2, 3, 16, 12).to(dtype)
    for ours in (fast, nhwc.fuse(model), nhwc.load(tmp_path / "m.nhwc")):
        for image in (x, larger, larger.to(memory_format=torch.channels_last)):
            torch.testing.assert_close(ours(image), model(image), rtol=0, atol=0.03)


class InEightBits(nn.Module):
    """Takes an image of 8 bits, rounds to them between its layers, and has a weight in them."""

    def __init__(self, dtype):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1)
        self.register_buffer("scale", torch.rand(8, 1, 1).to(dtype))

    def forward(self, x):
        y = self.first(x.float()).to(x.dtype).float()
        return self.last(y * self.scale.float()).to(x.dtype)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_numbers_of_8_bits(dtype, tmp_path):
    torch.manual_seed(0)
    model, x = InEightBits(dtype).eval(), torch.rand(1, 3, 12, 12).to(dtype)
    fast = force(model, x)
    nhwc.save(fast, tmp_path / "m.nhwc")
    for ours in (fast, nhwc.fuse(model), nhwc.load(tmp_path / "m.nhwc")):
        assert ours(x).dtype is dtype
        torch.testing.assert_close(ours(x).float(), model(x).float(), rtol=0.3, atol=0.1)
    assert runs_program(fast, x)
