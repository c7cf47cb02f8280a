"""A forked child, whose threads the fork did not copy, is told so instead of waiting for ever."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")

_SCRIPT = """
import os, sys, warnings
import torch
from torch import nn
import nhwc

warnings.simplefilter("ignore")
torch.set_num_threads(1)
net = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 1)).eval()
x = torch.randn(2, 3, 64, 64)
fast = nhwc.optimize(net, x)
torch.set_grad_enabled(False)
expected = fast(x)

def ask(name, call):
    try:
        answer = "right" if (call() - expected).abs().max() < 1e-5 else "wrong"
    except nhwc.NhwcError as error:
        answer = str(error)
    print(name, answer, flush=True)

def fork(work):
    child = os.fork()
    if not child:
        work()
        os._exit(0)
    os.waitpid(child, 0)

def refused():
    ask("planned", lambda: fast(x))
    ask("optimize", lambda: nhwc.optimize(net, x)(x))

def alone():
    torch.set_num_threads(1)
    ask("alone", lambda: fast(x))

def before():
    torch.set_num_threads(2)
    ask("before", lambda: fast(x))

fork(before)
torch.set_num_threads(2)
fast(x)
fork(refused)
fork(alone)
ask("parent", lambda: fast(x))
"""


def test_a_child_of_a_process_with_threads_is_refused_and_helped():
    arguments = [sys.executable, "-c", _SCRIPT]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300, check=True)
    found = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert found["before"] == found["alone"] == found["parent"] == "right"
    assert "torch.set_num_threads(1)" in found["planned"]
    assert found["optimize"] == found["planned"]
