"""Every step that is no dense convolution, against float64, on every instruction set here."""

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nhwc import InputError
from nhwc.kernels.layers import elementwise, linear, pooling, sample
from nhwc.kernels.layers.activations import Activation
from nhwc.kernels.tape.steps import Step, View, bits, view_of

from .. import block_cases, step_cases

MAKERS = (*step_cases.MAKERS, *block_cases.MAKERS)
many = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker.__name__)
@many
@given(choose=st.randoms(use_true_random=False), threads=st.integers(1, 3))
def test_against_float64(maker, isa, choose, threads):
    case = maker(choose)
    case.check(step_cases.run(case, choose, threads))


def special(step, *values):
    """The results of a step for one pixel of these values."""
    x = torch.tensor(values)[None, :, None, None].to(memory_format=torch.channels_last)
    y = torch.empty_like(x)
    from nhwc.kernels.tape.invoke import Invocation

    views = (View(name, x.shape, x.shape[1]) for name in ("x", "y"))
    Invocation.of([step(*views)], 1)({"x": x, "y": y})
    return y.flatten()


@pytest.mark.parametrize("activation", list(Activation), ids=lambda a: a.name)
def test_activations_of_the_special_values(isa, activation):
    infinity, nan = float("inf"), float("nan")
    values = [nan, infinity, -infinity, 0.0, -0.0, 90.0, -90.0, 3e38, -3e38, 1e-40, -1e-40]
    y = special(lambda x, y: elementwise.activation_step(x, y, activation, slope=0.1), *values)
    expected = step_cases.ACTIVATIONS[activation](torch.tensor(values).double())
    if activation is Activation.GELU:
        # torch's float64 gelu and float32 gelu differ at infinity; the limit is meant.
        expected[1] = infinity
    if activation is Activation.SQUARED_RELU:
        expected = expected.float().double()
    torch.testing.assert_close(y.double(), expected, rtol=4e-7, atol=1e-37, equal_nan=True)


@pytest.mark.parametrize("activation", list(Activation), ids=lambda a: a.name)
def test_activations_keep_their_digits(isa, activation):
    values = torch.cat([torch.linspace(-20, 20, 3001), torch.linspace(-0.01, 0.01, 501)])
    y = special(
        lambda x, y: elementwise.activation_step(x, y, activation, slope=0.1), *values.tolist()
    )
    expected = step_cases.ACTIVATIONS[activation](values.double())
    # Torch's GELU, too, is a rounded number near one or minus one, times the input.
    scale = values.abs().clamp(1) if activation.name.startswith("GELU") else torch.ones(())
    error = (y - expected).abs() - 1e-6 * expected.abs()
    assert (error <= 3e-7 * scale).all()


@pytest.mark.parametrize("column", [-3.0, -1.5, 1.5, 3.0])
@pytest.mark.parametrize("turned", [False, True])
def test_places_outside_of_an_image_touch_no_number_of_it(isa, column, turned):
    x = torch.full((1, 3, 4, 5), torch.inf)
    grid = torch.tensor([0.1, column] if turned else [column, 0.1]).view(1, 2, 1, 1)
    case = step_cases.StepCase([x, grid], sampling, torch.zeros(1, 3, 1, 1))
    case.check(step_cases.run(case, random.Random(0), 1))


def sampling(x, grid, y):
    return sample.sample_step(x, grid, y, border=False, corners=False)


def test_views_of_tensors():
    image = torch.empty(2, 8, 5, 4).to(memory_format=torch.channels_last)
    assert view_of(image).pixel == 8
    assert view_of(image[:, 2:5]).pixel == 8
    assert view_of(image[:, :, 1:]) is None
    assert view_of(image.contiguous()) is None
    assert view_of(torch.empty(3, 7)).shape == (3, 7, 1, 1)
    assert view_of(torch.empty(3, 7)[:, ::2]) is None
    assert view_of(torch.empty(1, 1, 4, 4)).pixel == 1


def test_a_step_names_its_mistakes():
    kernel = elementwise.SUM
    with pytest.raises(InputError, match="kernel sum has 10 fields and got 1 arguments"):
        Step(kernel, (1,))
    view = View("x", (1, 4, 3, 3), 8)
    with pytest.raises(InputError, match="without gaps"):
        linear.linear_step(view, view, torch.zeros(5, 36))


def test_steps_disturb_each_other_only_where_one_writes():
    def view(name, begin, end):
        return View(name, (1, end - begin, 2, 2), 16, begin)

    first = pooling.global_mean_step(view("x", 0, 16), view("y", 0, 8))
    assert not first.disturbs(pooling.global_mean_step(view("x", 0, 16), view("y", 8, 16)))
    assert first.disturbs(pooling.global_mean_step(view("x", 0, 16), view("y", 7, 16)))
    assert first.disturbs(pooling.global_mean_step(view("y", 0, 8), view("z", 0, 8)))


def test_bits_of_a_float():
    assert bits(-2.0) == -(2**30)
