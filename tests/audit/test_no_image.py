"""Models that run but work on no image: an audit has nothing to judge, and says so."""

import pytest
import torch
from torch import nn

import nhwc
from nhwc.render.audit_text import audit_text


class Counts(nn.Module):
    def forward(self, count):
        return torch.ones(count)


@pytest.mark.parametrize(
    ("model", "given"),
    [
        (nn.ReLU(), torch.empty(0, 4)),
        (nn.ReLU(), torch.tensor([1.0, float("nan")])),
        (nn.Embedding(5, 3), torch.tensor([1, 2])),
        (Counts(), 3),
    ],
    ids=["of nothing", "of NaN", "of numbers", "of no tensor"],
)
def test_there_is_nothing_to_judge(model, given):
    report = nhwc.audit(model, given)
    assert report.judged == 0
    assert "nothing to judge" in audit_text(report)
