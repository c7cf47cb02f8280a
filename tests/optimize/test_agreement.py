"""`audit` and `strict` find lost in a model what the operator table calls losing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import nhwc
from nhwc._ops import Outcome
from nhwc._ops.entries import inventory
from nhwc._ops.probe import probe
from nhwc._ops.samples import Sample, arrange, channels_last

NAMES = (
    "tril",
    "triu",
    "cumsum",
    "gather",
    "masked_fill",
    "softmax",
    "index_select",
    "repeat",
    "nn.functional.grid_sample",
    "nn.functional.instance_norm",
    "nn.functional.fractional_max_pool2d",
    "nn.functional.layer_norm",
    "nn.functional.log_softmax",
    "nn.functional.pad (circular)",
    "abs",
    "add",
    "cat",
    "clone",
    "flip",
    "nn.functional.avg_pool2d",
    "nn.functional.batch_norm",
    "nn.functional.conv2d",
    "nn.functional.group_norm",
    "nn.functional.interpolate (bilinear)",
    "nn.functional.max_pool2d",
    "nn.functional.pixel_shuffle",
    "nn.functional.relu",
)


class One(nn.Module):
    """A model of one operator: its first tensor is the input, the rest it holds."""

    def __init__(self, sample: Sample) -> None:
        super().__init__()
        self.call = sample.call
        self.args, self.kwargs, _ = arrange(sample, channels_last, grad=False)

    def forward(self, x: Tensor) -> Tensor:
        first, *rest = self.args
        given = x if isinstance(first, Tensor) else type(first)([x, *first[1:]])
        return self.call(given, *rest, **self.kwargs)

    @property
    def input(self) -> Tensor:
        first = self.args[0]
        return first if isinstance(first, Tensor) else first[0]


@pytest.fixture(scope="module")
def models():
    entries, _ = inventory()
    found = {}
    for name in NAMES:
        for sample in entries[name].samples("cpu", torch.float32):
            case = next(iter(probe(name, sample)), None)
            if sample.dims == 4 and case and case.outcome in (Outcome.LOSES, Outcome.KEEPS):
                found.setdefault((name, case.outcome), One(sample))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_audit_and_table_agree(models, name):
    outcomes = [outcome for title, outcome in models if title == name]
    assert outcomes
    for outcome in outcomes:
        model = models[name, outcome]
        lost = nhwc.audit(model, model.input).lost
        assert bool(lost) == (outcome is Outcome.LOSES), f"{name} {outcome}: {lost}"


@pytest.mark.parametrize("name", NAMES)
def test_strict_and_table_agree(models, name):
    for (title, outcome), model in models.items():
        if title != name:
            continue
        with nhwc.strict(model):
            if outcome is Outcome.LOSES:
                with pytest.raises(nhwc.FormatLost):
                    model(model.input)
            else:
                model(model.input)
