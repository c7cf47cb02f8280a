"""Nets of video and of volumes through all of `optimize`: nothing of them is left to torch."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nhwc
from nhwc import kernels
from nhwc.kernels.programs.pool import Pool

from ..fusing import random_

pytestmark = pytest.mark.skipif(
    not kernels.available(), reason=kernels.unavailable() or "the kernels are available"
)


class Gate(nn.Module):
    """Squeeze and excitation of a volume."""

    def __init__(self, channels):
        super().__init__()
        self.down, self.up = nn.Conv3d(channels, 4, 1), nn.Conv3d(4, channels, 1)

    def forward(self, x):
        pooled = F.adaptive_avg_pool3d(x, 1)
        return x * torch.sigmoid(self.up(F.relu(self.down(pooled))))


class X3D(nn.Module):
    """Depthwise filters over frames and pixels, gates, swish, and a residual."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv3d(3, 16, (1, 3, 3), (1, 2, 2), (0, 1, 1), bias=False)
        self.before = nn.Conv3d(16, 16, (5, 1, 1), padding=(2, 0, 0), groups=16)
        self.wide, self.norm = nn.Conv3d(16, 24, 1), nn.BatchNorm3d(24)
        self.deep, self.gate = nn.Conv3d(24, 24, 3, padding=1, groups=24), Gate(24)
        self.narrow = nn.Conv3d(24, 16, 1)

    def forward(self, x):
        x = F.relu(self.before(self.stem(x)))
        y = F.silu(self.gate(self.deep(F.relu(self.norm(self.wide(x))))))
        return F.relu(self.narrow(y) + x).mean((2, 3, 4))


class Causal(nn.Module):
    """MoViNet's: 2+1 dimensions, frames padded in front alone, by zeros or by the first one."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv3d(3, 16, (1, 3, 3), (1, 2, 2))
        self.along = nn.Conv3d(16, 16, (3, 1, 1), groups=16)
        self.pixels, self.both = nn.Conv3d(16, 24, 1), nn.Conv3d(24, 16, 3, padding=(0, 1, 1))

    def forward(self, x):
        x = F.hardswish(self.stem(F.pad(x, (0, 1, 0, 1))))
        x = F.hardswish(self.pixels(self.along(F.pad(x, (0, 0, 0, 0, 2, 0)))))
        return self.both(torch.cat([x[:, :, :1].repeat(1, 1, 2, 1, 1), x], dim=2))


class SlowFast(nn.Module):
    """Two rates of frames, the faster one joined to the slower by a strided convolution."""

    def __init__(self):
        super().__init__()
        self.slow = nn.Conv3d(3, 16, (1, 3, 3), (1, 2, 2), (0, 1, 1))
        self.fast = nn.Conv3d(3, 8, 3, (1, 2, 2), 1)
        self.lateral = nn.Conv3d(8, 16, (5, 1, 1), (4, 1, 1), (2, 0, 0), bias=False)
        self.joined, self.norm = nn.Conv3d(32, 16, 3, padding=1), nn.BatchNorm3d(16)

    def forward(self, x):
        slow, fast = F.relu(self.slow(x[:, :, ::4])), F.relu(self.fast(x))
        slow = F.relu(self.norm(self.joined(torch.cat([slow, self.lateral(fast)], 1))))
        return torch.cat([slow.mean((2, 3, 4)), fast.mean((2, 3, 4))], 1)


class UNet(nn.Module):
    """Instance and group norm with what follows them, down and up again."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv3d(3, 8, 3, padding=1), nn.InstanceNorm3d(8, affine=True)
        self.down, self.of_groups = nn.Conv3d(8, 16, 3, 2, 1), nn.GroupNorm(4, 16)
        self.same = nn.Conv3d(16, 16, 3, padding=1)
        self.up, self.folded = nn.ConvTranspose3d(16, 8, 2, 2), nn.BatchNorm3d(8)
        self.last = nn.Conv3d(16, 2, 1)

    def forward(self, x):
        x = F.leaky_relu(self.norm(self.first(x)))
        y = self.down(x)
        y = F.silu(self.of_groups(self.same(y)) + y)
        return self.last(torch.cat([F.relu(self.folded(self.up(y))), x], 1))


class Cached(nn.Conv3d):
    """A causal convolution that begins with the last frames of the chunk before."""

    def forward(self, x, before=None):
        pad = [1, 1, 1, 1, 2, 0]
        if before is not None:
            x = torch.cat([before, x], dim=2)
            pad[4] -= before.shape[2]
        return super().forward(F.pad(x, pad))


class Norm(nn.Module):
    """The norm of the channels of each pixel."""

    def __init__(self, channels):
        super().__init__()
        self.gamma, self.scale = nn.Parameter(torch.ones(channels, 1, 1, 1)), channels**0.5

    def forward(self, x):
        return F.normalize(x, dim=1) * self.scale * self.gamma


class Chunked(nn.Module):
    """A decoder as Wan's: frame by frame, with what each convolution saw last kept in a list."""

    def __init__(self):
        super().__init__()
        self.first, self.both = Cached(3, 8, 3), Cached(8, 8, 3)
        self.twice, self.last = Cached(8, 16, (3, 1, 1)), Cached(8, 3, 3)
        self.norm, self.pixels = Norm(8), nn.Conv2d(8, 8, 3, padding=1)
        self.forget()

    def forget(self):
        self.place, self.kept = [0], [None] * 4

    def keeping(self, conv, x):
        seen = x[:, :, -2:].clone()
        before = self.kept[self.place[0]]
        if seen.shape[2] < 2 and before is not None:
            seen = torch.cat([before[:, :, -1].unsqueeze(2), seen], dim=2)
        x = conv(x, before)
        self.kept[self.place[0]] = seen
        self.place[0] += 1
        return x

    def decoded(self, x, first):
        x = self.keeping(self.first, x)
        x = x + self.keeping(self.both, F.silu(self.norm(x)))
        b, c, t, h, w = x.shape
        if not first:
            y = F.pad(x, (0, 0, 0, 0, 2, 0))
            y = nn.Conv3d.forward(self.twice, y).reshape(b, 2, c, t, h, w)
            x = torch.stack((y[:, 0], y[:, 1]), 3).reshape(b, c, 2 * t, h, w)
        images = x.permute(0, 2, 1, 3, 4).reshape(-1, c, h, w)
        images = F.interpolate(images.float(), scale_factor=2.0, mode="nearest-exact").type_as(x)
        x = self.pixels(images).view(b, -1, c, 2 * h, 2 * w).permute(0, 2, 1, 3, 4)
        return self.keeping(self.last, F.silu(self.norm(x)))

    def forward(self, x):
        self.forget()
        found = []
        for number in range(3):
            self.place = [0]
            chunk = x[:, :, number : number + 1]
            found.append(self.decoded(chunk, first=number == 0))
        self.forget()
        return torch.clamp(torch.cat(found, 2), -1.0, 1.0)


@pytest.mark.parametrize("kind", [X3D, Causal, SlowFast, UNet, Chunked])
def test_every_operator_has_a_kernel_of_ours(kind, tmp_path):
    torch.manual_seed(0)
    net = random_(kind()).eval()
    x = torch.rand(1, 3, 8, 16, 16)
    found = nhwc.optimize(net, x)
    (plan,) = found.report.plans
    without = [one for one in plan.fallbacks if one.reason.startswith("no kernel of ours")]
    assert not without
    assert {*found.report.opaque} == {*plan.opened}
    assert found.report.verification.passed
    nhwc.save(found, tmp_path / "net.nhwc")
    again = nhwc.load(tmp_path / "net.nhwc")
    with torch.inference_mode():
        expected = net.double()(x.double()).float()
        for one in (found, again):
            torch.testing.assert_close(one(x), expected, rtol=1e-3, atol=1e-4)


class Windows:
    """Inference over the windows of a volume, a few at a time, as MONAI's."""

    def __init__(self, model, side=16, step=12, at_once=2):
        self.model, self.side, self.step, self.at_once = model, side, step, at_once

    def __call__(self, x):
        found = []
        starts = range(0, x.shape[4] - self.side + 1, self.step)
        windows = [x[..., start : start + self.side] for start in starts]
        for first in range(0, len(windows), self.at_once):
            # The last ones are fewer. The code around the model writes into what it returns.
            found.append(self.model(torch.cat(windows[first : first + self.at_once])))
            found[-1] *= 0.5
        return torch.cat(found)


def test_the_windows_of_a_volume_share_one_arena(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr("nhwc._optimize.stages.winner", lambda compared: ("plan", ""))
    net, x = random_(UNet()).eval(), torch.rand(1, 3, 8, 16, 40)
    fast = nhwc.optimize(net, torch.rand(2, 3, 8, 16, 16), also=[torch.rand(1, 3, 8, 16, 16)])
    used, put = [], Pool.put

    def note(self, threads, block):
        used.append((block, block.size))
        put(self, threads, block)

    monkeypatch.setattr(Pool, "put", note)
    with torch.inference_mode():
        answers = [Windows(fast)(x) for _ in range(2)]
        expected = Windows(net)(x)
    for answer in answers:
        torch.testing.assert_close(answer, expected, rtol=1e-3, atol=1e-4)
    assert len(used) >= 4
    assert len({*used}) == 1
    del fast
    assert not len(used[0][0].bound)
