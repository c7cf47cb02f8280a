"""Optimizers beside channels-last weights: the fused kernels never look at strides."""

import copy

import pytest
import torch
from torch import nn

from nhwc import Format, InputError
from nhwc._train import Recipe
from nhwc._train.checkpoint import portable
from nhwc._train.optimizer import build_optimizer, learning_rate, load_optimizer_

SHAPES = [(8, 4, 3, 3), (6, 8, 1, 1), (5, 1, 3, 3), (4, 2, 2, 3, 3), (7,)]


def run(optimizer, format, *, reload_at=None):
    """Train on given gradients; at one step pass the state through a checkpoint."""
    generator = torch.Generator().manual_seed(0)
    net = nn.Module()
    for number, shape in enumerate(SHAPES):
        value = restrided(torch.randn(shape, generator=generator), format)
        net.register_parameter(f"p{number}", nn.Parameter(value))
    recipe = Recipe(optimizer=optimizer, lr=0.1)
    stepper = build_optimizer(net, recipe)
    for number in range(6):
        for parameter in net.parameters():
            gradient = torch.randn(parameter.shape, generator=generator)
            parameter.grad = restrided(gradient, format)
        stepper.step()
        if number == reload_at:
            state = portable(copy.deepcopy(stepper.state_dict()))
            stepper = build_optimizer(net, recipe)
            load_optimizer_(stepper, state)
    return net, stepper


def restrided(tensor, format):
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.ndim)
    if format is Format.CONTIGUOUS or last is None:
        return tensor
    return tensor.to(memory_format=last)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("reload_at", [None, 2])
def test_channels_last_weights_move_as_contiguous_ones_do(optimizer, reload_at):
    plain, _ = run(optimizer, Format.CONTIGUOUS)
    last, stepper = run(optimizer, Format.CHANNELS_LAST, reload_at=reload_at)
    assert stepper.param_groups[0]["fused"]
    for expected, found in zip(plain.parameters(), last.parameters(), strict=True):
        assert torch.equal(expected, found)
        states = [s for s in stepper.state[found].values() if s.shape == found.shape and s.ndim]
        assert states
        assert all(state.stride() == found.stride() for state in states)


@pytest.mark.parametrize(
    ("optimizer", "name", "value", "words"),
    [
        ("sgd", "momentum_buffer", torch.zeros(0), "momentum_buffer"),
        ("sgd", "momentum_buffer", torch.zeros(1).expand(10**6), "momentum_buffer"),
        ("sgd", "momentum_buffer", torch.zeros(SHAPES[0]).to_sparse(), "momentum_buffer"),
        ("sgd", "momentum_buffer", [1.0], "momentum_buffer"),
        ("sgd", "mean", torch.zeros(SHAPES[0]), "it is no momentum_buffer"),
        ("adamw", "exp_avg_sq", torch.zeros(3), "exp_avg_sq"),
        ("adamw", "step", torch.zeros(2), "step"),
    ],
)
def test_what_does_not_fit_a_weight_never_reaches_the_kernels(optimizer, name, value, words):
    """They would write past its end: torch looks at no shapes."""
    _, stepper = run(optimizer, Format.CONTIGUOUS)
    state = stepper.state_dict()
    state["state"][0][name] = value
    with pytest.raises(ValueError, match=f"does not fit: {words}"):
        load_optimizer_(stepper, state)


@pytest.mark.parametrize("remembered", [3, torch.ones(2)])
def test_what_is_no_state_of_a_weight_is_refused(remembered):
    _, stepper = run("sgd", Format.CONTIGUOUS)
    for state in ({0: remembered}, {99: {}}):
        with pytest.raises(ValueError, match="does not fit"):
            load_optimizer_(stepper, {**stepper.state_dict(), "state": state})


def test_a_weight_may_get_its_first_gradient_in_a_later_step():
    first, later = (nn.Parameter(torch.ones(2)) for _ in range(2))
    stepper = build_optimizer(nn.ParameterList([first, later]), Recipe(lr=1.0, weight_decay=0.0))
    first.grad = torch.ones(2)
    stepper.step()
    load_optimizer_(stepper, portable(copy.deepcopy(stepper.state_dict())))
    later.grad = torch.ones(2)
    stepper.step()
    assert torch.equal(later, torch.zeros(2))
    assert torch.allclose(first, torch.tensor(-1.9))


def test_torch_itself_goes_wrong_there():
    """Loading contiguous momentum beside a channels-last weight: why load_optimizer_ exists."""
    _, stepper = run("sgd", Format.CHANNELS_LAST)
    stepper.load_state_dict(portable(copy.deepcopy(stepper.state_dict())))
    weight = stepper.param_groups[0]["params"][0]
    assert stepper.state[weight]["momentum_buffer"].stride() != weight.stride()


def test_the_rate_climbs_and_falls():
    recipe = Recipe(epochs=10, lr=1.0, warmup_epochs=2)
    rates = [learning_rate(update, 100, recipe) for update in range(100)]
    assert rates[:20] == pytest.approx([(n + 1) / 20 for n in range(20)])
    assert rates[20] == 1.0
    assert rates[20:] == sorted(rates[20:], reverse=True)
    assert 0 < rates[-1] < 0.001
    assert learning_rate(100, 100, recipe) == 0.0


def test_the_rate_stays_at_zero_once_training_is_over():
    assert learning_rate(8, 4, Recipe(epochs=2, lr=1.0)) == 0.0


def test_warm_up_through_the_last_epoch_never_falls():
    recipe = Recipe(epochs=2, lr=1.0, warmup_epochs=5)
    rates = [learning_rate(update, 10, recipe) for update in range(10)]
    assert rates == sorted(rates)


def test_a_model_without_parameters_cannot_be_trained():
    with pytest.raises(InputError, match="no parameters to train"):
        build_optimizer(nn.ReLU(), Recipe())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"epochs": 0}, "epochs 0 is too small"),
        ({"lr": -1.0}, "lr -1.0 is too small"),
        ({"lr": float("nan")}, "lr nan is no finite number"),
        ({"optimizer": "adam"}, "Use sgd or adamw"),
        ({"amp_dtype": "float8"}, "Use float16 or bfloat16"),
        ({"label_smoothing": 1.0}, "label_smoothing 1.0 is out of range"),
        ({"clip": 0.0}, "clip 0.0 is no norm"),
        ({"ema": 1.0}, "ema 1.0 is no decay"),
    ],
)
def test_a_recipe_refuses_what_cannot_work(settings, words):
    with pytest.raises(InputError, match=words):
        Recipe(**settings)


def test_precision_follows_the_device():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert Recipe().autocast_dtype(cuda) is None
    assert Recipe(amp=True).autocast_dtype(cpu) is torch.bfloat16
    assert Recipe(amp=True).autocast_dtype(cuda) is torch.float16
    assert Recipe(amp=True, amp_dtype="bfloat16").autocast_dtype(cuda) is torch.bfloat16
    with pytest.raises(InputError, match="Use bfloat16"):
        Recipe(amp=True, amp_dtype="float16").autocast_dtype(cpu)
