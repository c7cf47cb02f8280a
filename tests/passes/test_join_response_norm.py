"""Global response norms, as models spell them, become one layer."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nhwc.files.layers import dump_layer, restore_layer
from nhwc.graph.modules.mended import ChannelNorm, GlobalResponse
from nhwc.passes import FOLDING
from nhwc.passes.join_response_norm import join_response_norm
from nhwc.passes.mend_permute import mend_permute

from ..fusing import assert_same, random_, rewrite

IMAGE = torch.randn(2, 6, 5, 4, generator=torch.Generator().manual_seed(0))


class Response(nn.Module):
    """As timm has it, of N, C, H, W or of N, H, W, C."""

    def __init__(self, last=False, eps=1e-6, p=2):
        super().__init__()
        self.pixels, self.channel = ((1, 2), -1) if last else ((2, 3), 1)
        self.shape = (1, 1, 1, -1) if last else (1, -1, 1, 1)
        self.eps, self.p = eps, p
        self.weight, self.bias = (nn.Parameter(torch.randn(6)) for _ in range(2))

    def forward(self, x):
        size = x.norm(p=self.p, dim=self.pixels, keepdim=True)
        share = size / (size.mean(dim=self.channel, keepdim=True) + self.eps)
        return x + torch.addcmul(
            self.bias.view(self.shape), self.weight.view(self.shape), x * share
        )


class Spelt(Response):
    """As the paper's authors have it."""

    def forward(self, x):
        size = torch.norm(x, p=2, dim=self.pixels, keepdim=True)
        share = size / (size.mean(dim=self.channel, keepdim=True) + 1e-6)
        weight, bias = self.weight.view(self.shape), self.bias.view(self.shape)
        return weight * (x * share) + bias + x


class Block(nn.Module):
    """A part of a block of ConvNeXt V2 on N, H, W, C."""

    def __init__(self, response):
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(6), nn.Linear(6, 6)
        self.response, self.last = response, nn.Linear(6, 6)

    def forward(self, x):
        y = self.mix(self.norm(x.permute(0, 2, 3, 1)))
        return x + self.last(self.response(F.gelu(y))).permute(0, 3, 1, 2)


class Counted(Response):
    """What it runs over is counted from the end: the pixels of images, other sides of volumes."""

    def __init__(self, pixels, channel):
        super().__init__()
        self.pixels, self.channel = pixels, channel


class Halved(Response):
    def forward(self, x):
        size = x.norm(p=2, dim=(2, 3), keepdim=True)
        return x * (size / (size.mean(dim=1, keepdim=True) + 1e-6)) + size


class Overwritten(Response):
    def forward(self, x):
        x = x * 1
        size = x.norm(p=2, dim=(2, 3), keepdim=True)
        scaled = x * (size / (size.mean(dim=1, keepdim=True) + 1e-6))
        x.view(-1).mul_(2)
        return self.weight.view(self.shape) * scaled + self.bias.view(self.shape) + x


@pytest.mark.parametrize("net", [Response(), Spelt(), Block(Response(True)), Block(Spelt(True))])
@torch.no_grad()
def test_a_response_norm_is_joined(net):
    net = random_(net)
    joined, (*_, report, _) = rewrite(net, *FOLDING, join_response_norm, mend_permute)
    assert [site.applied for site in report.sites] == [True], report.sites
    assert_same(joined, net, IMAGE)
    (layer,) = (m for m in joined.modules() if isinstance(m, GlobalResponse))
    assert not layer.last
    assert isinstance(net, Response) or any(isinstance(m, ChannelNorm) for m in joined.modules())


def test_a_file_from_before_dimensions_were_kept_is_read():
    arguments = {"channels": 6, "eps": 0.1, "last": True}
    layer = restore_layer({"class": "nhwc.GlobalResponse", "arguments": arguments})
    assert (layer.last, layer.dims) == (True, [1, 2, 3])
    assert dump_layer(layer, "layer")["arguments"].keys() == {*arguments, "dims", "batched"}


@pytest.mark.parametrize("dims", [((-2, -1), 1), ((2, 3), -3), ((-2, -1), -3)])
@torch.no_grad()
def test_dimensions_counted_from_the_end_stay_so(dims):
    net = random_(Counted(*dims))
    joined, _ = rewrite(net, *FOLDING, join_response_norm)
    assert any(isinstance(m, GlobalResponse) for m in joined.modules())
    for x in (IMAGE, torch.randn(2, 4, 6, 5, 3, generator=torch.Generator().manual_seed(1))):
        assert_same(joined, net, x)


@pytest.mark.parametrize(
    ("net", "tried"),
    [
        *((Halved(), True), (Overwritten(), True)),
        *((Response(p=1), False), (Response(eps=None), True)),
    ],
)
@torch.no_grad()
def test_other_norms_stay(net, tried):
    if net.eps is None:
        net.eps = nn.Parameter(torch.ones(1))
    kept, (*_, report) = rewrite(random_(net), *FOLDING, join_response_norm)
    assert [site.applied for site in report.sites] == [False] * tried
    assert_same(kept, net, IMAGE)
