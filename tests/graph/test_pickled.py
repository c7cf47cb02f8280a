"""A pickled graph is the graph: nothing of it ran when it was read."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import nhwc

X = torch.randn(1, 3, 4, 4)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.branch = nn.Conv2d(3, 3, 1), nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU())
        self.register_buffer("scale", torch.rand(4))


class OfABuffer(Net):
    def forward(self, x):
        return self.conv(x), self.scale * 2


class OfNothing(Net):
    def forward(self, x):
        return self.conv(x), torch.arange(4), torch.zeros(3)


class Written(Net):
    def forward(self, x):
        table = self.scale.exp()
        table[1:3] = 0
        return self.conv(x) + table, table


class Pooled(Net):
    def forward(self, x):
        values, places = F.max_pool2d(self.branch(x), 2, return_indices=True)
        return {"values": values[:, 1:, ..., None], "places": [places, x.size(0)]}


class Decided(OfABuffer):
    def forward(self, x):
        y = self.branch(x)
        return super().forward(y if y.sum() > -1e9 else y + 1)


def saved(graph):
    file = io.BytesIO()
    torch.save(graph, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS = {
    "pickle": lambda graph: pickle.loads(pickle.dumps(graph)),
    "torch.save": saved,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [OfABuffer, OfNothing, Written, Pooled, Decided])
@torch.no_grad()
def test_a_graph_comes_back_as_it_went(kind, way):
    model = kind().eval()
    fused = nhwc.fuse(model)
    again = WAYS[way](fused)
    assert [node.name for node in again.graph.nodes] == [node.name for node in fused.graph.nodes]
    assert again.code == fused.code
    assert again._get_name() == fused._get_name() == kind.__name__
    assert again.report == fused.report
    again.load_state_dict(fused.state_dict())
    for _ in range(2):
        result = again(X)
        torch.testing.assert_close(result, model(X))
        for tensor in result if isinstance(result, tuple) else ():
            tensor.fill_(7)


@torch.no_grad()
def test_what_was_read_from_a_file_can_be_pickled(tmp_path):
    model = OfABuffer().eval()
    nhwc.save(nhwc.optimize(model, X), tmp_path / "model.nhwc")
    again = pickle.loads(pickle.dumps(nhwc.load(tmp_path / "model.nhwc")))
    for _ in range(2):
        result = again(X)
        torch.testing.assert_close(result, model(X))
        result[1].fill_(7)
