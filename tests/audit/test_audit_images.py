"""Tensors of four dimensions that are no images are nobody's loss."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nhwc import audit


class Attention(nn.Module):
    """Over the pixels of an image, with a bias by position and heads that talk before and after."""

    def __init__(self, heads=4, mix=None):
        super().__init__()
        self.patches, self.heads = nn.Conv2d(3, 16, 4, stride=4), heads
        self.qkv, self.project = nn.Linear(16, 48), nn.Linear(16, 16)
        self.bias = nn.Parameter(torch.rand(25, heads))
        self.register_buffer("index", torch.randint(25, (16, 16)))
        self.mix = mix or nn.Linear(heads, heads)

    def forward(self, x):
        x = self.patches(x)
        n, c, h, w = x.shape
        tokens = x.flatten(2).transpose(1, 2)
        q, k, v = self.qkv(tokens).reshape(n, h * w, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1)
        bias = self.bias[self.index.view(-1)].view(h * w, h * w, -1).permute(2, 0, 1)
        scores = scores + bias.unsqueeze(0).contiguous()
        if isinstance(self.mix, nn.Conv2d):
            scores = self.mix(scores)
        else:
            scores = self.mix(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        tokens = (scores.softmax(dim=-1) @ v).transpose(1, 2).reshape(n, h * w, c)
        return self.project(tokens).mean(1)


def test_the_scores_of_an_attention_are_no_image():
    assert audit(Attention(), torch.rand(2, 3, 16, 16)).clean


def test_scores_that_a_convolution_mixes_are_one():
    report = audit(Attention(mix=nn.Conv2d(4, 4, 1)), torch.rand(2, 3, 16, 16))
    assert [finding.operator.rpartition(".")[2] for finding in report.lost] == ["softmax"]


class Permuted(nn.Module):
    """A channels-last image in another order of dimensions, as norms over the channels want it."""

    def __init__(self, scale):
        super().__init__()
        self.before, self.scale, self.after = nn.Conv2d(3, 8, 3), scale, nn.Conv2d(8, 8, 3)

    def forward(self, x):
        x = self.before(x).permute(0, 2, 3, 1)
        return self.after((x * self.scale(x)).permute(0, 3, 1, 2))


def test_channels_that_are_summed_leave_nothing_to_lose():
    net = Permuted(lambda x: torch.rsqrt(x.var(dim=-1, keepdim=True) + 1e-5))
    assert audit(net, torch.rand(2, 3, 16, 16)).clean


@pytest.mark.parametrize("end", [lambda x: x, F.relu])
def test_what_goes_out_is_an_image(end):
    class Upscaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.patches, self.mix = nn.Conv2d(3, 16, 4, stride=4), nn.Linear(16, 8)

        def forward(self, x):
            tokens = self.mix(self.patches(x).flatten(2).transpose(1, 2))
            return end(tokens.transpose(1, 2).unflatten(2, (4, 4)).cumsum(2))

    report = audit(Upscaled(), torch.rand(2, 3, 16, 16))
    assert [finding.operator.rpartition(".")[2] for finding in report.lost] == ["cumsum"]
