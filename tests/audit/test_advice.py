"""What an audit advises, done by hand: the finding is gone and the values are the same."""

import pytest
import torch
import torch.nn.functional as F

from nhwc import audit

from ..nets import Between


def pooled(x):
    return x.mean((2, 3), keepdim=True).expand(x.shape)


def columns(x):
    return torch.linspace(-1, 1, x.shape[3]).expand(x.shape)


def tokens(x):
    return F.layer_norm(x.flatten(2).transpose(1, 2), (8,)).transpose(1, 2)


def in_last(x):
    return x.contiguous(memory_format=torch.channels_last)


MENDED = {
    "a pixel that is expanded": (
        lambda x: torch.cat([x, pooled(x)], 1)[:, :8],
        lambda x: torch.cat([x, in_last(pooled(x))], 1)[:, :8],
        "input 2 of 2 is expanded: its strides say no format. Call .contiguous(memory_format=",
    ),
    "coordinates that are expanded": (
        lambda x: torch.cat([columns(x), x], 1)[:, :8],
        lambda x: torch.cat([in_last(columns(x)), x], 1)[:, :8],
        "input 1 of 2 is expanded: its strides say no format. Call .contiguous(memory_format=",
    ),
    "tokens laid out for a view": (
        lambda x: tokens(x).contiguous().view(x.shape),
        lambda x: tokens(x).reshape(x.shape),
        "Drop it, and write .reshape for a .view behind it.",
    ),
    "a shuffle by reshape": (
        lambda x: x.reshape(2, 2, 4, 12, 12).transpose(1, 2).reshape(x.shape),
        torch.nn.ChannelShuffle(2),
        "A channel shuffle can be nn.ChannelShuffle",
    ),
    "a mask": (
        lambda x: x.masked_fill(torch.ones(2, 1, 12, 12, dtype=torch.bool), 3),
        lambda x: x.clone().masked_fill_(torch.ones(2, 1, 12, 12, dtype=torch.bool), 3),
        "x.clone().masked_fill_(mask, value) computes the same",
    ),
}


@pytest.mark.parametrize("case", MENDED)
def test_what_is_done_as_advised_mends_it(case):
    before, after, advice = MENDED[case]
    x = torch.rand(2, 3, 12, 12)
    (finding,) = audit(Between(before).eval(), x).findings
    assert advice in finding.remedy
    assert audit(Between(after).eval(), x).clean
    image = torch.rand(2, 8, 12, 12)
    assert torch.equal(before(image), after(image))


@pytest.mark.parametrize(
    "part",
    [
        lambda groups: groups[:, :1].expand(groups.shape),
        lambda groups: groups[:, :, :2],
    ],
)
def test_groups_that_are_no_shuffle_and_no_frames_are_called_neither(part):
    def regrouped(x):
        return part(x.reshape(2, 2, 4, 12, 12)).reshape(2, -1, 12, 12)

    channels = regrouped(torch.rand(2, 8, 12, 12)).shape[1]
    report = audit(Between(regrouped, out=channels).eval(), torch.rand(2, 3, 12, 12))
    (finding,) = (f for f in report.findings if f.operator.endswith("reshape"))
    assert "cannot be a view of channels-last memory" in finding.remedy
