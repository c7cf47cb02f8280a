"""Verification tells what rounds differently from what computes differently."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from nhwc.errors import VerificationError
from nhwc.verify import flatten, observe, verify
from nhwc.verify.comparing import compare, lost_nans
from nhwc.verify.inputs import random_inputs
from nhwc.verify.luck import proves_nothing
from nhwc.verify.picking import decides
from nhwc.verify.widened import widened


@dataclasses.dataclass
class Detection:
    boxes: torch.Tensor
    scores: dict


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()


def draw(count=3):
    return random_inputs((torch.randn(2, 3, 9, 9),), count)


def test_the_example_comes_first_and_the_others_differ():
    example = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    inputs = random_inputs((example, torch.arange(4)), 3)
    assert torch.equal(inputs[0][0], example)
    assert not torch.equal(inputs[1][0], inputs[2][0])
    assert inputs[2][0].stride() == example.stride()
    assert all(torch.equal(one[1], torch.arange(4)) for one in inputs)


def test_another_order_of_rounding_passes():
    model = net()
    truth = observe(model, draw())
    assert truth.exact is not None

    def reordered(x):
        return model(x.to(memory_format=torch.channels_last)) * 3 / 3

    verification = verify(truth, reordered)
    assert verification.passed
    assert len(verification.checks) == 3
    verification.require()


class Noisy(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x)


def test_random_numbers_are_held_against_the_models_own():
    """In float64 other numbers are drawn: against those every answer would be right."""
    model = nn.Sequential(net(), Noisy()).eval()
    truth = observe(model, draw())
    assert truth.drawn
    assert truth.exact is None
    assert verify(truth, model).passed
    assert not verify(truth, lambda x: model(x) + 0.1).passed
    assert not verify(truth, lambda x: model[0](x) + torch.rand_like(model[0](x))).passed


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (lambda y: y + 1e-3, "relative error"),
        (lambda y: y * 1.0001, "relative error"),
        (lambda y: y[:, :2], r"\(2, 2, 5, 5\) where it was"),
        (lambda y: y.double(), "float64"),
        (lambda y: (y, y), "the outputs are"),
        (lambda y: y.masked_fill(y == y.max(), float("nan")), "relative error inf"),
        (lambda y: None, "None where it was"),
    ],
)
def test_another_answer_is_refused(wrong, says):
    model = net()
    truth = observe(model, draw(1))
    verification = verify(truth, lambda x: wrong(model(x)))
    assert not verification.passed
    with pytest.raises(VerificationError, match=says):
        verification.require()


def test_an_error_on_one_input_only_is_found():
    model = net()
    truth = observe(model, draw())
    verification = verify(truth, lambda x: model(x) + (1.0 if x.min() >= 0 else 0.0))
    assert [check.input for check in verification.checks if not check.passed] == [2]


def test_what_a_graph_raises_in_float64_is_not_printed(capsys):
    class InFloat32(nn.Linear):
        def forward(self, x):
            return super().forward(x.to(torch.float32))

    graph = fx.Tracer()
    graph.is_leaf_module = lambda *_: False
    model = InFloat32(2, 2)
    traced = fx.GraphModule(model, graph.trace(model))
    assert observe(traced, [(torch.ones(1, 2),)]).exact is None
    assert capsys.readouterr().err == ""


def test_nested_outputs_are_compared_leaf_by_leaf():
    class Nested(nn.Module):
        def forward(self, x):
            return Detection(x * 2, {"a": (x, [x + 1]), "n": 3})

    class Off(Nested):
        def forward(self, x):
            out = super().forward(x)
            out.scores["a"][1][0] += 0.5
            return out

    truth = observe(Nested(), draw(1))
    assert verify(truth, Nested()).passed
    assert verify(truth, Off()).worst.output == "output.scores['a'][1][0]"
    assert [path for path, _ in flatten({"a": [1, (2,)]})] == [
        "output['a'][0]",
        "output['a'][1][0]",
    ]


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (lambda x: {"a": x, "n": 1, "b": x}, "the outputs are"),
        (lambda x: {"a": x, "n": True}, "True where it was 1"),
    ],
)
def test_another_structure_is_refused(other, says):
    truth = observe(lambda x: {"a": x, "n": 1}, draw(1))
    assert says in verify(truth, other).worst.reason


@pytest.mark.parametrize("array", [lambda y: y.numpy(), lambda y: y.sum().numpy()[()]])
def test_arrays_may_round_otherwise_and_are_compared(array):
    class Arrays(nn.Module):
        def forward(self, x):
            return [array(net(x.float()))]

    net = nn.Linear(8, 8)
    truth = observe(Arrays(), random_inputs([torch.randn(2, 8)], 2))
    assert verify(truth, lambda x: [array(net(x) * (1 + 1e-7))]).passed
    assert not verify(truth, lambda x: [array(net(x) * 1.01)]).passed


def test_integers_must_be_equal():
    class Top(nn.Module):
        def forward(self, x):
            return x.flatten(1).argmax(1)

    truth = observe(Top(), draw(1))
    assert verify(truth, Top()).passed
    assert not verify(truth, lambda x: Top()(x) + 1).passed


def test_a_model_without_a_float64_run_is_compared_with_itself():
    class Single(nn.Module):
        def forward(self, x):
            return torch.nn.functional.conv2d(x, torch.ones(1, 3, 1, 1))

    truth = observe(Single(), draw(2))
    assert truth.exact is None
    assert verify(truth, lambda x: Single()(x) * 1.000001).passed
    assert not verify(truth, lambda x: Single()(x) * 1.01).passed


def test_a_model_that_finds_another_number_of_things_in_float64_is_compared_with_itself():
    class Finds(nn.Module):
        def forward(self, x):
            return x[: 1 if x.dtype is torch.float64 else 2]

    truth = observe(Finds(), draw(1))
    assert truth.exact is None
    assert verify(truth, Finds()).passed


class Fourier(nn.Module):
    """Weights and inputs of complex numbers, as in the reconstruction of MRI."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))
        self.register_buffer("phase", torch.randn(4, 1, 1, dtype=torch.complex64))

    def forward(self, k):
        mixed = torch.einsum("oc,nchw->nohw", self.weight, torch.fft.ifft2(k))
        return torch.view_as_real(mixed * self.phase)


def test_complex_numbers_have_a_float64_run_and_random_inputs_too():
    model, k = Fourier(), torch.randn(1, 3, 8, 8, dtype=torch.complex64)
    inputs = random_inputs((k,), 3)
    assert torch.equal(inputs[0][0], k)
    assert inputs[1][0].dtype == torch.complex64
    assert inputs[1][0].imag.std() > 0.5
    assert not torch.equal(inputs[1][0], inputs[2][0])
    truth = observe(model, inputs)
    assert truth.exact is not None
    assert truth.exact[0]["output"].dtype == torch.float64
    assert verify(truth, model).passed
    assert 0 < verify(truth, model).worst.eager_error < 1e-5
    assert not verify(truth, lambda k: model(k * (1 + 1e-4j))).passed


def test_the_same_not_a_numbers_and_infinities_pass():
    class Broken(nn.Module):
        def forward(self, x):
            return torch.cat([x / 0, x])

    truth = observe(Broken(), draw(1))
    assert verify(truth, Broken()).passed
    assert not verify(truth, lambda x: torch.cat([x, x / 0])).passed


@pytest.mark.parametrize(("answer", "lost"), [(math.nan, 0), (math.inf, 0), (0.0, 2)])
def test_only_finite_numbers_stand_where_a_nan_was_lost(answer, lost):
    before, after = ({"output": torch.full((2,), number)} for number in (math.nan, answer))
    assert sum(int(check.reason.split()[0]) for check in lost_nans(before, after)) == lost


def test_the_inputs_and_the_random_state_are_left_alone():
    class Greedy(nn.Module):
        def forward(self, x):
            return x.mul_(2) + torch.rand(())

    inputs = draw(2)
    kept = [one[0].clone() for one in inputs]
    state = torch.get_rng_state()
    truth = observe(Greedy(), inputs)
    assert verify(truth, Greedy()).passed
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(one[0], old) for one, old in zip(inputs, kept, strict=True))


def test_a_half_precision_model_may_err_as_it_always_did():
    model = net().bfloat16()
    truth = observe(model, [(torch.randn(1, 3, 9, 9).bfloat16(),)])
    verification = verify(truth, lambda x: model(x.to(memory_format=torch.channels_last)))
    assert verification.passed
    assert verification.worst.eager_error > 1e-4


def test_a_model_in_float64_is_copied_too():
    net = nn.BatchNorm2d(3).double()
    wide = widened(net)
    for own, other in zip(net.state_dict().values(), wide.state_dict().values(), strict=True):
        assert own.data_ptr() != other.data_ptr()


@pytest.mark.parametrize("other", [-torch.inf, torch.nan, 3e38])
def test_an_infinite_number_is_that_one(other):
    model = lambda number: lambda x: x.masked_fill(x > 0.5, number)
    truth = observe(model(torch.inf), draw())
    assert verify(truth, model(torch.inf)).passed
    assert not verify(truth, model(other)).passed


def test_parts_of_a_complex_number_are_compared_one_by_one():
    model = lambda part: lambda x: torch.complex(x, torch.full_like(x, part))
    truth = observe(model(torch.inf), draw())
    assert verify(truth, model(torch.inf)).passed
    assert not verify(truth, model(-torch.inf)).passed


DECIDING = {
    "round_": lambda x: x.clone().round_(),
    "floor_divide": lambda x: x // 0.3,
    "rounding": lambda x: torch.div(x, 0.3, rounding_mode="trunc"),
    "remainder": lambda x: x % 0.3,
    "to integers": lambda x: x.long(),
    "to half precision and back": lambda x: x.half().float(),
    "largest of a row": lambda x: x.max(0).indices,
    "cummax": lambda x: x.cummax(0).indices,
    "unique": lambda x: x.unique(),
    "nanmedian": lambda x: x.nanmedian(),
    "nonzero": lambda x: x.nonzero(),
}
NOT_DECIDING = {
    "largest of all": lambda x: x.max(),
    "softmax": lambda x: x.softmax(0),
    "to doubles": lambda x: x.double(),
    "integers to others": lambda x: torch.arange(3).to(torch.int32) + x.sum(),
    "div": lambda x: x / 3,
}


@pytest.mark.parametrize("name", [*DECIDING, *NOT_DECIDING])
def test_what_decides(name):
    function = (DECIDING | NOT_DECIDING)[name]
    assert decides(function, (torch.rand(5),)) is (name in DECIDING)


class Kept(nn.Module):
    """Keeps tables outside of the slots that torch's own conversions know."""

    def __init__(self):
        super().__init__()
        self.one, self.several = torch.randn(4, 4), {"a": [torch.randn(4, 4)]}

    def forward(self, x):
        return x @ self.one @ self.several["a"][0]


def test_a_model_that_keeps_tensors_in_lists_runs_in_float64_too():
    model = Kept()
    truth = observe(model, [(torch.randn(2, 4),)])
    assert truth.exact is not None
    assert truth.exact[0]["output"].dtype is torch.float64
    assert model.one.dtype is torch.float32


def test_an_answer_that_cancels_but_for_roundings_is_as_right_as_any_other():
    class Centred(nn.Module):
        def forward(self, x):
            return (x - x.mean(3, keepdim=True)).mean(3)

    net, x = Centred(), torch.randn(2, 3, 16, 15)
    truth = observe(net, [(x,)])
    found = verify(truth, net)
    assert found.passed
    assert found.astray
    assert not proves_nothing(found, truth, net)


class Largest(TorchDispatchMode):
    """Notes the most bytes of memory that any operator's result lies in."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor):
            self.bytes = max(self.bytes, made.untyped_storage().nbytes())
        return made


def test_large_answers_are_compared_in_little_memory():
    """A file of 640 bytes that pads an image to half a gigabyte took ten to load."""
    old, new = torch.zeros(1 << 14, 1 << 11), torch.zeros(1 << 14, 1 << 11)
    new[-1, -1] = 2.0
    with Largest() as largest:
        (check,) = compare(0, {"y": old}, {"y": new}, {"y": old}, wide=False)
    assert check.error == 2.0
    assert largest.bytes <= old.nbytes


@pytest.mark.parametrize("special", [None, math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_answers_are_compared_in_pieces_as_at_once(monkeypatch, special, dtype):
    true = torch.randn(3, 5, 7, dtype=dtype).transpose(0, 2)
    old, new = true.clone(), true + 1e-3
    if special is not None:
        for one in (true, old, new):
            one[2, 1, 0] = special
    whole = list(compare(0, {"y": old}, {"y": new}, {"y": true}, wide=True))
    monkeypatch.setattr("nhwc.verify.comparing._PIECE", 4)
    assert list(compare(0, {"y": old}, {"y": new}, {"y": true}, wide=True)) == whole
    assert whole[0].error > 0
    new[0, 0, 0] = math.nan
    (check,) = compare(0, {"y": old}, {"y": new}, {"y": true}, wide=True)
    assert check.error == math.inf
