"""optimize: the same answers, whatever the model and the call; the model left as it was."""

import collections
import copy
import dataclasses
import math
import pickle
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import nhwc
from nhwc import InputError, ModelFailed, VerificationError, optimize
from nhwc._bench.peak import resident_bytes
from nhwc._optimize.contest import winner
from nhwc._optimize.verdict import Judge, digest_of, recall, remember
from nhwc.graph.nodes.arguments import fixed_arguments
from nhwc.graph.report import PassReport
from nhwc.machine.timing import Comparison, Samples
from nhwc.optimized import Optimized, describe, served
from nhwc.passes import FOLDING
from nhwc.plan import Identifier
from nhwc.plan.ledger import Ledger
from nhwc.render.optimize_text import optimize_text
from nhwc.verify import Verification
from nhwc.verify.comparing import Check
from nhwc.zoo import load_model, randomize_batchnorm_

from ..optimizing import (
    Aliasing,
    Branching,
    Nested,
    close,
    force,
    remembered,
    residual,
    runs_program,
    won_by,
)
from ..processor import computes, needing


@pytest.fixture(scope="module")
def image():
    return torch.randn(2, 3, 20, 18, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def planned(image):
    """A model and its optimized form with the plan in use, whatever the timing said."""
    model = residual()
    return model, force(model, image)


@torch.no_grad()
def test_arguments_in_any_number_that_nobody_reads_are_no_hindrance():
    class Loose(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Conv2d(3, 4, 3)

        def forward(self, x, *rest, **more):
            return self.layer(x)

    model, x = Loose().eval(), torch.randn(1, 3, 8, 8)
    fast = force(model, x)
    assert runs_program(fast, x)
    for given, named in (((x,), {}), ((x, 1), {}), ((x,), {"more": 2}), ((), {"x": x})):
        close(fast(*given, **named), model(x))


class Optional(nn.Module):
    """Takes what models of transformers and diffusers take: masks, flags, and more by name."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3)

    def forward(self, x, mask=None, scale=1.0, return_dict=True, **more):
        y = self.layer(x) * scale
        y = y if mask is None else y * mask
        return {"sample": y} if return_dict else (y,)


@torch.no_grad()
def test_what_is_given_by_name_is_planned():
    model, x = Optional().eval(), torch.randn(1, 3, 8, 8)
    named = {"mask": torch.rand(1, 1, 6, 6), "return_dict": False}
    fast = force(model, x, kwargs=named, also=[torch.randn(2, 3, 8, 8)])
    assert [one[1:] for one in fast.examples] == [("1x1x6x6 float32", "1.0", "False")] * 2
    for given in (x, torch.randn(2, 3, 8, 8)):
        assert runs_program(fast, given, **named)
        assert runs_program(fast, given, named["mask"], return_dict=False)
        close(fast(given, **named), model(given, **named))
    for other in ({}, {"scale": 2.0}, {"return_dict": False}, {"more": 1}):
        close(fast(x, **other), model(x, **other))
    assert runs_program(force(model, x), x, return_dict=True, mask=None)


class ByNameAlone(Optional):
    def forward(self, *, image, mask=None, scale=1.0):
        return super().forward(image, mask, scale, return_dict=False)[0]


class NamedBehindOthers(Optional):
    def forward(self, x, *rest, mask):
        return sum(rest, super().forward(x, mask, return_dict=False)[0])


@torch.no_grad()
def test_what_can_be_given_by_name_alone_is_planned(tmp_path):
    model, x = ByNameAlone().eval(), torch.randn(1, 3, 8, 8)
    named = {"image": x, "mask": torch.rand(1, 1, 6, 6), "scale": 2.0}
    fast = force(model, kwargs=named)
    assert runs_program(fast, **named)
    close(fast(**named), model(**named))
    close(fast(mask=named["mask"], image=x + 1, scale=2.0), model(**named | {"image": x + 1}))
    close(nhwc.fuse(model)(image=x), model(image=x))
    nhwc.save(fast, tmp_path / "model.nhwc")
    close(nhwc.load(tmp_path / "model.nhwc")(**named), model(**named))


@torch.no_grad()
def test_a_name_behind_any_number_of_inputs_stays_one():
    model, x, mask = NamedBehindOthers().eval(), torch.randn(1, 3, 8, 8), torch.rand(1, 1, 6, 6)
    fused = nhwc.fuse(model)
    close(fused(x, mask=mask), model(x, mask=mask))
    with pytest.raises(nhwc.InputError, match="has no place for each of mask"):
        nhwc.optimize(model, x, mask, kwargs={"mask": mask})


class TakesAll(Optional):
    def forward(self, pixels, labels=None, **more):
        return super().forward(pixels, more.get("mask"), return_dict=more.get("as_dict", True))


@torch.no_grad()
@pytest.mark.parametrize(
    "named", [{"as_dict": False}, {"as_dict": True, "mask": torch.rand(1, 1, 6, 6)}, {"class": 1}]
)
def test_names_that_go_into_kwargs_are_planned(named, tmp_path):
    model, x = TakesAll().eval(), torch.randn(1, 3, 8, 8)
    fast = force(model, x, kwargs=named)
    assert runs_program(fast, x, **named)
    for other in (named, {}, {"as_dict": True}, {"mask": torch.rand(1, 1, 6, 6)}):
        close(fast(x, **other), model(x, **other))
    if "class" in named:
        with pytest.raises(nhwc.InputError, match="it takes an argument by the name 'class'"):
            nhwc.save(fast, tmp_path / "model.nhwc")
        return
    nhwc.save(fast, tmp_path / "model.nhwc")
    loaded = nhwc.load(tmp_path / "model.nhwc")
    assert runs_program(loaded, x, **named)
    close(loaded(x, **named), model(x, **named))
    for other in ({"as_dict": not named["as_dict"]}, {"labels": 1}):
        with pytest.raises(nhwc.InputError, match="was saved for"):
            loaded(x, **named | other)


class GoesThroughNames(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(6, 8, 3)

    def forward(self, **views):
        return self.conv(torch.cat([*views.values()], 1))


@torch.no_grad()
def test_names_in_another_order_are_another_call():
    model = GoesThroughNames().eval()
    named = {"left": torch.randn(1, 3, 8, 8), "above": torch.randn(1, 3, 8, 8)}
    turned = dict(reversed(named.items()))
    fast = force(model, kwargs=named)
    assert runs_program(fast, **named)
    for given in (named, turned):
        close(fast(**given), model(**given))


@torch.no_grad()
def test_a_result_with_large_weights_is_optimized_again(tmp_path):
    model, x = (
        nn.Sequential(nn.Conv2d(3, 256, 3), nn.Conv2d(256, 256, 1)).eval(),
        torch.randn(1, 3, 8, 8),
    )
    fast = force(model, x)
    nhwc.save(fast, tmp_path / "model.nhwc")
    for again in (fast, nhwc.load(tmp_path / "model.nhwc"), nn.Sequential(fast, nn.ReLU()).eval()):
        larger = force(again, torch.randn(2, 3, 9, 9))
        close(larger(x), again(x))
        assert larger.report.verification.in_float64


@torch.no_grad()
def test_a_result_is_optimized_again_by_name():
    model, x = Optional().eval(), torch.randn(1, 3, 8, 8)
    named = {"mask": torch.rand(1, 1, 6, 6), "return_dict": False}
    again = nhwc.optimize(force(model, x, kwargs=named), x, kwargs=named)
    close(again(x, **named), model(x, **named))


def test_names_without_a_place_are_refused():
    with pytest.raises(nhwc.InputError, match=r"has no place for each of .* beside 1 inputs"):
        optimize(Optional().eval(), torch.randn(1, 3, 8, 8), kwargs={"x": 1})


@pytest.mark.parametrize("verb", [nhwc.optimize, nhwc.audit])
@pytest.mark.parametrize("kwargs", [3, [1], {1: 2}])
def test_arguments_by_name_that_are_none_are_refused(verb, kwargs):
    with pytest.raises(nhwc.InputError, match=r"^kwargs is no dict of arguments by name"):
        verb(nn.Conv2d(3, 4, 1).eval(), torch.randn(1, 3, 8, 8), kwargs=kwargs)


@torch.no_grad()
def test_a_planned_call_gives_the_same_answers(planned, image):
    model, fast = planned
    assert fast.report.chosen == "plan"
    assert runs_program(fast, image)
    close(fast(image), model(image))
    other = torch.randn_like(image)
    close(fast(other), model(other))


@pytest.mark.parametrize(
    "activation",
    [nn.ReLU, nn.ReLU6, nn.Hardswish, nn.SiLU, nn.Hardsigmoid, nn.LeakyReLU, nn.Mish, nn.ELU],
)
@torch.no_grad()
def test_every_activation_is_the_same_behind_a_kernel(activation, image):
    model = residual(activation=activation)
    close(force(model, image)(image), model(image))


class Functional(nn.Conv2d):
    def forward(self, x):
        return nn.functional.conv2d(x, self.weight, self.bias, stride=[2], padding=[1])


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(3, 8, 3, stride=(2,)),
        nn.Conv2d(3, 8, 3, padding=[1]),
        nn.Conv2d(3, 8, 3, padding="same", dilation=(2,)),
        nn.ConvTranspose2d(3, 8, 3, (2,), (1,), (1,)),
        Functional(3, 8, 3),
    ],
)
@torch.no_grad()
def test_a_number_for_all_sides_may_stand_in_a_list(layer, image):
    model = nn.Sequential(layer, nn.ReLU()).eval()
    close(force(model, image)(image), model(image))


@torch.no_grad()
def test_a_number_for_all_sides_may_be_set_alone(image):
    layer = nn.Conv2d(3, 8, 3, padding=1)
    layer.stride, layer.padding, layer.dilation = 2, 0, 1
    model = nn.Sequential(layer, nn.ReLU()).eval()
    close(force(model, image)(image), model(image))


@pytest.mark.parametrize("activation", [nn.GELU(), nn.GELU("tanh"), nn.Sigmoid(), nn.Tanh()])
@torch.no_grad()
def test_activations_that_have_no_inplace_form(activation, image):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), activation, nn.Conv2d(6, 4, 1)).eval()
    close(force(model, image)(image), model(image))


@torch.no_grad()
def test_the_input_may_come_in_either_layout(planned, image):
    model, fast = planned
    last = image.to(memory_format=torch.channels_last)
    assert runs_program(fast, last)
    close(fast(last), model(image))
    sliced = torch.randn(2, 6, 20, 18)[:, ::2]
    close(fast(sliced), model(sliced))


@torch.no_grad()
def test_an_image_comes_back_in_the_layout_the_model_gave_it(image):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3)).eval()
    fast = force(model, image)
    assert fast(image).stride() == model(image).stride()


@torch.no_grad()
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_slice_comes_back_in_the_order_in_which_it_lay(layout):
    class Cut(nn.Conv2d):
        def forward(self, x):
            y = super().forward(nn.functional.pad(x, (0, -x.shape[3] % 8, 0, -x.shape[2] % 8)))
            return (y if y.mean((0, 2, 3)).ndim == 1 else x)[:, :, : x.shape[2], : x.shape[3]]

    model, image = Cut(3, 8, 3, padding=1).eval(), torch.rand(2, 3, 14, 13).to(memory_format=layout)
    expected, found = model(image), force(model, image)(image)
    assert sorted(range(4), key=found.stride) == sorted(range(4), key=expected.stride)


@torch.no_grad()
def test_a_copy_returns_the_layout_that_the_model_gave(image):
    """The circular pad loses channels last, so the mended graph ends with a conversion."""
    torch.manual_seed(0)
    last = image.to(memory_format=torch.channels_last)
    model = nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular")
    model = nn.Sequential(model, nn.CircularPad2d(1)).eval()
    fast = force(model, last)
    graph = fast.portable
    assert graph.code == graph.graph.python_code("self").src
    copied = pickle.loads(pickle.dumps(fast))
    assert copied(last).stride() == fast(last).stride() == model(last).stride()


def by_pixels(run):
    """A net that computes on an image whose channels are its last dimension."""

    class ByPixels(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3, padding=1)
            self.layer, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

        def forward(self, x):
            return run(self, self.conv(x).relu().permute(0, 2, 3, 1))

    torch.manual_seed(0)
    return ByPixels().eval()


def adds(self, x):
    return x + self.layer(x)


@pytest.mark.parametrize(
    "run",
    [
        lambda self, x: F.gelu(x).permute(0, 3, 1, 2),
        lambda self, x: (x + self.norm(x)).permute(0, 3, 1, 2),
        lambda self, x: adds(self, x).unsqueeze(1),
        lambda self, x: adds(self, x)[:, :, :, :4].transpose(1, 2),
        lambda self, x: adds(self, x).chunk(2, 3)[1],
        lambda self, x: adds(self, x).flatten(1, 2).transpose(1, 2),
        lambda self, x: F.gelu(x.transpose(1, 2)).softmax(-1).permute(0, 2, 1, 3),
    ],
)
@torch.no_grad()
def test_a_view_is_returned_of_what_lies_as_the_graph_lays_it(run, image):
    model = by_pixels(run)
    found, expected = force(model, image)(image), model(image)
    assert found.stride() == expected.stride()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


class Streaming(nn.Module):
    """A part that puts another buffer in the place of its own at each call."""

    def __init__(self):
        super().__init__()
        self.register_buffer("before", torch.zeros(1, 4, 1, 1))

    def forward(self, x):
        y = x + self.before
        self.before = x.mean((0, 2, 3), keepdim=True)
        return y


@torch.no_grad()
def test_a_part_that_replaces_its_buffer_goes_on_doing_so(image):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), Streaming()).eval()
    fast = optimize(model, image)
    assert not model[1].before.any()
    for turn in range(3):
        close(fast(image + turn), model(image + turn))


@pytest.mark.parametrize(
    ("what", "made"),
    [
        ("a nested tensor", lambda y: {"a": y, "b": torch.nested.nested_tensor([*y])}),
        ("a nested tensor", lambda y: {"b": torch.nested.nested_tensor([*y], layout=torch.jagged)}),
        ("a tensor on the meta device", lambda y: {"a": y, "b": y.to("meta")}),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_answers_without_numbers_to_compare_are_refused_in_words(image, what, made):
    class Returns(nn.Conv2d):
        def forward(self, x):
            return made(super().forward(x).flatten(2))

    with pytest.raises(InputError) as refused:
        optimize(Returns(3, 4, 3).eval(), image)
    assert str(refused.value).startswith(f"Returns returns {what} as output['b'], whose numbers")


@pytest.mark.parametrize("shape", [(1, 3, 20, 18), (5, 3, 20, 18), (2, 3, 33, 47)])
@torch.no_grad()
def test_other_shapes_take_the_graph_and_are_right(planned, shape):
    model, fast = planned
    x = torch.randn(shape)
    assert not runs_program(fast, x)
    close(fast(x), model(x))


@torch.no_grad()
def test_also_plans_more_shapes(image):
    model = residual()
    single, wide = torch.randn(1, 3, 20, 18), torch.randn(1, 3, 40, 40)
    fast = force(model, image, also=[single, (wide,)])
    assert [plan.inputs[0] for plan in fast.report.plans] == [
        "2x3x20x18 float32", "1x3x20x18 float32", "1x3x40x40 float32",
    ]  # fmt: skip
    for x in (image, single, wide):
        assert runs_program(fast, x)
        close(fast(x), model(x))


@torch.no_grad()
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_of_two_layouts_of_one_shape_the_first_is_planned_for(layout, image):
    first = image.contiguous(memory_format=layout)
    others = image.contiguous(memory_format=torch.channels_last), image.clone()
    model = residual()
    fast = force(model, first, also=others)
    assert len(fast.report.plans) == 1
    assert fast(first).stride() == model(first).stride()
    for x in others:
        close(fast(x), model(x))


@torch.no_grad()
def test_what_was_optimized_is_planned_anew_for_other_shapes(planned):
    model, fast = planned
    other = torch.randn(1, 3, 28, 24)
    again = force(fast, other)
    assert not again.report.opaque
    assert [recipe.inputs for recipe in again.recipes] == [("1x3x28x24 float32",)]
    assert runs_program(again, other)
    close(again(other), model(other))


def test_what_else_is_planned_for_must_run_too(image):
    with pytest.raises(ModelFailed, match="Residual raised RuntimeError on 1x4x8x8 float32"):
        optimize(residual(), image, also=[torch.rand(1, 4, 8, 8)])
    with pytest.raises(InputError, match="also is 1x3x8x8 float32, not a list"):
        optimize(residual(), image, also=torch.rand(1, 3, 8, 8))
    with pytest.raises(InputError, match="also is 7, not a list"):
        optimize(residual(), image, also=7)
    for shape in ((1, 3, 8, 8), torch.Size((1, 3, 8, 8))):
        with pytest.raises(
            InputError, match=r"also has .*1, 3, 8, 8.*, and no tensor in it; .* Give"
        ):
            optimize(residual(), image, also=[shape])


def test_gradients_take_the_graph_and_are_said_to(image):
    model = residual()
    fast = force(model, image)
    x = image.clone().requires_grad_()
    with pytest.warns(UserWarning, match="gradients are wanted"):
        fast(x).sum().backward()
    ours, x.grad = x.grad, None
    model(x).sum().backward()
    close(ours, x.grad, 1e-4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast(x)  # Once is enough.
        assert not fast(image).requires_grad


def test_inference_mode(planned, image):
    model, fast = planned
    with torch.inference_mode():
        assert runs_program(fast, image)
        close(fast(image), model(image))


@pytest.mark.skipif(not computes(torch.bfloat16), reason="torch does not convolve in bfloat16 here")
def test_autocast_runs_the_graph(planned, image):
    model, fast = planned
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert not runs_program(fast, image)
        assert fast(image).dtype == model(image).dtype == torch.bfloat16
        close(fast(image).float(), model(image).float(), 0.1)


def test_optimizing_under_inference_mode_gives_a_model_for_any_mode(image):
    model = residual()
    with torch.inference_mode():
        fast = force(model, image.clone())
    with torch.no_grad():
        assert runs_program(fast, image)
        close(fast(image), model(image))


@pytest.mark.parametrize("dtype", [torch.float64, needing(torch.bfloat16)])
@torch.no_grad()
def test_other_precisions(dtype, image):
    model, x = residual().to(dtype), image.to(dtype)
    fast = force(model, x)
    assert fast(x).dtype is dtype
    close(fast(x).double(), model(x).double(), 1e-12 if dtype is torch.float64 else 0.1)


@torch.no_grad()
def test_threads_share_a_model(planned):
    model, fast = planned
    inputs = [torch.randn(2, 3, 20, 18) for _ in range(8)]
    answers = [None] * len(inputs)

    def work(index):
        with torch.no_grad():
            for _ in range(5):
                answers[index] = fast(inputs[index])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(len(inputs))))
    for x, answer in zip(inputs, answers, strict=True):
        close(answer, model(x))


@torch.no_grad()
def test_new_weights_are_noticed(image):
    model = residual()
    fast = force(model, image)
    state = {key: value * 1.5 for key, value in fast.state_dict().items()}
    fast.load_state_dict(state)
    assert runs_program(fast, image)
    close(fast(image), fast.portable(image))
    next(fast.parameters()).mul_(0.5)
    close(fast(image), fast.portable(image))


@torch.no_grad()
def test_a_moved_model_answers_in_its_new_precision(image):
    model = residual()
    fast = force(model, image).double()
    close(fast(image.double()), residual().double()(image.double()), 1e-5)
    with pytest.raises(RuntimeError):
        fast(image)


@torch.no_grad()
def test_copies_and_pickles_plan_anew_without_measuring(image):
    model = residual()
    fast = force(model, image)
    known = remembered()
    for twin in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert runs_program(twin, image)
        close(twin(image), model(image))
        assert twin.report.chosen == fast.report.chosen
    assert remembered() == known
    twin = copy.deepcopy(fast)
    next(twin.parameters()).zero_()
    close(fast(image), model(image))


@torch.no_grad()
def test_a_copy_from_where_there_were_other_kernels_says_so_and_runs_its_graph(image):
    model = residual()
    fast = force(model, image)
    (recipe,) = fast.recipes
    gone = ("nhwc fastest", "channels_last", "channels_last")
    kernels = tuple((key, Identifier(*gone)) for key, _ in recipe.kernels)
    twin = copy.deepcopy(fast)
    twin._recipes = {recipe.signature: replace(recipe, kernels=kernels)}
    with pytest.warns(UserWarning, match="the graph runs: .* has no kernel 'nhwc fastest'"):
        close(twin(image), model(image))
    close(twin(image), model(image))
    assert not twin.recipes


def test_a_set_of_tensors_is_refused_for_what_it_is():
    class Sets(nn.Conv2d):
        def forward(self, x):
            return {"all": {super().forward(x)}}

    with pytest.raises(nhwc.InputError, match="of Sets is a set of tensors, which has no order"):
        nhwc.optimize(Sets(3, 4, 3).eval(), torch.rand(1, 3, 8, 8))


@torch.no_grad()
def test_its_graph_can_be_scripted_exported_and_traced(planned, image):
    model, fast = planned
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.", DeprecationWarning)
        warnings.filterwarnings("ignore", "The TorchScript type system", UserWarning)
        close(torch.jit.script(fast)(image), model(image))
        close(torch.jit.trace(fast, image)(image), model(image))
    close(torch.export.export(fast, (image,)).module()(image), model(image))


def fake(function, image):
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        return function(mode.from_tensor(image)).shape


def fake_outside_of_its_mode(function, image):
    return function(FakeTensorMode(allow_non_fake_inputs=True).from_tensor(image)).shape


def flops(function, image):
    with FlopCounterMode(display=False) as counter:
        function(image)
    return counter.get_total_flops() > 0


def tangent(function, image):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(function(forward_ad.make_dual(image, image))).tangent


class OfAUser(torch.Tensor):
    """What torch's operators make of such a tensor is another such tensor."""


class Counting(TorchFunctionMode):
    seen = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen += 1
        return function(*args, **(kwargs or {}))


def of_a_subclass(function, image):
    found = function(image.as_subclass(OfAUser))
    assert type(found) is OfAUser
    return found.as_subclass(torch.Tensor)


def seen_by_a_function_mode(function, image):
    with Counting() as mode:
        function(image)
    return mode.seen > 1


@pytest.mark.parametrize(
    "use",
    [
        fake,
        fake_outside_of_its_mode,
        flops,
        tangent,
        of_a_subclass,
        seen_by_a_function_mode,
        lambda function, image: torch.vmap(function)(image[None])[0],
        lambda function, image: torch.func.jvp(function, (image,), (image,))[1],
        lambda function, image: make_fx(function)(image)(image),
        lambda function, image: function(torch.complex(image, image).conj().imag),
    ],
)
@torch.no_grad()
def test_what_is_no_plain_memory_or_is_watched_takes_the_graph(use, planned, image):
    model, fast = planned
    assert runs_program(fast, image)
    expected, found = use(model, image), use(fast, image)
    if isinstance(expected, torch.Tensor):
        close(found, expected)
    else:
        assert found == expected


class Imaginary(nn.Module):
    def __init__(self, within):
        super().__init__()
        self.within, self.conv = within, nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return self.conv((torch.fft.fft2(x).conj() if self.within else x).imag).relu()


@torch.no_grad()
def test_memory_of_opposite_numbers_is_read_as_these():
    """The imaginary part of what is conjugated lies in memory with its signs turned."""
    x = torch.randn(1, 3, 8, 8, dtype=torch.complex64)
    for within in (False, True):
        model = Imaginary(within).eval()
        fast = force(model, x)
        for given in (x, x.conj()):
            close(fast(given), model(given))
    assert "makes a sparse, nested, quantized or negated tensor" in fast.report.reason


def test_a_default_device_is_no_watch(planned, image):
    with torch.device("cpu"), torch.no_grad():
        assert runs_program(planned[1], image)


def test_statistics_among_the_inputs_are_left_as_they_were():
    class Norm(nn.Module):
        def forward(self, x, mean, variance):
            return nn.functional.batch_norm(x, mean, variance, training=True)

    x, mean, variance = torch.randn(2, 3, 4, 4), torch.zeros(3), torch.ones(3)
    fast = force(Norm().eval(), x, mean, variance)
    assert not mean.any()
    assert torch.equal(variance, torch.ones(3))
    fast(x, mean, variance)
    close(mean, x.mean((0, 2, 3)) / 10)


def test_the_model_is_left_as_it_was(image):
    model = residual()
    seen = []
    handle = model.stem.register_forward_hook(lambda *args: None)
    model.head.weight.grad = torch.ones_like(model.head.weight)
    model.requires_grad_(True)
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    force(model, image)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(p.requires_grad for p in model.parameters())
    assert torch.equal(model.head.weight.grad, torch.ones_like(model.head.weight))
    assert list(model.stem._forward_hooks) == [handle.id]
    assert not any(module.training for module in model.modules())
    assert seen == []


def test_it_does_not_share_weights_with_the_model(image):
    model = residual()
    fast = force(model, image)
    with torch.no_grad():
        expected = model(image)
        for parameter in model.parameters():
            parameter.zero_()
        close(fast(image), expected)


def test_a_second_time_measures_nothing(image):
    model = residual()
    first = force(model, image)
    again = force(residual(), image)
    assert again.report.plans[0].measured == 0
    assert again.recipes == first.recipes


def test_everything_is_measured_again_when_asked(image):
    model = residual()
    force(model, image)
    assert force(model, image).report.plans[0].measured == 0
    again = force(model, image, remeasure=True).report
    assert again.plans[0].measured > 0
    assert not again.verification.remembered


@pytest.mark.skipif(resident_bytes() is None, reason="the system does not tell")
@torch.no_grad()
def test_nothing_leaks_over_two_hundred_calls():
    image = torch.randn(2, 3, 128, 128)
    fast = force(residual(), image)
    for x in (image, image.repeat(2, 1, 1, 1)):
        for _ in range(20):
            fast(x)
        before = resident_bytes()
        for _ in range(200):
            fast(x)
        # One image of one layer kept for every call would be four times that.
        assert resident_bytes() - before < 200 * x.numel() * x.itemsize * 8 / 3 / 4 / 4


def test_a_verdict_of_float64_is_remembered_for_the_same_weights(image):
    model = residual()
    with torch.no_grad():
        model.head.bias.fill_(3.25)  # Weights that no other test has.
    first = force(model, image).report.verification
    assert (first.remembered, first.in_float64) == (False, True)
    again = force(model, image).report.verification
    assert again.remembered
    assert again.checks == first.checks
    with torch.no_grad():
        model.head.bias.fill_(3.5)
    assert not force(model, image).report.verification.remembered


def test_a_verdict_is_remembered_for_an_example_of_other_numbers(image):
    model = residual()
    with torch.no_grad():
        model.head.bias.fill_(3.125)
    force(model, image)
    assert force(model, image / 2 + 1).report.verification.remembered


def test_a_verdict_is_for_the_layout_the_whole_numbers_and_the_strange_ones_of_its_example(image):
    examples = [image, image.to(memory_format=torch.channels_last), image.double(), image * 1e-4]
    examples += [torch.tensor([1, 2]), torch.tensor([2, 2])]
    for strange in (math.nan, math.inf, 1e6, 1e7):
        examples.append(image.clone())
        examples[-1][0, 0, 0, 0] = strange
    digests = [digest_of(nn.Identity(), [one]) for one in examples]
    assert len({*digests}) == len(examples)
    assert digests == [digest_of(nn.Identity(), [one.clone()]) for one in examples]


def test_a_verdict_is_not_remembered_for_another_setting(image):
    model = residual()
    with torch.no_grad():
        model.head.bias.fill_(3.375)
    force(model, image)
    model.scale = 2.0  # Its code could read this, though no text of it says so.
    assert not force(model, image).report.verification.remembered


def test_a_remembered_verdict_hides_no_wrong_pass(image):
    changes = {"by": 0.0}

    def break_it(graph):
        with torch.no_grad():
            graph.get_submodule("head").bias.add_(changes["by"])
        return PassReport("break_it")

    model = residual()
    with torch.no_grad():
        model.head.bias.fill_(3.75)
    passes = (*FOLDING, break_it)
    assert force(model, image, passes=passes).report.verification.passed
    assert force(model, image, passes=passes).report.verification.remembered
    changes["by"] = 0.1
    with pytest.raises(VerificationError, match="relative error"):
        optimize(model, image, passes=passes)


def test_a_remembered_verdict_hides_no_wrong_program(image, monkeypatch):
    model = residual()
    with torch.no_grad():
        model.head.bias.fill_(3.875)
    force(model, image)
    assert force(model, image).report.verification.remembered

    def wrong(plan, graph, inputs):
        found = served(plan, graph, inputs)
        return dataclasses.replace(found, program=lambda x: found.program(x) + 0.1)

    monkeypatch.setattr("nhwc._optimize.planner.served", wrong)
    with pytest.raises(VerificationError, match="relative error"):
        force(model, image)


class Tokens(nn.Module):
    """Whole numbers are not drawn anew: three runs are of the same ones."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 4)

    def forward(self, numbers):
        return self.table(numbers)


@pytest.mark.parametrize("zeros", [True, False])
def test_a_model_of_one_answer_shows_little(zeros):
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(72, 4)).eval()
    if zeros:
        nn.init.zeros_(net[3].weight)
    x = torch.randn(1, 3, 5, 5)
    for _ in range(2):
        report = optimize(net, x).report
        assert report.verification.constant == zeros
        assert ("the model answers the same to every input" in str(report)) == zeros


def test_a_model_of_whole_numbers_is_not_said_to_have_one_answer():
    assert not optimize(Tokens().eval(), torch.tensor([[1, 2, 3]])).report.verification.constant


def test_a_verdict_is_recalled_if_it_passed_and_for_the_same_kernels(tmp_path):
    ledger, check = Ledger(tmp_path / "plans.json"), Check(0, "output", 0.1, 0.0, 0.5)
    for constant in (True, False):
        remember(ledger, "model", "kernels", Verification((check,), constant=constant))
        known = recall(ledger, "model", "kernels")
        assert known == Verification((check,), remembered=True, constant=constant)
    assert recall(ledger, "model", "other kernels") is None
    failed = dataclasses.replace(check, error=1.0)
    remember(ledger, "model", "kernels", Verification((failed,)))
    assert recall(ledger, "model", "kernels") is None


class RoundsOtherwise(nn.Module):
    """In float64, what it rounds is a step away: a run there says nothing of one here."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 8, 3)

    def forward(self, x):
        return self.layer(x).round() + (x.dtype is torch.float64)


def test_what_only_the_original_could_judge_is_not_said_to_be_held_against_float64(image):
    fast = force(RoundsOtherwise().eval(), image)
    assert fast.report.verification.passed
    assert not fast.report.verification.in_float64
    text = " ".join(optimize_text(fast.report, "").split())
    assert "verified against float64 in 6 comparisons, 3 of them against the original alone" in text


def test_the_report_says_how_long_each_pass_took(planned):
    _, fast = planned
    assert all(report.seconds > 0 for report in fast.report.passes)
    assert "seconds" in fast.report.to_dict()["passes"][0]
    assert " ms" in next(
        line for line in optimize_text(fast.report, "").splitlines() if "fold_bn_into_conv" in line
    )


def test_a_pass_that_is_wrong_is_refused(image):
    def break_it(graph):
        with torch.no_grad():
            graph.get_submodule("head").bias.add_(0.1)
        return PassReport("break_it")

    model = residual()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(VerificationError, match="relative error"):
        optimize(model, image, passes=(*FOLDING, break_it))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@torch.no_grad()
def test_what_rounds_too_freely_is_exact_from_then_on(image, monkeypatch, tmp_path):
    """Also where it is planned again: loaded, copied, for other shapes."""
    real, asked = Judge.judge, []

    def judge(self, *args, **kwargs):
        asked.append(args)
        found = real(self, *args, **kwargs)
        wrong = dataclasses.replace(found, checks=(Check(0, "output", 1.0, 1e-7, 1e-6),))
        return wrong if len(asked) == 1 else found

    monkeypatch.setattr(Judge, "judge", judge)
    fast = optimize(residual(), image)
    assert len(asked) == 2
    assert fast.exact
    assert copy.deepcopy(fast).exact
    nhwc.save(fast, tmp_path / "m.nhwc")
    assert nhwc.load(tmp_path / "m.nhwc").exact


def test_passes_are_what_one_asks_for(image):
    fast = force(residual(), image, passes=())
    assert fast.report.passes == ()
    assert any(isinstance(module, nn.BatchNorm2d) for module in fast.modules())
    close(fast(image), residual()(image))


@pytest.mark.parametrize(
    ("medians", "chosen", "says"),
    [
        ({"input": 2.0, "graph": 1.5, "plan": 1.0}, "plan", ""),
        ({"input": 2.0, "graph": 1.0, "plan": 1.5}, "graph", "the plan runs 0.67x"),
        ({"input": 1.0, "graph": 2.0, "plan": 4.0}, "input", "runs 0.50x as fast"),
        ({"input": 2.0, "graph": 1.0}, "graph", ""),
    ],
)
def test_the_fastest_is_returned_and_the_reason_said(medians, chosen, says):
    times = {name: Samples((s, s, s)) for name, s in medians.items()}
    before = times.pop("input")
    name, reason = winner({stage: Comparison(before, after) for stage, after in times.items()})
    assert name == chosen
    assert says in reason


@torch.no_grad()
def test_where_nothing_is_gained_a_copy_of_the_model_comes_back(image):
    model = residual()
    same = won_by("input", model, image)
    assert type(same.portable) is type(model)
    assert same.portable is not model
    assert same.report.chosen == "input"
    assert torch.equal(same(image), model(image))


def test_the_report_says_everything(planned):
    _, fast = planned
    report = fast.report.to_dict()
    assert report["schema"] == 1
    assert report["chosen"] == "plan"
    assert {"input", "graph", "plan"} == set(report["times"])
    plan = fast.report.plans[0]
    whats = [layer.what for layer in plan.layers]
    assert "conv2d 2x3x20x18 w8x3x3x3 s2x2 p1x1 d1x1 g1 bias relu float32 cpu" in whats
    assert any("g2 bias residual relu" in what for what in whats)
    assert any(what.startswith("affine 2x8x10x9 relu") for what in whats)
    assert all(layer.chosen in layer.kernels for layer in plan.layers)
    assert pickle.loads(pickle.dumps(fast.report)) == fast.report


class Encoder(nn.Module):
    """Draws noise for an image that the passes leave in another order than the model does."""

    def __init__(self):
        super().__init__()
        self.stem, self.out = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
        self.norm, self.conv = nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3, padding=1)
        self.tokens = nn.Linear(8, 8)

    def forward(self, x):
        y = self.stem(x)
        y = self.tokens(y.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(y.shape)
        mean = self.out(y + self.conv(self.norm(y).relu()))
        return mean + torch.randn_like(mean)


@torch.no_grad()
def test_random_numbers_fall_on_the_same_elements():
    model, x = Encoder().eval(), torch.randn(1, 1, 32, 32)
    result = nhwc.optimize(model, x)
    for seed in range(2):
        torch.manual_seed(seed)
        expected = model(x)
        torch.manual_seed(seed)
        close(result(x), expected)


@pytest.mark.parametrize("model", [Branching(), Aliasing()])
@torch.no_grad()
def test_models_without_a_graph_still_come_back_right(model, image):
    model = model.eval()
    fast = force(model, image)
    for x in (image, -image, image[:1]):
        close(fast(x), model(x))


class Flipping(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


class FlippingAny(Flipping):
    def forward(self, x, **options):
        return super().forward(x)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (Flipping(), "no graph could be made of any part of it"),
        (FlippingAny(), "no graph could be made of any part of it"),
        (Aliasing(), "no kernel is faster than torch's on what it is given"),
    ],
)
def test_why_there_is_no_plan_is_said(model, reason, image, monkeypatch):
    monkeypatch.setattr("nhwc._optimize.planner.gains", lambda *_: False)
    fast = force(model.eval(), image)
    (plan,) = fast.report.plans
    assert not plan.planned
    assert plan.reason == fast.report.reason == reason
    assert [part.kind for part in fast.report.opaque] == [type(model).__name__]


@torch.no_grad()
def test_several_inputs_and_nested_outputs(image):
    model = Nested().eval()
    fast = force(model, image, torch.tensor(2.0), 7)
    assert runs_program(fast, image, torch.tensor(2.0), 7)
    ours, theirs = fast(image, torch.tensor(3.0), 7), model(image, torch.tensor(3.0), 7)
    assert type(ours["a"][1]) is tuple
    close(ours["a"][0], theirs["a"][0])
    close(ours["a"][1][0], theirs["a"][1][0])
    assert ours["size"] == theirs["size"]
    assert fast(image, torch.tensor(3.0), 9)["a"][1][1] == 9
    close(fast(x=image, scale=torch.tensor(2.0), n=7)["a"][0], model(image, 2.0, 7)["a"][0])


@pytest.mark.parametrize(
    ("model", "inputs", "error", "says"),
    [
        (lambda x: x, (torch.zeros(1),), InputError, "cannot optimize a function"),
        (nn.Conv2d(3, 4, 3).eval(), (), InputError, "no tensor among them"),
        (nn.Conv2d(3, 4, 3).eval(), (torch.zeros(0, 3, 8, 8),), InputError, "least one image"),
        (nn.Conv2d(3, 4, 3), (torch.zeros(1, 3, 8, 8),), InputError, r"Call model.eval\(\) first"),
        (
            nn.Conv2d(3, 4, 3).eval(),
            (torch.zeros(1, 5, 8, 8),),
            ModelFailed,
            "Conv2d raised RuntimeError on 1x5x8x8 float32",
        ),
    ],
)
def test_what_cannot_be_optimized_is_said_in_one_line(model, inputs, error, says):
    with pytest.raises(error, match=says):
        optimize(model, *inputs)


class HalfEmpty(nn.Module):
    """Runs its convolution on the images that a list of boxes names, of which there may be none."""

    def __init__(self):
        super().__init__()
        self.conv, self.pool = nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1)

    def forward(self, x, boxes):
        return self.pool(self.conv(x[boxes])), x.mean()


def test_layers_that_get_nothing_are_planned():
    net, x = HalfEmpty().eval(), torch.randn(2, 3, 8, 8)
    none = torch.zeros(0, dtype=torch.int64)
    fast = optimize(net, x, none)
    for boxes in (none, torch.tensor([1])):
        torch.testing.assert_close(fast(x, boxes), net(x, boxes))


class Loss(nn.Module):
    """Returns numbers that Python holds: one rounded, one not a number."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x):
        return self.norm(self.conv(x)).mean().item(), (x.sum() * float("nan")).item()


def test_numbers_are_judged_as_tensors_are():
    net = randomize_batchnorm_(Loss().eval())
    x = torch.randn(2, 3, 16, 16)
    fast = optimize(net, x)
    assert fast.report.verification.passed
    assert fast(x) == pytest.approx(net(x), rel=1e-3, abs=1e-6, nan_ok=True)


def test_a_column_of_a_matrix_is_an_input():
    class Net(nn.Module):
        def forward(self, x):
            return x * 2

    column = torch.randn(1, 2)[:, 1]
    torch.testing.assert_close(optimize(Net().eval(), column)(column), column * 2)


@pytest.mark.parametrize("name", ["shufflenet_v2_x0_5", "mobilenet_v3_small", "densenet121"])
@torch.no_grad()
def test_models_of_the_zoo(name):
    model = randomize_batchnorm_(load_model(name))
    x = torch.randn(1, 3, 64, 64)
    fast = force(model, x)
    assert fast.report.verification.passed
    close(fast(x), model(x), 1e-3)
    assert isinstance(fast, Optimized)
    assert nhwc.optimize is optimize


def test_every_ratio_is_that_of_the_times_beside_it(planned):
    _, fast = planned
    slow, less, quick = (Samples((s,) * 5) for s in (0.22, 0.19, 0.1))
    compared = {"graph": Comparison(less, slow), "plan": Comparison(slow, quick)}
    report = dataclasses.replace(fast.report, compared=compared, chosen="plan", remembered=False)
    lines = optimize_text(report, "").splitlines()
    (graph,) = (line for line in lines if line.startswith("  after the passes"))
    (plan,) = (line for line in lines if line.startswith("  with chosen kernels"))
    assert "220 ms" in graph
    assert "0.86x of 190 ms" in graph
    assert "100 ms" in plan
    assert "2.20x of 220 ms" in plan
    # A time of the input's own would stand beside those of other turns.
    assert not any(line.startswith("  as it was given") for line in lines)
    data = report.to_dict()
    for stage, ratio in data["ratios"].items():
        before, after = data["inputs_times"][stage], data["times"][stage]
        assert ratio == before[0] / after[0]


class Sampled(nn.Module):
    """It reads its image at the places that a convolution says, channels last inside."""

    def __init__(self):
        super().__init__()
        self.offsets = nn.Conv2d(8, 2, 3, padding=1)

    def forward(self, x):
        grid = self.offsets(x).tanh().permute(0, 2, 3, 1)
        sampled = nn.functional.grid_sample(x, grid, align_corners=False)
        return {"first": sampled, "then": [sampled.relu(), sampled.mean()]}


class Then(nn.Module):
    """A convolution, and what a function returns of its image."""

    def __init__(self, function):
        super().__init__()
        self.conv, self.function = nn.Conv2d(8, 8, 3), function

    def forward(self, x):
        return self.function(self.conv(x).relu())


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    "model",
    [
        Sampled(),
        Then(lambda y: (y.chunk(2, 1), y[:, 1], y.diagonal(0, 2, 3), y.unsqueeze(0))),
        Then(lambda y: [*y.sort(1), *nn.functional.max_pool2d(y, 2, return_indices=True)]),
        Then(lambda y: y.transpose_(1, 2)),
        Then(lambda y: (torch.stack([y, y]), y.unfold(2, 2, 2), y.flatten(2).transpose(1, 2) + 1)),
        Then(lambda y: (y.permute(0, 2, 3, 1) + 1, y.reshape(2, 2, 4, 4, 5) * 2)),
        Then(lambda y: (torch.einsum("bchw,bkhw->bckh", y, y), y.unfold(2, 2, 2) + 0)),
        Then(lambda y: (y.flatten(2).transpose(0, 1) * 2).relu()[:, -1]),
        Then(lambda y: (y.flatten(2).permute(2, 0, 1) * 2).relu().select(1, 0).unsqueeze(1)),
        nn.Sequential(nn.Conv2d(8, 8, 3), nn.InstanceNorm2d(8)),
        nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular"), nn.InstanceNorm2d(8)),
        nn.Sequential(nn.InstanceNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)),
        Then(lambda y: nn.functional.pad(y, (1, 0, 1, 0), "circular") if len(y) > 1 else y),
        nn.Sequential(nn.Conv2d(8, 1, 3), nn.ReLU()),
        nn.Sequential(nn.Conv2d(8, 8, (6, 7)), nn.ReLU()),
    ],
)
@torch.no_grad()
def test_strides_of_the_result_are_those_of_the_model(model, memory):
    model, x = model.eval(), torch.randn(2, 8, 6, 7).contiguous(memory_format=memory)
    expected, fast = model(x), force(model, x)
    for found in (fast(x), fast.portable(x)):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, check_stride=True)


@pytest.mark.parametrize("layer", [nn.CircularPad2d(1), nn.CircularPad3d(1)])
def test_a_model_that_is_a_layer_which_a_pass_replaces(layer):
    x = torch.rand((1, 2, 4, 5, 6)[: 2 + len(layer.padding) // 2])
    fast = optimize(layer.eval(), x)
    assert torch.equal(fast(x), layer(x))
    assert not fast.report.opaque


class Scaling(nn.Module):
    """Asks about its second argument, which has a default."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3)

    def forward(self, x, scale=None, flip=False):
        y = self.conv(x)
        y = y if scale is None else y * scale
        return y.flip(3) if flip else y


GIVEN = [(2.0,), (2.0, True), (None, True), (torch.tensor(3.0),), (np.float64(2.0),)]


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_optional_arguments_are_what_the_example_gives(image, given, tmp_path):
    model = Scaling().eval()
    fast = force(model, image, *given)
    assert fast.serves((image, *given))
    close(fast(image, *given), model(image, *given))
    nhwc.save(fast, tmp_path / "model.nhwc")
    close(nhwc.load(tmp_path / "model.nhwc")(image, *given), model(image, *given))


def test_examples_may_give_optional_arguments_otherwise(image):
    model, others = Scaling().eval(), [(image, 2.0), (image, None, True)]
    fast = optimize(model, image, also=others)
    for inputs in [(image,), *others]:
        close(fast(*inputs), model(*inputs))


def test_a_call_of_other_arguments_than_those_of_forward_is_left_to_the_run():
    assert fixed_arguments(Scaling(), [(1, 2, 3, 4)]) == {"scale": None, "flip": False}


def test_inputs_are_described_without_their_numbers():
    found = describe(({"a": torch.ones(2, 3)}, np.ones(9), np.float64(2), [torch.ones(4)]))
    assert found == ("{'a': 2x3 float32}", "a ndarray", "2.0", "[4 float32]")
    assert describe((torch.float16, 2j)) == ("torch.float16", "2j")


class Taps(nn.Module):
    """Features before and behind activations in place, as in nets for perceptual losses."""

    def __init__(self, *, asks):
        super().__init__()
        self.asks = asks
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8))
        self.second = nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, padding=1))
        self.third = nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, padding=1))

    def forward(self, x):
        if self.asks and x.shape[2] > 100:
            x = x[:, :, :100]
        names = collections.namedtuple("Names", ["first", "second", "third"])
        first = self.first(x)
        second = self.second(first)
        kept = names(first, second, self.third(second))
        return kept.first + kept.second, kept.third


@pytest.mark.parametrize("asks", [False, True])
def test_features_that_a_later_layer_writes_into_are_in_the_plan(asks):
    """Where the code asks for sizes, its parts are graphs first, and each has an input then."""
    model, x = randomize_batchnorm_(Taps(asks=asks)).eval(), torch.randn(1, 3, 12, 12)
    found = nhwc.optimize(model, x)
    [plan] = [plan for plan in found.report.plans if not plan.part]
    assert plan.reason == ""
    assert {*found.report.opaque} == {*plan.opened}
    assert bool(plan.opened) == asks
    with torch.no_grad():
        torch.testing.assert_close(found(x), model(x), rtol=1e-4, atol=1e-4)


class Resized(nn.Module):
    """An image that is resized to the size it has, as is known only for one set of sizes."""

    def __init__(self, *, asks):
        super().__init__()
        self.asks = asks
        self.one, self.other = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 256, 1)

    def forward(self, x):
        size = x.shape[2:] if self.asks else (8, 8)
        return self.other(nn.functional.interpolate(self.one(x), size, mode="bilinear"))


@pytest.mark.parametrize("asks", [True, False])
def test_a_plan_has_what_the_passes_find_more_where_a_graph_asks_for_sizes(asks):
    model, x = Resized(asks=asks).eval(), torch.randn(2, 3, 8, 8)
    fast = optimize(model, x)
    found = {one.name for plan in fast.report.plans for one in plan.passes if one.applied}
    assert found == ({"move_mixing"} if asks else set())
    with torch.no_grad():
        for one in (x, torch.randn(3, 3, 6, 8)):
            torch.testing.assert_close(fast(one), model(one), rtol=1e-4, atol=1e-5)
