"""A mask without a number is dropped, unless somebody may write into what it was to copy."""

import pytest
import torch
from torch import nn

from nhwc.graph import capture
from nhwc.graph.tracing.sized import capture_sized
from nhwc.passes.drop_masks import drop_masks


class Padded(nn.Module):
    """As detectors mask what was padded; what a case changes is a method."""

    def forward(self, x):
        y = self.between(x * 2)
        return self.behind(y.masked_fill(self.mask(x), 0.0), y)

    def mask(self, x):
        return torch.zeros((*x.shape[:2], 1), dtype=torch.bool)

    def between(self, y):
        return y

    def behind(self, z, y):
        return z.relu()


class Made(Padded):
    def mask(self, x):
        return ~torch.ones((1, x.shape[1]), dtype=torch.bool)[..., None]


class Masked(Padded):
    def mask(self, x):
        return (torch.arange(x.shape[1]) > 2)[:, None]


class Buffer(Padded):
    """Whoever owns it may set a number in it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("hidden", torch.zeros(2, 5, 1, dtype=torch.bool))

    def mask(self, x):
        return self.hidden


class Larger(Padded):
    """The mask makes the result larger than the value."""

    def between(self, y):
        return y.sum(1, keepdim=True)


class CopyWritten(Padded):
    """A trace makes a sum of what is added in place; it leaves this write as it is."""

    def behind(self, z, y):
        torch.neg(z, out=z)
        return z + y


class ValueWritten(Padded):
    def behind(self, z, y):
        torch.neg(y, out=y)
        return z + y


class AddedInPlace(Padded):
    def behind(self, z, y):
        return z.add_(1).sum() + y.sum()


class Returned(Padded):
    def behind(self, z, y):
        return z, y


CASES = {
    **dict.fromkeys((Padded, Made, AddedInPlace), True),
    **dict.fromkeys((Masked, Buffer, Larger, CopyWritten, ValueWritten, Returned), False),
}


@pytest.mark.parametrize("kind", CASES)
@torch.no_grad()
def test_masks(kind):
    x = torch.randn(2, 5, 3)
    net = kind().eval()
    graph, _ = capture_sized(capture(net).module, [x])
    report = drop_masks(graph)
    graph.recompile()
    assert any(site.applied for site in report.sites) == CASES[kind]
    assert any(node.target == "masked_fill" for node in graph.graph.nodes) != CASES[kind]
    torch.testing.assert_close(graph(x), net(x), rtol=0, atol=0)
