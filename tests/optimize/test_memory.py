"""What an optimized model holds: one arena, and no weight packed twice."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nhwc
from nhwc import kernels
from nhwc.kernels.programs.pool import Pool
from nhwc.plan import scene, trials

pytestmark = pytest.mark.skipif(
    not kernels.available(), reason=kernels.unavailable() or "the kernels are available"
)


def planned(net, *examples):
    """What `optimize` returns where only our kernels are known, and their plan wins."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nhwc._optimize.stages.winner", lambda compared: ("plan", ""))
        patch.setattr(scene, "kernels_of_others", lambda *_: ())
        patch.setattr(trials, "_as_called", lambda *_: {})
        return nhwc.optimize(net, examples[0], also=examples[1:], exact=True)


class Volumes(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Conv3d(1, 64, 3, padding=1), nn.InstanceNorm3d(64)
        self.same, self.last = nn.Conv3d(64, 64, 3, padding=1), nn.Conv3d(64, 2, 1)
        self.up = nn.ConvTranspose3d(64, 64, 2, 2)

    def forward(self, x):
        x = F.relu(self.norm(self.first(x)))
        return self.last(F.max_pool3d(self.up(F.relu(self.same(x))), 2))


def pieces(fast):
    """What each program of the model packed, by where it lies."""
    return [
        {piece.data_ptr(): piece.numel() for piece in program.shelf.pieces}
        for program in fast._programs.values()
    ]


@pytest.fixture(scope="module")
def volumes():
    """A net of volumes, and what it is optimized to for four windows of 8 pixels, and for one."""
    net = Volumes().eval()
    return net, planned(net, torch.rand(4, 1, 8, 8, 8), torch.rand(1, 1, 8, 8, 8))


def test_programs_for_several_shapes_hold_weights_once(volumes):
    first, second = pieces(volumes[1])
    assert first == second
    # The convolution and the transposed one, each with its bias.
    assert sorted(first.values()) == [64 * (64 + 1) * 8, 64 * (64 * 27 + 1)]


def test_a_copy_and_new_weights_hold_weights_once():
    net = nn.Sequential(nn.Conv2d(64, 64, 3), nn.ReLU(), nn.Conv2d(64, 8, 1)).eval()
    x, y = torch.rand(1, 64, 12, 12), torch.rand(3, 64, 12, 12)
    fast = copy.deepcopy(planned(net, x, y))
    with torch.inference_mode():
        fast(y)
        before = fast(x)
        assert len(pieces(fast)[0]) == 1
        assert pieces(fast)[0] == pieces(fast)[1]
    with torch.no_grad():
        for parameter in fast.parameters():
            parameter.mul_(2)
        assert not torch.allclose(fast(x), before)
        fast(y)
    first, second = pieces(fast)
    assert first == second
    assert len(fast._pool.shelves) == 2


class Pyramid(nn.Module):
    """One head for several sizes."""

    def __init__(self):
        super().__init__()
        self.head = nn.Conv2d(64, 64, 3, padding=1)

    def forward(self, x):
        return self.head(x), self.head(F.max_pool2d(x, 2))


def test_a_head_at_several_sizes_holds_its_weights_once():
    net, x = Pyramid().eval(), torch.rand(1, 64, 24, 24)
    fast = planned(net, x)
    assert [[*one.values()] for one in pieces(fast)] == [[64 * (64 * 9 + 1)]]
    with torch.inference_mode():
        torch.testing.assert_close(fast(x), net(x), rtol=1e-3, atol=1e-4)


def slid(model, volume, side, batch):
    """The mean of overlapping windows, some at a time; the last batch may be smaller."""
    places = [
        (a, b)
        for a in range(0, volume.shape[3] - side + 1, side // 2)
        for b in range(0, volume.shape[4] - side + 1, side // 2)
    ]
    count = torch.zeros(1, 1, *volume.shape[2:])
    total = torch.zeros(1, 2, *volume.shape[2:])
    for first in range(0, len(places), batch):
        some = places[first : first + batch]
        answers = model(torch.cat([volume[..., a : a + side, b : b + side] for a, b in some]))
        for answer, (a, b) in zip(answers, some, strict=True):
            total[..., a : a + side, b : b + side] += answer
            count[..., a : a + side, b : b + side] += 1
    return total / count


class Held:
    """The arenas that calls used, each with its size, and what is packed."""

    def __init__(self, monkeypatch, fast):
        self.fast, self.blocks, put = fast, set(), Pool.put

        def note(pool, threads, block):
            self.blocks.add((id(block), block.size))
            put(pool, threads, block)

        monkeypatch.setattr(Pool, "put", note)

    @property
    def now(self):
        return {*self.blocks}, pieces(self.fast)


def test_windows_that_slide_use_one_arena(volumes, monkeypatch):
    """Not more of it with more calls, with a shape that was seen before, or with a remainder."""
    net, fast = volumes
    held = Held(monkeypatch, fast)
    volume = torch.rand(1, 1, 8, 20, 16)
    with torch.inference_mode():
        # 12 windows: in fours, one by one, with one left over, and by fives, which have no plan.
        expected = slid(net, volume, 8, 4)
        torch.testing.assert_close(slid(fast, volume, 8, 4), expected, rtol=1e-3, atol=1e-4)
        before = held.now
        for batch in (4, 1, 11, 5, 4):
            torch.testing.assert_close(slid(fast, volume, 8, batch), expected, rtol=1e-3, atol=1e-4)
    assert held.now == before
    assert len(before[0]) == 1


def test_monais_windows_use_one_arena(volumes, monkeypatch):
    inferers = pytest.importorskip("monai.inferers")
    net, fast = volumes
    held = Held(monkeypatch, fast)
    volume = torch.rand(1, 1, 8, 21, 16)

    def infer(model):
        return inferers.sliding_window_inference(volume, (8, 8, 8), 4, model, overlap=0.5)

    with torch.inference_mode():
        expected, answer, before = infer(net), infer(fast), held.now
        torch.testing.assert_close(answer, expected, rtol=1e-3, atol=1e-4)
        infer(fast)
    assert held.now == before
    assert len(before[0]) == 1
