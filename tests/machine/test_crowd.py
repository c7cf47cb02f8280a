"""Torch runs on one thread where its threads would wait for one another."""

import pytest
import torch
from torch import nn

import nhwc
from nhwc._optimize.verdict import Judge
from nhwc.machine import crowd
from nhwc.machine.timing import Samples
from nhwc.verify import observe


@pytest.fixture(autouse=True)
def _two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("one", "every", "waits"), [(1e-6, 4e-5, False), (1e-6, 7e-5, False), (1e-6, 1e-2, True)]
)
def test_threads_wait_where_all_take_longer_than_one_would(one, every, waits, monkeypatch):
    taken = {"one": Samples((one,) * 3), "all": Samples((every,) * 3)}
    monkeypatch.setattr(crowd, "interleave", lambda calls, rounds: taken)
    assert crowd.crowded() is waits


def test_one_thread_waits_for_nobody(monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setattr(crowd, "interleave", lambda calls, rounds: pytest.fail("timed"))
    assert not crowd.crowded()


@pytest.mark.parametrize(("waits", "threads"), [(True, 1), (False, 2)])
def test_the_original_is_run_on_one_thread_in_a_crowd(waits, threads, monkeypatch):
    monkeypatch.setattr(crowd, "crowded", lambda: waits)
    net, seen = nn.Conv2d(3, 4, 3), []
    net.register_forward_hook(lambda *_: seen.append(torch.get_num_threads()))
    observe(net, [(torch.rand(1, 3, 12, 12),)])
    assert {*seen} == {threads}
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(("waits", "threads"), [(True, 1), (False, 2)])
def test_the_graph_is_checked_on_one_thread_in_a_crowd(waits, threads, monkeypatch):
    monkeypatch.setattr(crowd, "crowded", lambda: waits)
    seen, check = [], Judge.check

    def noting(self, graph):
        seen.append(torch.get_num_threads())
        check(self, graph)

    monkeypatch.setattr(Judge, "check", noting)
    nhwc.optimize(nn.Conv2d(3, 4, 3).eval(), torch.rand(1, 3, 12, 12))
    assert {*seen} == {threads}
    assert torch.get_num_threads() == 2


def test_threads_come_back_after_an_error(monkeypatch):
    monkeypatch.setattr(crowd, "crowded", lambda: True)
    with pytest.raises(RuntimeError), crowd.one_thread_if_crowded():
        raise RuntimeError
    assert torch.get_num_threads() == 2
