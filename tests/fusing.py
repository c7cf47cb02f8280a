"""What the tests of `fuse` and its passes share."""

import copy
import warnings

import torch
from torch import nn

from nhwc import fuse
from nhwc.graph import capture, graphs
from nhwc.passes import run_passes
from nhwc.passes._folding_sites import is_batch_norm
from nhwc.zoo import randomize_batchnorm_


def random_(model, seed=0):
    """The model in eval mode with batch norms that do something."""
    return randomize_batchnorm_(model, seed).eval()


def outputs(model, inputs):
    with torch.no_grad():
        return model(*copy.deepcopy(inputs))


def rewrite(model, *passes):
    """A captured copy of the model after some passes, and their reports."""
    captured = capture(model)
    reports = run_passes(captured.module, passes)
    return captured.module, reports


def assert_same(model, other, *inputs):
    torch.testing.assert_close(outputs(other, inputs), outputs(model, inputs), rtol=1e-4, atol=1e-5)


def fuse_checked(model, *inputs):
    """`fuse(model)`, having checked that it computes the same and left the model alone."""
    before = copy.deepcopy(model.state_dict())
    modes = [module.training for module in model.modules()]
    fused = fuse(model)
    assert [module.training for module in model.modules()] == modes
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    fused.graph.lint()
    if not model.training:
        assert_same(model, fused, *inputs)
    return fused


def norms(model):
    """The batch norms left anywhere in the model, standing in a graph or not."""
    return [name for name, module in model.named_modules() if is_batch_norm(module)]


def has_no_norm(fused):
    return not norms(fused) and all("batch_norm" not in gm.code for _, gm in graphs(fused))


def script(model):
    with warnings.catch_warnings():
        # GraphModule's own constructor makes TorchScript warn.
        warnings.filterwarnings("ignore", message="The TorchScript type system")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        return torch.jit.script(model)


class Block(nn.Module):
    """A module with named parts and a forward given as a function of (self, x)."""

    def __init__(self, forward, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self.run = forward

    def forward(self, x):
        return self.run(self, x)
