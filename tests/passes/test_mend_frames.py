"""Volumes as batches of their frames, and back: one layer each, where a reshape belongs to it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nhwc import Format, format_of, to_format
from nhwc.graph.modules.frames import FromFrames, ToFrames
from nhwc.passes.mend_frames import mend_frames

from ..fusing import Block, outputs, rewrite, script


def block(forward):
    layers = {"volume": nn.Conv3d(4, 8, 3, padding=1), "image": nn.Conv2d(8, 8, 3, padding=1)}
    return Block(forward, **layers).eval()


def by_permute(self, x):
    x = self.volume(x)
    n, c, t, h, w = x.shape
    frames = self.image(x.permute(0, 2, 1, 3, 4).reshape(n * t, c, h, w))
    return self.image(F.relu(frames)).view(n, t, c, h, w).permute(0, 2, 1, 3, 4).sigmoid()


def by_transpose(self, x):
    x = self.volume(x)
    n, c, t, h, w = x.shape
    frames = self.image(x.transpose(1, 2).flatten(0, 1))
    return frames.reshape(n, t, c, h, w).transpose(-4, 2)


def by_keyword(self, x):
    x = self.volume(x)
    n, c, t, h, w = x.shape
    frames = self.image(torch.transpose(input=x, dim0=1, dim1=2).flatten(0, 1))
    return torch.permute(input=frames.reshape(n, t, c, h, w), dims=(0, 2, 1, 3, 4))


CASES = {"permute": by_permute, "transpose": by_transpose, "keywords": by_keyword}


def _copied_before_a_write(self, x):
    y = x * 1
    frames = y.reshape(2, 5, 4, 7, 6)
    y.mul_(2)
    return frames.permute(0, 2, 1, 3, 4) + y.mean()


UNCHANGED = {
    "a copy of what is written then": _copied_before_a_write,
    "a swap alone": lambda self, x: x.permute(0, 2, 1, 3, 4) * 2,
    "rows of channels": lambda self, x: x.permute(0, 2, 1, 3, 4).flatten(2, 4),
    "another order": lambda self, x: x.permute(0, 2, 3, 1, 4).reshape(-1, 7, 4, 6),
    "tokens": lambda self, x: x.flatten(2).transpose(1, 2).reshape(2, 5, 7, 24),
}


def volumes(count=2):
    return to_format(torch.randn(count, 4, 5, 7, 6), Format.CHANNELS_LAST_3D)


@pytest.mark.parametrize("name", CASES)
def test_frames_are_views_of_volumes(name):
    model = block(CASES[name])
    changed, [report] = rewrite(model, mend_frames)
    assert [site.what for site in report.applied] == ["ToFrames", "FromFrames"]
    kinds = [type(module) for module in changed.modules()]
    assert {ToFrames, FromFrames} <= {*kinds}
    for count in (1, 2, 3):
        x = volumes(count)
        torch.testing.assert_close(outputs(changed, (x,)), outputs(model, (x,)))
    torch.testing.assert_close(outputs(script(changed), (x,)), outputs(model, (x,)))


def test_channels_last_frames_move_no_data():
    x = volumes()
    frames = ToFrames()(x)
    assert frames.data_ptr() == x.data_ptr()
    assert format_of(frames) is Format.CHANNELS_LAST
    back = FromFrames()(frames, [2, 5, 4, 7, 6])
    assert back.data_ptr() == x.data_ptr()
    assert torch.equal(back, x)


@pytest.mark.parametrize("name", UNCHANGED)
def test_must_not_change(name):
    model = block(UNCHANGED[name])
    changed, [report] = rewrite(model, mend_frames)
    assert not report.applied
    x = volumes()
    torch.testing.assert_close(outputs(changed, (x,)), outputs(model, (x,)))
