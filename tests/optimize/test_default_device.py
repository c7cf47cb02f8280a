"""A default device that is not the model's: what torch makes by default lies where it is not."""

import pytest
import torch
from torch import nn

import nhwc
from nhwc.zoo import randomize_batchnorm_

from ..optimizing import close, force, residual


@pytest.fixture
def elsewhere():
    """What `torch.set_default_device("cuda")` does, where there may be no GPU."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


@torch.no_grad()
def test_a_model_in_memory_is_optimized_there(elsewhere, tmp_path):
    model = randomize_batchnorm_(residual().to_empty(device="cpu").eval())
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.2, 0.2, generator=torch.Generator("cpu"))
    x, other = (torch.randn(2, 3, side, 18, device="cpu") for side in (20, 12))
    fast = force(model, x, remeasure=True)
    close(fast(x), model(x))
    close(fast(other), model(other))
    next(fast.parameters()).mul_(2)
    next(model.parameters()).mul_(2)
    close(fast(x), model(x))
    nhwc.save(fast, tmp_path / "model.nhwc")
    close(nhwc.load(tmp_path / "model.nhwc")(x), model(x))


def test_the_other_verbs(elsewhere):
    model = nn.Sequential(nn.Conv2d(3, 8, 3, device="cpu"), nn.BatchNorm2d(8, device="cpu")).eval()
    x = torch.randn(2, 3, 12, 12, device="cpu")
    assert nhwc.audit(model, x).calls
    with torch.no_grad():
        close(nhwc.fuse(model)(x), model(x))
    assert nhwc.ops("nn.functional.relu", timed=False).operators
