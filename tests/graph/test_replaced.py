"""What torch has once for all threads is replaced in the eyes of the thread that traces."""

import threading
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue

import pytest
import torch
from torch import nn

import nhwc
from nhwc.graph.tracing.captured import capture, capture_closed
from nhwc.graph.tracing.recorded import record_run

X = torch.randn(1, 3, 4, 4)


class Meanwhile(nn.Module):
    """Does something else in its forward, which is run while it is traced or recorded."""

    def __init__(self, doing):
        super().__init__()
        self.conv, self.doing = nn.Conv2d(3, 3, 1), doing

    def forward(self, x):
        self.doing()
        return self.conv(x)


@pytest.mark.parametrize("way", ["trace", "record"])
@torch.no_grad()
def test_other_threads_compute_as_ever_meanwhile(way):
    other = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU()).eval()
    compiled, seen = torch.compile(other, backend="eager"), SimpleQueue()
    expected = compiled(X)

    def compute():
        return other(X), compiled(X), other[0].weight

    def doing():
        with ThreadPoolExecutor(1) as pool:
            seen.put(pool.submit(compute).result())

    model = Meanwhile(doing).eval()
    if way == "trace":
        capture(model)
    else:
        record_run(capture_closed(model, "for its sizes").module, [X])
    plain, fast, weight = seen.get_nowait()
    assert torch.equal(plain, expected)
    assert torch.equal(fast, expected)
    assert weight is other[0].weight


def test_threads_take_turns_to_trace():
    began, ended, results = threading.Event(), threading.Event(), []

    def second():
        began.set()
        ended.wait(10)

    model = Meanwhile(second).eval()
    thread = threading.Thread(target=lambda: results.append(nhwc.fuse(model)))

    def first():
        thread.start()
        began.wait(0.5)

    nhwc.fuse(Meanwhile(print).eval())  # The first one takes long.
    found = nn.Module.__call__, nn.Module.__getattr__, torch.cat
    capture(Meanwhile(first).eval())
    ended.set()
    thread.join()
    assert (nn.Module.__call__, nn.Module.__getattr__, torch.cat) == found
    assert results[0](X).shape == X.shape
