"""Torch runs on one thread where its threads would wait for one another."""

import pytest
import torch
from torch import nn

import nhwc
from nhwc._optimize.verdict import Judge
from nhwc.machine import crowd
from nhwc.verify import observe


@pytest.fixture(autouse=True)
def _two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


class Clock:
    """Time that passes whenever someone looks, of which the threads had `share`."""

    def __init__(self, share):
        self.share, self.now = share, 0.0

    def perf_counter(self):
        self.now += 0.003
        return self.now

    def process_time(self):
        return self.now * self.share


@pytest.mark.parametrize(("share", "is_crowd"), [(2.0, False), (1.8, False), (1.4, True)])
def test_threads_that_get_less_than_a_core_each_have_neighbours(share, is_crowd, monkeypatch):
    monkeypatch.setattr(crowd, "time", Clock(share))
    assert crowd.crowded() is is_crowd


@pytest.mark.parametrize("threads", [2, 64])
def test_each_thread_is_given_numbers(threads, monkeypatch):
    """Torch gives none to a thread that would have fewer than 32,768: it would seem crowded out."""
    made, ones = [], torch.ones
    torch.set_num_threads(threads)
    monkeypatch.setattr(crowd, "time", Clock(float(threads)))
    monkeypatch.setattr(torch, "ones", lambda count, **kwargs: made.append(count) or ones(1))
    assert not crowd.crowded()
    assert min(made) >= 32_768 * threads


def test_one_thread_waits_for_nobody(monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setattr(crowd, "time", None)
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
