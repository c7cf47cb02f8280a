"""What is about to be timed is compiled beforehand, each sort of kernel once."""

import pytest
import torch
from torch import fx, nn

from nhwc import kernels
from nhwc.plan import ahead, make_plan
from nhwc.plan.ledger import Ledger

pytestmark = pytest.mark.skipif(not kernels.available(), reason="no compiler")


@torch.no_grad()
def test_each_sort_of_kernel_is_made_once_and_none_that_is_known(tmp_path, monkeypatch):
    made, make = [], ahead._make

    def noting(scene, layer, one):
        made.append((layer.name, one.name))
        make(scene, layer, one)

    monkeypatch.setattr(ahead, "_make", noting)
    monkeypatch.setattr(ahead, "available_cores", lambda: 2)
    net = nn.Sequential(nn.Conv2d(8, 16, 1), nn.Conv2d(16, 16, 1), nn.MaxPool2d(2))
    graph, image = fx.symbolic_trace(net.eval()), torch.randn(1, 8, 8, 8)
    ledger = Ledger(tmp_path / "plans.json")
    first = make_plan(graph, (image,), ledger)
    # Both convolutions run the same code.
    assert sorted(made) == [("0", "nhwc pointwise"), ("2", "nhwc")]
    assert make_plan(graph, (image,), ledger).kernels == first.kernels
    assert len(made) == 2


@torch.no_grad()
def test_on_one_core_nothing_is_made_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(ahead, "available_cores", lambda: 1)
    monkeypatch.setattr(ahead, "_make", lambda *given: pytest.fail("made ahead"))
    graph = fx.symbolic_trace(nn.Sequential(nn.Conv2d(8, 16, 1)))
    make_plan(graph, (torch.randn(1, 8, 8, 8),), Ledger(tmp_path / "plans.json"))
