"""One operator, judged: broken ones are told apart; copies inside, values, samples."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import nhwc
from nhwc._ops import Outcome, check_operator
from nhwc._ops.inside import draws_random_numbers, first_loser, layout_copies
from nhwc._ops.samples import SHAPES, Sample, can_tell, lift
from nhwc._ops.values import difference_of

LAST = torch.channels_last

# Operators of one's own, registered with torch, each broken in another way.


@torch.library.custom_op("nhwc_test::loses", mutates_args=())
def loses(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(x.shape).copy_(x) * 2


@torch.library.custom_op("nhwc_test::copies", mutates_args=())
def copies(x: torch.Tensor) -> torch.Tensor:
    return (x.contiguous() * 2).contiguous(memory_format=LAST)


@torch.library.custom_op("nhwc_test::misreads", mutates_args=())
def misreads(x: torch.Tensor) -> torch.Tensor:
    """Reads memory in order whatever the strides say: right for NCHW alone."""
    flat = x.as_strided((x.numel(),), (1,))
    return torch.empty_like(x).copy_(flat.reshape(x.shape) * 2)


@torch.library.custom_op("nhwc_test::refuses", mutates_args=())
def refuses(x: torch.Tensor) -> torch.Tensor:
    if not x.is_contiguous():
        raise RuntimeError("NCHW only")
    return x * 2


@torch.library.custom_op("nhwc_test::keeps", mutates_args=())
def keeps(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.mark.parametrize(
    ("operator", "outcome", "reason"),
    [
        (loses, Outcome.LOSES, "returns contiguous 2x6x5x7"),
        (copies, Outcome.CONVERTS, "inside, .*aten::contiguous.* copies 2x6x5x7"),
        (misreads, Outcome.WRONG, "values differ"),
        (refuses, Outcome.ERROR, "NCHW only"),
        (keeps, Outcome.KEEPS, "^$"),
    ],
)
def test_broken_operators_are_told_apart(operator, outcome, reason):
    found = check_operator(operator, torch.rand(2, 6, 5, 7))
    assert found.outcome() is outcome
    assert re.search(reason, found.reason)
    assert found.outcome("forward", 5) is Outcome.UNCHECKED


def test_the_image_need_not_come_first():
    def scaled(vector, image):
        return (image * vector[:, None, None]).contiguous()

    found = check_operator(scaled, torch.rand(6), torch.rand(2, 6, 5, 7))
    assert found.outcome() is Outcome.LOSES


def test_a_broken_gradient_is_found():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return (grad * 2).contiguous()

    found = check_operator(Doubled.apply, torch.rand(2, 6, 5, 7), name="doubled")
    assert found.outcome("forward") is Outcome.KEEPS
    assert found.outcome("backward") is Outcome.LOSES


def test_a_check_leaves_everything_as_it_was():
    x = torch.rand(2, 6, 5, 7, requires_grad=True)
    before, strides = torch.get_rng_state(), x.stride()
    check_operator(torch.nn.functional.dropout, x)
    assert torch.equal(torch.get_rng_state(), before)
    assert (x.stride(), x.grad) == (strides, None)


def test_an_operator_is_timed_on_request():
    found = check_operator(torch.relu, torch.rand(2, 6, 5, 7), timed=True)
    (speed,) = found.speeds
    assert (speed.shape, speed.dtype) == ("2x6x5x7", "float32")
    assert speed.nchw_s > 0
    assert speed.interval[0] <= speed.ratio <= speed.interval[1]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((torch.rand(2, 1, 5, 7),), "no 4-D or 5-D input there has one format"),
        ((torch.rand(3),), "no 4-D or 5-D input"),
        ((torch.rand(2, 3, 4, 4), torch.rand(9)), "fails in NCHW already: RuntimeError: The size"),
    ],
)
def test_an_operator_that_cannot_be_checked(inputs, message):
    with pytest.raises(nhwc.InputError, match=message):
        check_operator(torch.add, *inputs)


def test_a_class_of_modules_is_no_operator():
    with pytest.raises(nhwc.InputError, match="ReLU is a class of modules"):
        check_operator(torch.nn.ReLU, torch.rand(2, 6, 5, 7))


def test_a_copy_that_nchw_needs_as_well_is_none():
    found = check_operator(lambda x: x.permute(0, 1, 3, 2).clone(), torch.rand(2, 6, 5, 7))
    assert found.row("forward", 4).example.count("inside,") <= 1
    shuffled = check_operator(torch.nn.functional.pixel_shuffle, torch.rand(2, 8, 5, 7), 2)
    assert shuffled.outcome() is Outcome.KEEPS


# What goes on inside a call.


def test_nested_copies_are_seen_with_their_path():
    x = torch.rand(2, 6, 5, 7).to(memory_format=LAST)
    (copy,) = layout_copies(lambda: torch.nn.functional.instance_norm(x))
    assert str(copy) == "aten::instance_norm > aten::contiguous > aten::clone copies 2x6x5x7"
    assert layout_copies(lambda: torch.relu(x)) == ()
    assert layout_copies(lambda: x.clone()) == ()
    assert layout_copies(lambda: x.contiguous(), at_least=x.numel() + 1) == ()


def test_the_first_operator_that_lets_go():
    x = torch.rand(2, 6, 5, 7).to(memory_format=LAST)
    assert first_loser(lambda: torch.tril(torch.relu(x)) + 1) == "aten::tril"
    assert first_loser(lambda: torch.relu(x)) == ""
    assert draws_random_numbers(lambda: torch.nn.functional.dropout(x))


# Values.


@pytest.mark.parametrize(
    ("expected", "got", "words"),
    [
        (torch.ones(3), torch.ones(3) + 1e-6, ""),
        (torch.ones(3), torch.tensor([1.0, 1.0, 1.5]), "1 of 3 values differ, by up to 0.5"),
        (torch.tensor([torch.nan, torch.inf]), torch.tensor([torch.nan, torch.inf]), ""),
        (torch.tensor([1.0]), torch.tensor([torch.nan]), "1 of 1 values differ, by up to 1"),
        (torch.tensor([torch.inf]), torch.tensor([-torch.inf]), "1 of 1 values differ"),
        (torch.ones(3), torch.ones(2), r"shape (2,) instead of (3,)"),
        (torch.ones(2), torch.ones(2).double(), "torch.float64 instead of torch.float32"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "1 of 2 values differ"),
        (torch.ones(2).half(), torch.ones(2).half() * 1.004, ""),
        (torch.full((2,), 1e-3).bfloat16(), torch.full((2,), 2e-3).bfloat16(), ""),
        (torch.ones(2).bfloat16(), torch.ones(2).bfloat16() * 1.1, "2 of 2 values differ"),
    ],
)
def test_difference_of_values(expected, got, words):
    found = difference_of([expected], [got], ties=False)
    assert found.startswith(words) if words else found == ""


def test_ties_excuse_indices_alone():
    index, other = torch.tensor([0, 1]), torch.tensor([1, 0])
    assert difference_of([index], [other], ties=True) == ""
    assert difference_of([index], [other], ties=False) != ""
    assert difference_of([torch.ones(1)], [torch.zeros(1)], ties=True) != ""


# Samples.


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.sampled_from([4, 5]),
    st.floats(-5, 5),
    st.booleans(),
)
def test_lifting_keeps_the_domain_and_the_dtype(shape, dims, low, spread):
    x = low + torch.rand(shape)
    lifted = lift(Sample(torch.relu, (x, x.clone(), 3), {}), SHAPES[dims], spread=spread)
    first, second = lifted.tensors
    assert first.ndim == second.ndim == dims
    assert first.dtype is x.dtype
    assert first.min() >= x.min() - 1e-5
    assert first.max() <= x.max() + 1e-5
    assert lifted.args[2] == 3
    if spread:
        assert can_tell(first)


def test_what_cannot_be_lifted():
    assert lift(Sample(torch.relu, (torch.rand(2, 3, 4, 5),), {}), SHAPES[4], spread=True) is None
    assert lift(Sample(torch.relu, (torch.rand(0),), {}), SHAPES[4], spread=True) is None
    assert lift(Sample(torch.relu, (3,), {}), SHAPES[4], spread=True) is None
