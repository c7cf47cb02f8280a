"""An LSTM or a GRU returns its sequence alone, unless somebody reads or gives other states."""

import pytest
import torch
from torch import nn

from nhwc.graph import capture
from nhwc.passes.drop_states import drop_states


class Read(nn.Module):
    """A GRU on the rows of images; what a case changes is a method."""

    def __init__(self, kind=nn.GRU):
        super().__init__()
        self.recurrent = kind(6, 5, 2, batch_first=True, bidirectional=True, dropout=0.5)
        self.begin = nn.Parameter(torch.zeros(4, 2, 5))

    def forward(self, x):
        y, states = self.recurrent(x.flatten(0, 1), self.states(x))
        return self.behind(y, states)

    def states(self, x):
        return None

    def behind(self, y, states):
        return y.relu()


class OfZeros(Read):
    def states(self, x):
        return torch.zeros(4, x.size(0), 5).to(x.device)


class OfTwoZeros(Read):
    def __init__(self):
        super().__init__(nn.LSTM)

    def states(self, x):
        zeros = x.new_zeros(4, x.size(0), 5)
        return zeros, torch.zeros_like(zeros.relu())


class OfSize(Read):
    """Torch refuses other batches."""

    def states(self, x):
        return torch.zeros(4, 2, 5)


class Written(Read):
    def states(self, x):
        return torch.zeros(4, x.size(0), 5).add_(1.0)


class Learned(Read):
    """They are zeros for now."""

    def states(self, x):
        return self.begin


class Shown(Read):
    def behind(self, y, states):
        return y, states


class Whole(Read):
    def forward(self, x):
        return self.recurrent(x.flatten(0, 1))


def dropped(model):
    model.eval()
    x = torch.randn(2, 1, 4, 6)
    graph = capture(model).module
    report = drop_states(graph)
    with torch.no_grad():
        for batch in (x, x[:, :, :3]):
            torch.testing.assert_close(graph(batch), model(batch), rtol=0, atol=0)
    return report.sites[0], graph


@pytest.mark.parametrize("make", [Read, lambda: Read(nn.LSTM), OfZeros])
def test_its_sequence_is_left(make):
    site, graph = dropped(make())
    assert site.applied
    assert [node.op for node in graph.graph.nodes].count("call_module") == 1
    assert not any(node.target in (torch.zeros, "getitem") for node in graph.graph.nodes)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (OfTwoZeros, "it begins with states that it is given"),
        (OfSize, "it begins with states that it is given"),
        (Written, "it begins with states that it is given"),
        (Learned, "it begins with states that it is given"),
        (Shown, "the states that it ends in are asked for"),
        (Whole, "the states that it ends in are asked for"),
    ],
)
def test_what_others_give_or_read_stays(make, reason):
    site, _ = dropped(make())
    assert not site.applied
    assert site.reason == reason


def test_a_hook_sees_states():
    model = Read()
    model.recurrent.register_forward_hook(lambda module, inputs, results: None)
    graph = capture(model.eval()).module
    assert not any(site.applied for site in drop_states(graph).sites)
