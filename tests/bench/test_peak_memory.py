"""A large model takes no more than three times the memory that one call of it needs."""

import subprocess
import sys

import pytest

from nhwc._bench.peak import peak_bytes

CODE = """
import sys, torch
from torch import nn
import nhwc
from nhwc._bench.peak import peak_bytes, reset_peak
from nhwc.plan import weighing

# What any model may take is much for this one, and little for the large ones that it stands for.
weighing._ALWAYS = 0


def block():
    return [nn.Conv2d(512, 512, 3, padding=1), nn.BatchNorm2d(512), nn.ReLU()]


def model():
    head = [nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(8192, 2048)]
    return nn.Sequential(*[layer for _ in range(8) for layer in block()], *head).eval()


def peak_of(work):
    net = model()
    reset_peak()
    result = work(net, x)
    return peak_bytes() - before


x = torch.randn(1, 512, 14, 14)
# The library itself, its threads and the compiled kernels are no part of the model.
nhwc.optimize(nn.Sequential(*block(), *block()).eval(), x)
reset_peak()
before = peak_bytes()
with torch.no_grad():
    own = peak_of(lambda net, x: net(x))
# A call needs all weights, and little else.
assert own < 1.2 * sum(weight.nbytes for weight in model().parameters())
for name in sys.argv[1:]:
    print(peak_of(getattr(nhwc, name)) / own)
"""


@pytest.mark.skipif(peak_bytes() is None, reason="the system does not tell")
def test_it_stays_under_three_times_its_own_peak(tmp_path, monkeypatch):
    # Kernels are measured anew: that takes more than to remember them.
    monkeypatch.setenv("NHWC_CACHE", str(tmp_path))
    command = [sys.executable, "-c", CODE, "audit", "optimize"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    audit, optimize = map(float, done.stdout.split())
    assert audit < 3
    assert optimize < 3
