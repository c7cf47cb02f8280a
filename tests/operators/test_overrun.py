"""Gradients that oneDNN writes past their memory in channels last: nobody here computes them."""

import pytest
import torch
from torch import nn

import nhwc
from nhwc.errors import InputError, ModelFailed
from nhwc.operators.overrun import overruns
from nhwc.training import Recipe, synthetic

ONE = {"stride": (2, 2), "padding": (0, 0), "groups": 1}


@pytest.mark.parametrize(
    ("weight", "settings", "may"),
    [
        ((48, 3, 1, 1), ONE, True),
        ((48, 15, 1, 1), ONE | {"stride": (1, 2)}, True),
        ((48, 1, 1, 1), ONE, False),
        ((48, 16, 1, 1), ONE, False),
        ((48, 3, 1, 1), ONE | {"stride": (1, 1)}, False),
        ((48, 3, 1, 3), ONE, False),
        ((48, 3, 1, 1), ONE | {"padding": (1, 1)}, False),
        ((48, 3, 1, 1), ONE | {"groups": 2}, False),
        ((48, 3, 1, 1, 1), ONE | {"stride": (2, 2, 2), "padding": (0, 0, 0)}, False),
    ],
)
def test_which_gradients_may_be_written_past_their_memory(weight, settings, may):
    assert overruns(weight, **settings) is may


def narrowing():
    return nn.Sequential(nn.Conv2d(3, 8, 1, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten())


def test_an_audit_of_a_backward_pass_refuses_it():
    model, x = narrowing(), torch.rand(2, 3, 96, 96)
    with pytest.raises(ModelFailed, match=r"weight gradient .* weights \(8, 3, 1, 1\) and stride"):
        nhwc.audit(model, x, backward=True)
    assert nhwc.audit(model, x, backward=True, convert=False).calls
    assert nhwc.audit(model, x).calls
    model.requires_grad_(False)
    assert nhwc.audit(model, x.requires_grad_(), backward=True).calls


def test_training_refuses_it_whatever_the_stride_is_said_by():
    data = synthetic(batch_size=4, shape=(16, 16, 3), classes=8, batches=1)
    model = narrowing()
    model[0].stride = 2
    with pytest.raises(InputError, match=r"with stride \(2, 2\)"):
        nhwc.train(model, data, Recipe(channels_last=True))


def test_training_refuses_it():
    data = synthetic(batch_size=4, shape=(16, 16, 3), classes=8, batches=1)
    with pytest.raises(InputError, match="weight gradient of 0 past its memory"):
        nhwc.train(narrowing(), data, Recipe(channels_last=True))
    assert nhwc.train(narrowing(), data, Recipe()).points


def test_a_lazy_model_is_told_to_be_one():
    data = synthetic(batch_size=4, shape=(16, 16, 3), classes=8, batches=1)
    lazy = nn.Sequential(nn.LazyConv2d(8, 1, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    with pytest.raises(InputError, match="the module is lazy"):
        nhwc.train(lazy, data, Recipe(channels_last=True))
