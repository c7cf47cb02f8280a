"""A training step: what it tells of the gradients, whatever the loss was scaled by."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from nhwc._bench.step import StepCall


def step():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Dropout(0.5), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    return StepCall(model, model, (torch.randn(4, 3, 8, 8),))


@pytest.mark.parametrize("scale", [1024.0, 2.0**127])
def test_a_scaled_loss_has_the_same_gradients(scale):
    """At 2**127 some overflow: such a step is no answer, and the next has a smaller scale."""
    expected, scaled = step().check(), step()
    scaled.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    torch.testing.assert_close(scaled.check(), expected)


@dataclass
class Output:
    scores: torch.Tensor
    others: dict


class Wraps(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = step().model

    def forward(self, x):
        return Output(self.model(x), {"none": None, "twice": [self.model(x)]})


def test_what_lies_in_a_dataclass_has_a_loss_too():
    inner, whole = step(), Wraps()
    inner.model.load_state_dict(whole.model.state_dict())
    nested = StepCall(whole, whole, inner.inputs).check()
    torch.testing.assert_close(nested, [2 * one for one in inner.check()])
