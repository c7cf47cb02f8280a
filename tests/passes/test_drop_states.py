"""An LSTM or a GRU returns its sequence alone; the last states of that are those it ends in."""

import pytest
import torch
from torch import nn

from nhwc.graph import capture
from nhwc.passes.drop_states import drop_states

GIVEN = "it begins with states that it is given"
READ = "states that it ends in are read, and not those of its last layer alone"


class Read(nn.Module):
    """A GRU on the rows of images; what a case changes is a method."""

    def __init__(self, kind=nn.GRU, **settings):
        super().__init__()
        given = {"num_layers": 2, "batch_first": True, "bidirectional": True, "dropout": 0.5}
        self.recurrent = kind(6, 5, **given | settings)
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


class Last(Read):
    def behind(self, y, states):
        h = states[0] if isinstance(self.recurrent, nn.LSTM) else states
        ends = [h[-1 - both] for both in range(1 + self.recurrent.bidirectional)]
        return torch.cat(ends, -1), ends[0].mul_(2), y


class Ends(Read):
    def behind(self, y, states):
        return (states[0] if isinstance(self.recurrent, nn.LSTM) else states).squeeze(0)


class Shown(Read):
    def behind(self, y, states):
        return y, states


class First(Read):
    def behind(self, y, states):
        return y, states[0]


class Between(Read):
    def __init__(self):
        super().__init__(nn.LSTM)

    def behind(self, y, states):
        return states[1][-1]


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
            torch.testing.assert_close(
                graph(batch), model(batch), rtol=0, atol=0, check_stride=True
            )
    return report.sites[0], graph


def of_one_layer(kind, **settings):
    return Ends(kind, num_layers=1, dropout=0, **settings)


@pytest.mark.parametrize(
    "make",
    [
        Read,
        lambda: Read(nn.LSTM),
        OfZeros,
        Last,
        lambda: Last(nn.LSTM, bidirectional=False),
        lambda: Last(nn.LSTM, batch_first=False),
        lambda: Last(nn.LSTM, proj_size=3),
        lambda: of_one_layer(nn.GRU, bidirectional=False, batch_first=False),
        lambda: of_one_layer(nn.LSTM),
    ],
)
@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_its_sequence_is_left(make):
    site, graph = dropped(make())
    assert site.applied
    assert [node.op for node in graph.graph.nodes].count("call_module") == 1
    assert not any(node.target is torch.zeros for node in graph.graph.nodes)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (OfTwoZeros, GIVEN),
        (OfSize, GIVEN),
        (Written, GIVEN),
        (Learned, GIVEN),
        (Shown, READ),
        (First, READ),
        (Between, READ),
        (Whole, READ),
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
