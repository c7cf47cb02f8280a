"""Modes that see each operator, and what they import."""

import subprocess
import sys

import pytest
import torch

from nhwc.models.modes import OperatorMode

MODEL = "model, x = torch.nn.Conv2d(3, 8, 3), torch.rand(1, 3, 8, 8)"
WAYS = {
    "audit": "nhwc.audit(model, x)",
    "strict": "with nhwc.strict(model): model(x)",
    "copies": "from nhwc._ops.inside import layout_copies; layout_copies(lambda: model(x))",
}


@pytest.mark.parametrize("way", WAYS)
def test_who_watches_does_not_import_dynamo(way):
    code = f"import sys, torch, nhwc\n{MODEL}\n{WAYS[way]}\nprint('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n")


class Doubling(OperatorMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return torch.ops.aten.mul.Tensor(func(*args, **(kwargs or {})), 2)


def test_a_mode_is_not_compiled():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    with Doubling():
        made = torch.compile(torch.exp, backend=backend)(torch.zeros(3))
    assert (made.tolist(), graphs) == ([2, 2, 2], [])
