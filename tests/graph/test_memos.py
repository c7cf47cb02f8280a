"""What code keeps for each device: a graph computes it, or the code stays a call."""

import copy

import pytest
import torch
from torch import nn

from nhwc import fuse
from nhwc.graph import capture

X = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))


class Kept(nn.Module):
    """Attention as LeViT has it keeps its biases so."""

    def __init__(self, make=None):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)
        self.table = nn.Parameter(torch.randn(3, 4))
        self.register_buffer("places", torch.tensor([0, 3, 1, 2, 2, 1]))
        self.kept = {}
        self.make = make or (lambda self, x: self.table[:, self.places])

    def biases(self, x, device):
        key = str(device)
        if key not in self.kept:
            self.kept[key] = self.make(self, x)
        return self.kept[key]

    def _apply(self, *args, **kwargs):
        self.kept = {}
        return super()._apply(*args, **kwargs)

    def forward(self, x):
        return self.conv(x) + self.biases(x, x.device).unsqueeze(1)


class Elsewhere(Kept):
    def biases(self, x, device):
        key = str(device)
        if key not in self.kept:
            self.kept[key] = self.make(self, x)
        return self.kept[key] * (2 if key.startswith("cpu") else 3)


class Written(Kept):
    def biases(self, x, device):
        key = f"{device}"
        if key not in self.kept:
            self.kept[key] = self.make(self, x)
        return self.kept[key]


class Counted(Kept):
    def biases(self, x, device):
        self.seen = str(device)
        return self.make(self, x)


@torch.no_grad()
def test_a_graph_computes_what_code_keeps_for_each_device():
    model = Kept().eval()
    for _ in range(2):  # The second time, the model has kept it.
        before = copy.copy(model.kept)
        captured = capture(model)
        assert not captured.opaque
        assert model.kept.keys() == before.keys()
        torch.testing.assert_close(captured.module(X), model(X))
    fused = fuse(model)
    torch.testing.assert_close(fused(X), model(X))
    torch.testing.assert_close(
        fused.double()(X.double()), copy.deepcopy(model).double()(X.double())
    )
    assert fused.to("meta")(X.double().to("meta")).device.type == "meta"


@torch.no_grad()
def test_what_was_kept_of_other_weights_stays():
    model = Kept().eval()
    model(X)
    model.table.add_(1)
    captured = capture(model)
    assert "changes self.kept" in captured.opaque[0].reason
    torch.testing.assert_close(captured.module(X), model(X))


@pytest.mark.parametrize(
    "model",
    [
        Kept(lambda self, x: x.mean(0).mean(-1)),
        Kept(lambda self, x: self.table[:, self.places].to(x.dtype)),
        Kept(lambda self, x: self.table[:, : x.shape[2] - 5]),
        Kept(lambda self, x: torch.rand(3, 6, device=x.device)),
        Kept(lambda self, x: self.conv(x).mean((0, 3))),
        Elsewhere(),
        Written(),
        Counted(),
    ],
    ids=["input", "type", "size", "random", "layer", "text", "formatted", "attribute"],
)
@torch.no_grad()
def test_what_may_be_another_one_in_another_call_stays(model):
    captured = capture(model.eval())
    assert captured.opaque
    for x in X[:1], X * 2:
        torch.manual_seed(0)
        found = captured.module(x)
        torch.manual_seed(0)
        torch.testing.assert_close(found, model(x))
