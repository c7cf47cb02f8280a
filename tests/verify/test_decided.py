"""Models that pick by values, held against each other with the picks of the original."""

import pytest
import torch
from torch import nn

import nhwc
from nhwc.verify import observe, verify
from nhwc.verify.decided import Picking, verify_decided

from ..optimizing import force


class Picks(nn.Module):
    """As detectors do: a few places by their scores, which nearly tie, and what lies there."""

    def __init__(self, pick, spread=1e-7):
        super().__init__()
        torch.manual_seed(0)
        self.scores, self.values = nn.Linear(8, 1), nn.Linear(8, 4)
        self.pick, self.spread = pick, spread

    def forward(self, x):
        scores = self.scores(x).squeeze(-1) * self.spread + 1
        return self.pick(scores, self.values(x))


def _best(scores, values):
    best, places = scores.topk(20, dim=1)
    return best * 2, values.gather(1, places[..., None].expand(-1, -1, 4)) ** 2


def _sorted(scores, values):
    order = scores.argsort(dim=1, descending=True)
    return values[0][order[0]], scores.sort(dim=1).values


def _single(scores, values):
    return values[0, scores[0].argmax()], scores.max(1).values, scores.median(1).values


PICKS = {"best": _best, "sorted": _sorted, "single": _single}


def rivals(pick):
    """The original, one that computes its scores in another order, and two that are wrong."""
    model = Picks(pick)

    def other(x, scores=0.0, values=0.0):
        weight, bias = model.scores.weight[0], model.scores.bias
        found = torch.stack([x[..., i] * weight[i] for i in reversed(range(8))]).sum(0) + bias
        noise = torch.rand(found.shape, generator=torch.Generator().manual_seed(1)) * 2e-7
        return pick(found * model.spread + 1 + noise + scores * x[..., 0], model.values(x) + values)

    return model, other


@pytest.mark.parametrize("name", PICKS)
@torch.no_grad()
def test_who_picks_in_another_order_among_equals_is_right(name):
    model, other = rivals(PICKS[name])
    truth = observe(model, [(torch.randn(1, 50, 8),), (torch.randn(1, 50, 8),)])
    alone = verify(truth, other)
    assert alone.astray or not alone.passed
    found = verify_decided(truth, model, other)
    assert found.passed, found.worst
    assert found.decided
    assert {check.input for check in found.checks} == {0, 1}


@pytest.mark.parametrize("name", PICKS)
@torch.no_grad()
def test_who_decides_on_other_numbers_or_answers_otherwise_is_wrong(name):
    model, other = rivals(PICKS[name])
    truth = observe(model, [(torch.randn(1, 50, 8),)])
    on_others = verify_decided(truth, model, lambda x: other(x, scores=1e-3))
    assert not on_others.passed
    assert any(check.output.startswith("what ") and not check.passed for check in on_others.checks)
    assert not verify_decided(truth, model, lambda x: other(x, values=1e-3)).passed


@torch.no_grad()
def test_who_decides_where_the_original_does_not_is_wrong():
    model, _ = rivals(_best)
    truth = observe(model, [(torch.randn(1, 50, 8),)])
    found = verify_decided(truth, model, lambda x: [part.sort().values for part in model(x)])
    assert "decides by sort where the original does not" in found.worst.reason


@torch.no_grad()
def test_to_round_is_not_to_pick():
    model, other = rivals(lambda scores, values: (scores * 1e7).round())
    assert verify_decided(observe(model, [(torch.randn(1, 50, 8),)]), model, other) is None


class Coarse(nn.Module):
    """Picks, and returns last digits, too, which are others in float64."""

    def forward(self, x):
        return x.topk(3).values, (x * 1e7).frac()


@torch.no_grad()
def test_a_model_far_from_its_own_float64_run_is_for_others_to_judge():
    model = Coarse()
    assert verify_decided(observe(model, [(torch.randn(1, 50),)]), model, model) is None


class Fewer(nn.Module):
    """Decides less often in float64."""

    def forward(self, x):
        if x.dtype is torch.float32:
            x.topk(2)
        return x.topk(3).values


@torch.no_grad()
def test_a_model_that_decides_otherwise_in_float64_is_judged_without():
    model = Fewer()
    found = verify_decided(observe(model, [(torch.randn(1, 50),)]), model, model)
    assert found.passed
    assert not found.in_float64


@torch.no_grad()
def test_a_model_without_decisions_is_for_others_to_judge():
    layer = nn.Linear(2, 2)
    assert verify_decided(observe(layer, [(torch.ones(1, 2),)]), layer, layer) is None


class Detector(nn.Module):
    """Two stages, as RT-DETR has them: queries are the places with the best scores."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.scores, self.boxes = nn.Linear(16, 5), nn.Linear(16, 4)
        nn.init.normal_(self.scores.weight, std=1e-6)

    def forward(self, x):
        tokens = self.body(x).flatten(2).transpose(1, 2)
        best = self.scores(tokens).max(-1).values.topk(30, dim=1).indices
        queries = tokens.gather(1, best[..., None].expand(-1, -1, 16))
        return self.boxes(queries).sigmoid(), self.scores(queries)


@torch.no_grad()
def test_a_detector_of_near_ties_is_planned_and_saved(tmp_path):
    model, x = Detector().eval(), torch.randn(1, 3, 32, 32)
    fast = force(model, x)
    assert fast.recipes
    assert fast.report.verification.decided
    assert "what the original picked" in str(fast.report)
    nhwc.save(fast, tmp_path / "detector.nhwc")
    assert nhwc.load(tmp_path / "detector.nhwc").recipes


@torch.no_grad()
def test_what_is_planned_is_judged_by_its_plan_wherever_it_stands():
    net, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval(), torch.randn(1, 3, 16, 16)
    fast = force(net, x)
    [key] = fast._programs
    fast._programs[key] = lambda _: "the program's"
    around = nn.Sequential(fast)
    with Picking():
        assert around(x) == "the program's"


class Ties(nn.Module):
    """Picks, and returns as many numbers as are alike after rounding: none are in float64."""

    def forward(self, x, scale=1.0):
        return x.topk(2).values * scale, [*x[(x + 1e-9) == x].unbind()]


def test_a_model_that_returns_another_number_of_tensors_in_float64_is_judged_without():
    model, x = Ties(), torch.rand(8)
    truth = observe(model, [(x,)])
    assert not verify_decided(truth, model, lambda x: model(x, scale=1.001)).passed
    assert verify_decided(truth, model, model).passed
