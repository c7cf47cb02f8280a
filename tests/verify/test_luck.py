"""A model that decides by values may answer otherwise where a rounding decides."""

import pytest
import torch
from torch import nn

from nhwc.verify import observe, verify
from nhwc.verify.luck import by_jumps


class Masked(nn.Module):
    """Keeps rows whose largest number is above a bound, and turns the sign of the rest."""

    def __init__(self, bound):
        super().__init__()
        self.bound = bound

    def forward(self, x):
        return torch.where(x.amax(-1, keepdim=True) > self.bound, x, -x)


@pytest.fixture
def tie():
    return torch.rand(4, 50)


@pytest.fixture
def masked(tie):
    return Masked(tie.amax(-1)[0].item())


def judged(model, after, *inputs):
    truth = observe(model, [(x,) for x in inputs])
    found = verify(truth, after)
    assert not found.passed
    return by_jumps(found, truth, model)


def test_what_decides_otherwise_by_a_rounding_is_right(masked, tie):
    rounds_otherwise = Masked(masked.bound * (1 - 1e-6))
    assert judged(masked, rounds_otherwise, tie, torch.rand(4, 50)).passed


def test_it_must_be_right_on_another_input(masked, tie):
    rounds_otherwise = Masked(masked.bound * (1 - 1e-6))
    assert not judged(masked, rounds_otherwise, tie).passed
    assert not judged(masked, lambda x: masked(x) * 1.01, tie, torch.rand(4, 50)).passed


def test_it_may_go_no_further_than_the_original_does_nearby(masked, tie):
    far = torch.rand(4, 50)
    wrong = Masked(far.max().item())
    assert not judged(masked, wrong, torch.rand(4, 50) + 1, far).passed


def test_numbers_of_8_bits_have_no_neighbours(tie):
    whole = (tie * 0.5).to(torch.float8_e5m2)
    model = lambda bound: nn.Sequential(Wide(), Masked(bound))
    assert not judged(model(0.4), model(0.6), whole, torch.zeros(4, 50).to(whole.dtype)).passed


class Wide(nn.Module):
    def forward(self, x):
        return x.float()


class Excluded(Masked):
    """Has no number, not even a small one, for what does not lie above the bound."""

    def forward(self, x):
        return x.masked_fill(x.amax(-1, keepdim=True) <= self.bound, -torch.inf)


def test_an_infinite_jump_excuses_nothing(tie):
    bound = tie.amax(-1)[0].item()
    model, rounds_otherwise = Excluded(bound), Excluded(bound * (1 - 1e-6))
    assert not judged(model, rounds_otherwise, tie, torch.rand(4, 50)).passed


def test_what_compares_nothing_has_no_such_excuse(tie):
    model, other = nn.ReLU(), torch.rand(4, 50)
    assert not judged(model, lambda x: x * 1.01 if x is not other else x, tie, other).passed
