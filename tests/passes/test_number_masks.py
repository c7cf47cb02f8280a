"""Bool masks of attention become numbers, once for each mask; others stay as they are."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nhwc
from nhwc.graph.tracing.captured import capture
from nhwc.graph.tracing.sized import capture_sized
from nhwc.passes.number_masks import number_masks

from ..fusing import rewrite

ATTEND = F.scaled_dot_product_attention
SEEN = torch.rand(2, 1, 1, 5, generator=torch.Generator().manual_seed(0)) < 0.6
SEEN[1] = False  # The second sample sees nothing.


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in "abc")

    def forward(self, x, mask):
        for layer in self.layers:
            heads = layer(x).unflatten(-1, (2, 8)).transpose(1, 2)
            x = x + ATTEND(heads, heads, heads, attn_mask=mask).transpose(1, 2).flatten(2)
        return x


class Kept(Layers):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", SEEN.clone())

    def forward(self, x):
        return super().forward(x, self.seen)


def tokens():
    return torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("model", [Layers(), Kept()], ids=["given", "kept"])
@torch.no_grad()
def test_layers_share_the_numbers(model):
    model, inputs = model.eval(), (tokens(), SEEN)[: 1 + (type(model) is Layers)]
    graph, _ = capture_sized(capture(copy.deepcopy(model)).module, inputs)
    report = number_masks(graph)
    assert [site.applied for site in report.sites] == [True] * 3
    assert sum(node.target is torch.where for node in graph.graph.nodes) == 1
    torch.testing.assert_close(graph(*inputs), model(*inputs))
    assert not number_masks(graph).sites


class Overwritten(Layers):
    def forward(self, x, mask):
        mask = mask.logical_and(SEEN)
        x = super().forward(x, mask)
        mask.view(-1).logical_not_()
        return super().forward(x, mask)


@torch.no_grad()
def test_a_mask_that_is_written_has_other_numbers():
    model, inputs = Overwritten().eval(), (tokens(), SEEN)
    graph, _ = capture_sized(capture(copy.deepcopy(model)).module, inputs)
    assert len(number_masks(graph).applied) == 6
    torch.testing.assert_close(graph(*inputs), model(*inputs), equal_nan=True)


@torch.no_grad()
def test_numbers_and_what_is_not_known_stay():
    model, x = Layers().eval(), tokens()
    added = torch.randn(5, 5)
    graph, _ = capture_sized(capture(copy.deepcopy(model)).module, (x, added))
    assert not number_masks(graph).sites
    changed, (report,) = rewrite(model, number_masks)
    assert not report.sites
    torch.testing.assert_close(changed(x, SEEN), model(x, SEEN))


class OfTwoTypes(Layers):
    def forward(self, x, mask):
        x = super().forward(x.double(), mask)
        return ATTEND(*[x.float().unsqueeze(1)] * 3, attn_mask=mask)


@torch.no_grad()
def test_queries_of_another_type_have_other_numbers():
    model, inputs = OfTwoTypes().double().eval(), (tokens(), SEEN)
    graph, _ = capture_sized(capture(copy.deepcopy(model)).module, inputs)
    assert len(number_masks(graph).applied) == 4
    torch.testing.assert_close(graph(*inputs), model(*inputs), equal_nan=True)


class Sized(Layers):
    """It branches on sizes, as models of transformers do."""

    def forward(self, x, mask):
        return super().forward(x * 2 if x.shape[1] > 3 else x, mask)


@torch.no_grad()
def test_in_a_plan(tmp_path):
    model, x = Sized().eval(), tokens()
    fast = nhwc.optimize(model, x, SEEN)
    assert "number_masks 3" in str(fast.report)
    nhwc.save(fast, tmp_path / "masked.nhwc")
    for answers in (fast, nhwc.load(tmp_path / "masked.nhwc")):
        for mask in (SEEN, ~SEEN):
            torch.testing.assert_close(answers(x, mask), model(x, mask))
