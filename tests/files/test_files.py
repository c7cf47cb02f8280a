"""Saved models: the same answers back, nothing run but listed operators, damage always told."""

import collections
import dataclasses
import json
import math
import struct
import tracemalloc
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import fx, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils._pytree import tree_map_only

import nhwc
from nhwc import FileError, InputError
from nhwc.errors import of_kind
from nhwc.files.container import MAGIC, is_saved, read, write
from nhwc.files.examples import Example, examples_in
from nhwc.files.layers import _arguments_of, dump_layer, restore_layer
from nhwc.files.loading import _plan_that_agrees
from nhwc.files.plain import Foreign, from_plain, to_plain
from nhwc.files.serial import dump, restore
from nhwc.files.vocabulary import functions, modules
from nhwc.formats import Format, to_format
from nhwc.graph import capture
from nhwc.graph.modules.layers import LAYERS, assert_sizes
from nhwc.kernels.programs.pool import Pool
from nhwc.machine.environment import Environment
from nhwc.models.preserve import drawn_so_far
from nhwc.optimized import describe, signature
from nhwc.passes import PASSES, run_passes
from nhwc.plan import make_plan
from nhwc.plan.ledger import Ledger
from nhwc.zoo import load_model, randomize_batchnorm_

from ..optimizing import (
    Branching,
    Nested,
    force,
    remembered,
    residual,
    runs_program,
)


@pytest.fixture(scope="module")
def image():
    return torch.randn(2, 3, 20, 18, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def saved(image, tmp_path_factory):
    fast = force(residual(), image, also=[image[:1]])
    path = tmp_path_factory.mktemp("saved") / "model.nhwc"
    nhwc.save(fast, path)
    return fast, path


@torch.no_grad()
def test_a_loaded_model_is_planned_and_answers_the_same(saved, image):
    fast, path = saved
    loaded = nhwc.load(path)
    assert is_saved(path)
    for x in (image, image[:1]):
        assert runs_program(loaded, x)
        torch.testing.assert_close(loaded(x), fast(x), rtol=1e-5, atol=1e-5)
    wide = torch.randn(1, 3, 40, 40)
    assert torch.equal(loaded.portable(wide), fast.portable(wide))
    assert loaded.state_dict().keys() == fast.state_dict().keys()
    assert not loaded.training


@torch.no_grad()
@pytest.mark.parametrize("off", [1e-5, 1e-2])
def test_a_plan_that_rounds_too_freely_is_made_exactly(off, saved, image, monkeypatch):
    """What is off by less than a thousandth must be held against float64, too."""
    asked = []

    def less_exact(*args, exact, **kwargs):
        asked.append(exact)
        plan = make_plan(*args, exact=exact, **kwargs)
        if not exact:
            run = plan.program
            plan = dataclasses.replace(plan, program=lambda *x: run(*x) * (1 + off))
        return plan

    monkeypatch.setattr("nhwc.files.loading.make_plan", less_exact)
    loaded = nhwc.load(saved[1])
    assert asked == [False, True] * 2
    assert runs_program(loaded, image)
    torch.testing.assert_close(loaded(image), saved[0](image), rtol=1e-6, atol=1e-6)


class Shared(nn.Module):
    """One activation behind two convolutions, and alone; which sizes it takes, its code says."""

    def __init__(self, activation):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1)
        self.activation = activation

    def forward(self, x):
        if x.shape[-1] % 2:
            raise ValueError("an even width, please")
        y = self.activation(self.first(x))
        z = self.activation(self.second(y))
        return self.activation(z.mean((2, 3), keepdim=True) * z + y)


@torch.no_grad()
@pytest.mark.parametrize("make", [lambda: nn.ReLU(inplace=True), nn.PReLU, nn.SiLU])
def test_a_layer_that_is_part_of_another_and_called_by_itself_is_saved_once(make, image, tmp_path):
    model = nn.Sequential(nn.Identity(), Shared(make())).eval()
    nhwc.save(nhwc.optimize(model, image), tmp_path / "m.nhwc")
    torch.testing.assert_close(nhwc.load(tmp_path / "m.nhwc")(image), model(image))


class LastDigits(nn.Module):
    def forward(self, x):
        return (x * 1e6).frac().round()


@torch.no_grad()
def test_a_loaded_plan_decides_as_the_graph_does():
    """Far from its own float64 run, any plan would be near enough."""
    net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3), LastDigits()).eval()
    graph, x = capture(net).module, torch.randn(1, 3, 32, 32)
    plan = _plan_that_agrees(graph, graph, (x,), Ledger.of(Environment.here()), Pool(), exact=False)
    assert plan is None or torch.equal(plan.program(x), graph(x))


class Bounded(nn.Module):
    """Compares what a convolution makes with a bound."""

    def __init__(self):
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.register_buffer("bound", torch.zeros(()))

    def forward(self, x):
        y = self.conv(x)
        return self.last(torch.where(y > self.bound, y, y - 1))


@torch.no_grad()
def test_a_plan_is_kept_that_decides_otherwise_by_a_rounding():
    model, x = Bounded().eval(), torch.randn(1, 3, 32, 32)
    eager, ours = model.conv(x), force(model.conv, x)(x)
    exact = F.conv2d(x.double(), model.conv.weight.double(), model.conv.bias.double(), padding=1)
    # Where kernels round up, and neither eager nor float64 exceeds the bound.
    model.bound.copy_(eager[(ours > eager) & (exact <= eager)][0])
    graph = capture(model).module
    ledger = Ledger.of(Environment.here())
    assert _plan_that_agrees(graph, graph, (x,), ledger, Pool(), exact=False) is not None


def test_saving_holds_no_second_model(tmp_path):
    fused = nhwc.fuse(nn.Sequential(nn.Linear(2048, 1024)).eval())
    tracemalloc.start()
    try:
        nhwc.save(fused, tmp_path / "m.nhwc")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < fused.state_dict()["0.weight"].nbytes / 2


@torch.no_grad()
def test_loading_draws_nothing_from_the_users_generators(saved, monkeypatch, tmp_path):
    monkeypatch.setenv("NHWC_CACHE", str(tmp_path))  # Nothing is known, so kernels are measured.
    before = drawn_so_far()
    nhwc.load(saved[1])
    assert drawn_so_far() == before


@torch.no_grad()
def test_loading_makes_choices_from_memory(saved):
    _, path = saved
    nhwc.load(path)
    known = remembered()
    assert len(nhwc.load(path).recipes) == 2
    assert remembered() == known


@torch.no_grad()
def test_saved_again_it_is_the_same_file(saved, tmp_path):
    _, path = saved
    nhwc.save(nhwc.load(path), tmp_path / "again.nhwc")
    assert (tmp_path / "again.nhwc").read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    "name",
    ["shufflenet_v2_x0_5", "mobilenet_v3_small", "efficientnet_b0", "squeezenet1_1", "googlenet",
     "densenet121", "convnext_tiny", "regnet_y_400mf"],
)  # fmt: skip
@torch.no_grad()
def test_models_of_the_zoo_come_back_exactly(name, tmp_path):
    model = randomize_batchnorm_(load_model(name))
    fused = nhwc.fuse(model)
    nhwc.save(fused, tmp_path / "m.nhwc")
    x = torch.randn(1, 3, 64, 64)
    assert torch.equal(nhwc.load(tmp_path / "m.nhwc")(x), fused(x))


@torch.no_grad()
def test_several_inputs_nested_outputs_and_the_command_line_name(image, tmp_path):
    model = Nested().eval()
    path = tmp_path / "nested.nhwc"
    nhwc.save(force(model, image, torch.tensor(2.0), 7), path)
    loaded = load_model(str(path))
    ours, theirs = (m(image, torch.tensor(3.0), 7) for m in (loaded, model))
    torch.testing.assert_close(ours["a"][0], theirs["a"][0], rtol=1e-4, atol=1e-4)
    assert ours["a"][1][1] == 7
    assert ours["size"] == theirs["size"]


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.filter = nn.Parameter(torch.randn(4, 1, 1, dtype=torch.complex64))

    def forward(self, k):
        x = torch.fft.ifft2(k * self.filter)
        return torch.fft.rfft2(x.real + x.conj().imag), torch.view_as_real(x)


def test_complex_numbers_and_fourier_transforms_come_back(tmp_path):
    model, k = Spectral().eval(), torch.randn(1, 4, 8, 8, dtype=torch.complex64)
    nhwc.save(model, tmp_path / "m.nhwc")
    torch.testing.assert_close(nhwc.load(tmp_path / "m.nhwc")(k), model(k), rtol=0, atol=0)


def test_a_graph_for_known_sizes_says_what_it_was_saved_for():
    with pytest.raises(nhwc.InputError, match=r"an input of \[2, 3\] and torch.float32, not None:"):
        assert_sizes(None, [2, 3], torch.float32)
    with pytest.raises(nhwc.InputError, match=r"not \[2, 4\] and torch.float32: its code"):
        assert_sizes(torch.ones(2, 4), [2, 3], torch.float32)


def test_a_trace_of_torch_keeps_the_check_of_sizes():
    traced = torch.jit.trace(lambda x: assert_sizes(x, [2, 3], torch.float32) * 2, torch.ones(2, 3))
    assert torch.equal(traced(torch.ones(2, 3)), torch.full((2, 3), 2.0))
    with pytest.raises((RuntimeError, torch.jit.Error), match="an input of other sizes"):
        traced(torch.ones(2, 4))


def test_tied_weights_stay_tied_and_buffers_keep_their_kind(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 4, bias=False)
            self.b = nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight
            self.register_buffer("shift", torch.arange(4.0))
            self.last = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))

        def forward(self, x):
            return self.b(self.a(x)) + self.shift + self.last.sum()

    model = Tied().eval()
    nhwc.save(model, tmp_path / "tied.nhwc")
    loaded = nhwc.load(tmp_path / "tied.nhwc").portable
    assert loaded.a.weight is loaded.b.weight
    assert loaded.last.is_contiguous(memory_format=torch.channels_last)
    x = torch.randn(3, 4)
    assert torch.equal(loaded(x), model(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_precision_is_kept(dtype, tmp_path):
    model = nn.Conv2d(3, 4, 3).to(dtype).eval()
    nhwc.save(model, tmp_path / "m.nhwc")
    loaded = nhwc.load(tmp_path / "m.nhwc").portable
    assert all(
        torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True)
    )


class Functional(nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        self.norm, self.weight, self.bias = nn.BatchNorm2d(3), weight, bias

    def forward(self, x):
        mean, variance = self.norm.running_mean, self.norm.running_var
        return F.batch_norm(x, mean, variance, self.weight, self.bias)


@pytest.mark.parametrize(
    "model",
    [
        *(Functional(w, b) for w in (None, nn.Parameter(torch.rand(3)))
          for b in (None, nn.Parameter(torch.rand(3)))),
        nn.InstanceNorm2d(3, affine=True, track_running_stats=True),
        nn.InstanceNorm2d(3, track_running_stats=True),
    ],
)  # fmt: skip
@torch.no_grad()
def test_batch_norms_that_a_pass_made_come_back(model, image, tmp_path):
    graph = capture(model.eval()).module
    run_passes(graph, PASSES)
    nhwc.save(graph, tmp_path / "m.nhwc")
    torch.testing.assert_close(graph(image), model(image))
    assert torch.equal(nhwc.load(tmp_path / "m.nhwc").portable(image), graph(image))


@torch.no_grad()
@pytest.mark.parametrize("mode", ["circular", "reflect", "replicate"])
@pytest.mark.parametrize("layer", [nn.Conv2d, nn.Conv3d])
def test_convolutions_that_a_pass_freed_of_their_padding_come_back(layer, mode, tmp_path):
    net = nn.Sequential(layer(3, 4, 3, padding=1, padding_mode=mode)).eval()
    x = torch.randn(1, 3, *[5] * (net[0].weight.ndim - 2))
    path = tmp_path / "model.nhwc"
    nhwc.save(nhwc.fuse(net, passes=PASSES), path)
    with torch.no_grad():
        torch.testing.assert_close(nhwc.load(path)(x), net(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layer", [nn.Conv2d, nn.ConvTranspose2d])
def test_convolutions_that_were_changed_after_they_were_made_come_back(layer, tmp_path):
    """So segmenters dilate the last stages of a classifier, and take their strides away."""
    torch.manual_seed(0)
    changed = layer(4, 4, 3, stride=2, padding=1)
    changed.stride, changed.padding, changed.dilation = (1, 1), (2, 2), (2, 2)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), changed).eval()
    x = torch.randn(1, 3, 9, 9)
    path = tmp_path / "changed.nhwc"
    nhwc.save(nhwc.optimize(model, x), path)
    torch.testing.assert_close(nhwc.load(path)(x), model(x), rtol=1e-4, atol=1e-5)


def test_a_convolution_reads_the_padding_that_it_was_made_with(tmp_path):
    changed = nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect").eval()
    changed.padding = (2, 2)
    x, path = torch.randn(1, 3, 9, 9), tmp_path / "changed.nhwc"
    nhwc.save(nhwc.fuse(changed), path)
    torch.testing.assert_close(nhwc.load(path)(x), changed(x))


def test_a_file_of_the_first_version_still_loads():
    loaded = nhwc.load(Path(__file__).parent / "data" / "version-1.nhwc")
    assert len(loaded.recipes) == 1
    x = torch.linspace(-1, 1, 192).view(1, 3, 8, 8)
    answer = loaded(x)
    # As it was when the file was written.
    torch.testing.assert_close(answer["flat"].sum().item(), 1139.9652, rtol=1e-5, atol=0)
    sums = torch.tensor([[284.1844, 318.6498, 273.1310, 264.0]])
    torch.testing.assert_close(answer["sum"][0], sums, rtol=1e-5, atol=0)
    assert answer["sum"][1] == 1


class Transposed(nn.Module):
    """Its weights lie in other orders than their dimensions stand in, which its code relies on."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.weight = nn.Parameter(torch.linspace(-1, 1, 64).view(8, 8).t())
        self.register_buffer("table", torch.linspace(0, 1, 24).view(2, 3, 4).permute(2, 0, 1))

    def forward(self, x):
        flat = self.weight.t().view(64)[:8]
        return self.conv(x).mean((2, 3)) * flat, self.weight.as_strided((3,), (1,)), self.table * 2


@torch.no_grad()
def test_a_tensor_comes_back_in_the_order_in_which_it_lay(tmp_path):
    model, x = Transposed().eval(), torch.linspace(-1, 1, 192).view(1, 3, 8, 8)
    nhwc.save(nhwc.load(saved_as(model, tmp_path / "one.nhwc")).portable, tmp_path / "two.nhwc")
    assert (tmp_path / "one.nhwc").read_bytes() == (tmp_path / "two.nhwc").read_bytes()
    loaded = nhwc.load(tmp_path / "two.nhwc")
    for found, expected in zip(loaded(x), model(x), strict=True):
        torch.testing.assert_close(found, expected)
        assert found.stride() == expected.stride()


@pytest.mark.parametrize("layer", [nn.Conv2d(4, 8, 1), nn.Conv2d(4, 4, 3, groups=4)])
@torch.no_grad()
def test_weights_of_one_channel_or_one_pixel_stay_channels_last(layer, tmp_path):
    """Their numbers lie in the same order in both formats; torch answers in what strides say."""
    layer, x = layer.eval().to(memory_format=torch.channels_last), torch.ones(2, 4, 5, 5)
    assert layer(x).is_contiguous(memory_format=torch.channels_last)
    nhwc.save(nhwc.fuse(layer), tmp_path / "layer.nhwc")
    assert nhwc.load(tmp_path / "layer.nhwc")(x).stride() == layer(x).stride()


class Unbound(nn.Module):
    """Calls a method as a function, which runs alone can follow; returns what it is given, too."""

    def forward(self, x):
        return torch.Tensor.contiguous(x), x


def test_a_copy_that_the_example_did_not_need_is_made_after_loading(tmp_path):
    nhwc.save(nhwc.optimize(Unbound().eval(), torch.rand(4, 5)), tmp_path / "unbound.nhwc")
    x = torch.rand(4, 10)[:, ::2]
    copied, given = nhwc.load(tmp_path / "unbound.nhwc")(x)
    assert copied.stride() == (5, 1)
    assert given.data_ptr() == x.data_ptr() != copied.data_ptr()


@torch.no_grad()
def test_a_file_of_the_second_version_still_loads():
    file = Path(__file__).parent / "data" / "version-2.nhwc"
    assert file.read_bytes()[8] == 2
    answer = nhwc.load(file)(torch.linspace(-1, 1, 192).view(1, 3, 8, 8))
    assert answer[2].stride() == (1, 12, 4)
    torch.testing.assert_close(answer[1], torch.tensor([-1.0, -0.968254, -0.936508]))


def test_a_file_without_orders_is_of_the_first_version(saved):
    assert saved[1].read_bytes()[8] == 1


def saved_as(model, path):
    nhwc.save(model, path)
    return path


@torch.no_grad()
@pytest.mark.parametrize("lazy", [torch.conj, lambda x: x.conj().imag, torch._neg_view])
def test_a_buffer_of_numbers_that_torch_negates_when_it_reads_them_is_saved(lazy, tmp_path):
    root = nn.Module()
    root.register_buffer("table", lazy(torch.randn(3, 3, dtype=torch.complex64)))
    graph = fx.Graph()
    graph.output(graph.call_function(torch.mul, (graph.get_attr("table"), graph.placeholder("x"))))
    nhwc.save(fx.GraphModule(root, graph), tmp_path / "m.nhwc")
    loaded = nhwc.load(tmp_path / "m.nhwc")
    torch.testing.assert_close(loaded(torch.ones(3)), root.table * torch.ones(3))


FORMS = json.loads((Path(__file__).parent / "data" / "layers.json").read_text())
"""Each form in which a layer of nhwc's own was ever written, and the tensors that belong to it."""


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form["class"])
def test_a_layer_loads_from_every_form_that_it_was_ever_written_in(form):
    made = restore_layer(form)
    shapes = {name: list(tensor.shape) for name, tensor in made.state_dict().items()}
    assert shapes == form["tensors"], "files hold tensors of these names: keep them"
    again = dump_layer(made, "layer")["arguments"]
    for name, value in form["arguments"].items():
        # A layer within is torch's, and newer ones take more arguments.
        if not (isinstance(value, dict) and "module" in value):
            assert again[name] == value


def test_every_form_of_a_layer_is_kept():
    """An argument of a layer may be added, with a default: then a form with it is added here."""
    kept = {form["class"]: set(form["arguments"]) - {"bias"} for form in FORMS}
    here = {f"nhwc.{layer.__name__}": set(_arguments_of(layer)) - {"bias"} for layer in LAYERS}
    assert kept == here


def test_norms_of_a_torch_whose_norms_take_bias_load_where_they_do_not(monkeypatch):
    def of_an_older_torch(layer):
        return [name for name in _arguments_of(layer) if name != "bias"]

    monkeypatch.setattr("nhwc.files.layers._arguments_of", of_an_older_torch)
    for kind in ("BatchNorm2d", "GroupNorm", "InstanceNorm3d"):
        sizes = {"num_groups": 1, "num_channels": 4} if kind == "GroupNorm" else {"num_features": 4}
        made = restore_layer({"class": f"nn.{kind}", "arguments": sizes | {"bias": True}})
        assert isinstance(made, modules()[f"nn.{kind}"])
        with pytest.raises(Foreign, match="with 'bias'"):
            restore_layer({"class": f"nn.{kind}", "arguments": sizes | {"bias": False}})


class Own(nn.Module):
    def forward(self, x):
        return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize(
    "layer",
    [
        nn.LSTM(6, 4, 2, batch_first=True, bidirectional=True, proj_size=3),
        nn.GRU(6, 4, bias=False),
        nn.RNN(6, 4, nonlinearity="relu"),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_recurrent_layers_come_back(layer, tmp_path):
    model = nn.Sequential(nn.Linear(6, 6), layer.eval())
    nhwc.save(model, tmp_path / "model.nhwc")
    loaded, x = nhwc.load(tmp_path / "model.nhwc"), torch.randn(2, 5, 6)
    torch.testing.assert_close(loaded(x), model(x))
    torch.testing.assert_close(loaded.double()(x.double()), model.double()(x.double()))


class Imaginary(nn.Module):
    def forward(self, x):
        return torch.view_as_real(x * 1j)


class Loud(nn.Conv2d):
    def __call__(self, x):
        return 2 * super().__call__(x)


def stale():
    """It pads by what it was made with, and says another padding."""
    layer = nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect")
    layer.padding = (2, 2)
    return layer


def other_weight():
    layer = nn.Conv2d(3, 4, 3)
    layer.weight = nn.Parameter(torch.ones(4, 3, 1, 1))
    return layer


def called(layer):
    """A graph that its user made, of one call of the layer."""
    graph = fx.Graph()
    graph.output(graph.call_module("layer", (graph.placeholder("x"),)))
    return fx.GraphModule({"layer": layer}, graph).eval()


def hooked(graph):
    graph.register_forward_hook(lambda module, given, result: result + 1)
    return graph


def stepping(build):
    """A graph that its user made, of one step behind its input."""
    graph = fx.Graph()
    graph.output(build(graph, graph.placeholder("x")))
    return fx.GraphModule({}, graph).eval()


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (Branching().eval(), "calls a Branching, whose own code it takes to load it"),
        (Own(), "it calls quantize_per_tensor"),
        (Imaginary(), "complex: 1j has no plain form"),
        (stepping(lambda g, x: g.call_function(getattr, (x, "grad"))), "reads the attribute"),
        (stepping(lambda g, x: g.call_method("tolist", (x,))), "it calls the method 'tolist'"),
        (stepping(lambda g, x: g.placeholder("*y")), "it takes a varying number of arguments"),
        (called(Loud(3, 4, 3)), "calls a Loud, whose own code it takes to load it"),
        (called(weight_norm(nn.Conv2d(3, 4, 3))), "it has hooks, parametrizations or a forward"),
        (hooked(called(nn.Conv2d(3, 4, 3))), "the whole: it has hooks"),
        (called(stale()), "it is no nn.Conv2d as its arguments make it"),
        (called(other_weight()), "it is no nn.Conv2d as its arguments make it"),
    ],
)
def test_what_cannot_be_saved_is_said_and_nothing_is_written(model, says, tmp_path):
    with pytest.raises(InputError, match=says):
        nhwc.save(model, tmp_path / "no.nhwc")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", [None, 3, b"model.nhwc"])
def test_what_is_no_path_is_said(path):
    says = f"{of_kind(path)} is no path of a file. Give one, as nhwc."
    with pytest.raises(InputError, match=says):
        nhwc.save(nn.ReLU(), path)
    with pytest.raises(InputError, match=says):
        nhwc.load(path)


def test_an_argument_that_is_a_named_tuple_comes_back_as_a_tuple(image, tmp_path):
    graph = fx.Graph()
    size = collections.namedtuple("Size", "height width")(4, 5)
    made = graph.call_function(nn.functional.interpolate, (graph.placeholder("x"), size))
    graph.output(made)
    model = fx.GraphModule({}, graph).eval()
    nhwc.save(model, tmp_path / "model.nhwc")
    torch.testing.assert_close(nhwc.load(tmp_path / "model.nhwc")(image), model(image))


def test_an_operator_of_others_is_not_taken_for_torchs_of_that_name(tmp_path):
    with torch.library._scoped_library("others", "FRAGMENT") as others:
        others.define("relu(Tensor x) -> Tensor")
        others.impl("relu", torch.neg, "CompositeExplicitAutograd")
        graph = fx.symbolic_trace(lambda x: torch.ops.others.relu.default(x))
        with pytest.raises(InputError, match=r"it calls relu\.default"):
            nhwc.save(graph, tmp_path / "no.nhwc")


@torch.no_grad()
def test_an_exported_model_is_saved_with_the_checks_of_its_arguments(image, tmp_path):
    model, batch = residual().eval(), torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(model, (image,), dynamic_shapes=({0: batch},))
    nhwc.save(program.module(), tmp_path / "exported.nhwc")
    loaded = nhwc.load(tmp_path / "exported.nhwc")
    torch.testing.assert_close(loaded(image[:1]), model(image[:1]), rtol=1e-5, atol=1e-5)
    with pytest.raises(AssertionError, match="Guard failed"):
        loaded(image[..., 1:])


def test_hooks_are_not_saved_silently(tmp_path):
    graph = nhwc.fuse(nn.Sequential(nn.Conv2d(3, 4, 1)).eval())
    next(m for m in graph.modules() if isinstance(m, nn.Conv2d)).register_forward_hook(print)
    with pytest.raises(InputError, match="hooks"):
        nhwc.save(graph, tmp_path / "no.nhwc")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "it begins with nothing"),
        (b"PK\x03\x04 a zip or torch.save", "is no model saved by nhwc"),
        (MAGIC, "it ends after 8 bytes"),
        (MAGIC + struct.pack("<IQQ", 99, 0, 0) + b"\0" * 32, "version 99; this nhwc reads up to 2"),
    ],
)
def test_foreign_files_are_told_apart(content, says, tmp_path):
    path = tmp_path / "f.nhwc"
    path.write_bytes(content)
    with pytest.raises(FileError, match=says):
        nhwc.load(path)


def test_a_missing_file_or_folder_is_said(tmp_path):
    with pytest.raises(FileError, match="No such file"):
        nhwc.load(tmp_path / "none.nhwc")
    with pytest.raises(FileError, match="No such file"):
        nhwc.save(nn.ReLU(), tmp_path / "none" / "m.nhwc")


@given(st.data())
@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_flipped_bit_is_found(saved, tmp_path, data):
    content = bytearray(saved[1].read_bytes())
    index = data.draw(st.integers(0, len(content) - 1))
    content[index] ^= 1 << data.draw(st.integers(0, 7))
    path = tmp_path / "flipped.nhwc"
    path.write_bytes(content)
    with pytest.raises(FileError):
        nhwc.load(path)


@given(st.data())
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_truncated_or_lengthened_file_is_found(saved, tmp_path, data):
    content = saved[1].read_bytes()
    cut = data.draw(st.integers(0, len(content) - 1))
    path = tmp_path / "cut.nhwc"
    path.write_bytes(data.draw(st.sampled_from([content[:cut], content + content[: cut + 1]])))
    with pytest.raises(FileError):
        nhwc.load(path)


@given(st.binary(max_size=300), st.booleans())
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_other_bytes_are_refused(tmp_path, content, begins_well):
    path = tmp_path / "foreign.nhwc"
    path.write_bytes((MAGIC if begins_well else b"") + content)
    with pytest.raises(FileError):
        nhwc.load(path)


def tampered(path, tmp_path, change):
    """The saved file with its header changed and every checksum right again."""
    header, tensors = read(path)
    del header["tensors"]
    change(header)
    write(tmp_path / "tampered.nhwc", header, tensors)
    return tmp_path / "tampered.nhwc"


def node(header, op):
    return next(n for n in header["nodes"] if n["op"] == op)


CALL = {"op": "call_function", "name": "evil", "args": {"tuple": []}, "kwargs": {"dict": []}}


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h["nodes"].insert(1, CALL | {"target": "os.system"}),
        lambda h: h["nodes"].insert(1, CALL | {"target": "builtins.eval"}),
        lambda h: h["nodes"].insert(1, CALL | {"target": "torch.load"}),
        lambda h: h["nodes"].insert(
            1,
            CALL | {"target": "builtins.getattr", "args": {"tuple": [{"node": "x"}, "__class__"]}},
        ),
        lambda h: h["nodes"].insert(1, CALL | {"op": "call_method", "target": "__reduce__"}),
        lambda h: h["nodes"].insert(1, CALL | {"op": "call_module", "target": "head.nothing"}),
        lambda h: h["nodes"].insert(1, CALL | {"op": "get_attr", "target": "__class__"}),
        lambda h: h["nodes"].insert(1, CALL | {"op": "root", "target": "x"}),
        lambda h: node(h, "placeholder").update(target="x=print(1), *y"),
        lambda h: node(h, "placeholder").update(name="x; import os"),
        lambda h: node(h, "output").update(args={"tuple": [{"node": "nowhere"}]}),
        lambda h: node(h, "output").update(args={"code": "1"}),
        lambda h: h["modules"]["head"].update({"class": "nn.Module"}),
        lambda h: h["modules"]["head"]["arguments"].update(in_features=-1),
        lambda h: h["modules"]["head"]["arguments"].update(in_features=9),
        lambda h: h["modules"]["head"]["arguments"].update(evil=1),
        lambda h: h["modules"].update({"a.__class__": h["modules"]["head"]}),
        lambda h: h["state"].pop(),
        lambda h: h["state"].append(h["state"][0] | {"path": "stem.op.weight.x"}),
        lambda h: h["state"][0].update(tensor=10**9),
        lambda h: h["state"][0].update(path="__class__.x"),
        lambda h: h.update(planned=[["__import__('os')"]]),
        lambda h: h.update(planned=3),
        lambda h: h.update(name="a b"),
        lambda h: h.pop("nodes"),
        lambda h: h.update(nodes=None),
        lambda h: h["nodes"].reverse(),
    ],
)
def test_a_file_made_to_do_harm_is_refused(saved, tmp_path, change):
    _, path = saved
    with pytest.raises(FileError, match="describes no model"):
        nhwc.load(tampered(path, tmp_path, change))


@pytest.mark.parametrize("name", ["nhwc", "torch"])
def test_a_file_of_a_newer_version_says_so_where_it_has_something_new(saved, tmp_path, name):
    def change(header):
        header["modules"]["head"]["arguments"].update(novel=True)
        header["written_with"][name] = "99.1.0"

    with pytest.raises(FileError, match=rf"saved with {name} 99\.1\.0, and has .*'novel'"):
        nhwc.load(tampered(saved[1], tmp_path, change))


@pytest.mark.parametrize("said", [None, 3, {}, {"torch": None}, {"torch": "9" * 10**5}])
def test_a_file_need_not_say_what_it_was_saved_with(saved, tmp_path, said):
    nhwc.load(tampered(saved[1], tmp_path, lambda header: header.update(written_with=said)))


def test_the_vocabulary_reaches_nothing_outside_of_tensors():
    bad = (
        "load",
        "save",
        "from_file",
        "compile",
        "eval",
        "exec",
        "open",
        "apply",
        "import",
        "hook",
    )
    for name in functions():
        assert not any(word in name.rpartition(".")[2].split("_") for word in bad), name
    assert all(issubclass(kind, nn.Module) for kind in modules().values())


@pytest.mark.parametrize("value", [math.inf, -math.inf, 1.5, None, True, "x", slice(1, None), ...])
def test_every_plain_argument_survives(value):
    nested = (value, [value], {"k": value})
    assert from_plain(json.loads(json.dumps(to_plain(nested))), {}) == nested


def test_a_graph_survives_being_plain_values():
    graph = capture(residual()).module
    data, tensors = dump(graph)
    again = restore(json.loads(json.dumps(data)), tensors)
    x = torch.randn(1, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(again(x), graph(x))
    with pytest.raises(Foreign, match="are used"):
        restore(data, [*tensors, torch.zeros(1)])
    with pytest.raises(Foreign, match=f"a tensor {data['state'][-1]['path']} without values"):
        restore(data | {"state": data["state"][:-1]}, tensors[:-1])


class TakesMore(nn.Module):
    """Takes arguments in any number, as Ultralytics' networks do, and reads one."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x, *args, **kwargs):
        return self.conv(x)


def test_arguments_that_nothing_reads_do_not_stand_in_the_way(tmp_path):
    net, x = TakesMore().eval(), torch.rand(1, 3, 8, 8)
    nhwc.save(nhwc.optimize(net, x), tmp_path / "model.nhwc")
    torch.testing.assert_close(nhwc.load(tmp_path / "model.nhwc")(x), net(x))


def test_a_clip_in_channels_last_is_drawn_again(tmp_path):
    """The example of five dimensions stands in the file, and loading plans for it."""
    net = nn.Sequential(nn.Conv3d(3, 4, 3), nn.ReLU()).eval()
    clip = to_format(torch.rand(1, 3, 4, 8, 8), Format.CHANNELS_LAST_3D)
    nhwc.save(nhwc.optimize(net, clip), tmp_path / "model.nhwc")
    loaded = nhwc.load(tmp_path / "model.nhwc")
    torch.testing.assert_close(loaded(clip), net(clip))


def test_a_matrix_in_channels_last_is_foreign():
    with pytest.raises(Foreign, match="2 dimensions that is channels last"):
        Example.of("3x4 float32 channels_last")


@pytest.mark.parametrize("norm_first", [True, False])
@torch.no_grad()
def test_tokens_that_lie_in_another_order_are_drawn_so(tmp_path, norm_first):
    """A sum lies as its first operand does, in a plan of a file, too."""
    net = nn.TransformerDecoderLayer(16, 2, 32, norm_first=norm_first).eval()
    inputs = [torch.randn(2, length, 16).transpose(0, 1) for length in (3, 5)]
    nhwc.save(nhwc.optimize(net, *inputs), tmp_path / "model.nhwc")
    expected, found = net(*inputs), nhwc.load(tmp_path / "model.nhwc")(*inputs)
    torch.testing.assert_close(found, expected)
    assert found.stride() == expected.stride()


@pytest.mark.parametrize("order", ["1,2", "0,0,1", "0,1,3", "-1,0,1"])
def test_an_order_of_other_dimensions_is_foreign(order):
    with pytest.raises(Foreign, match="3 dimensions in the order"):
        Example.of(f"3x4x5 float32 order {order}")


@pytest.mark.parametrize(
    "given",
    [[torch.zeros(1, 3), 2.5], (torch.zeros(2), None), {"a": 1, 3: [True, "x, 'y': [z"]}, [], {},
     ((torch.zeros(1, 3, 4, 4),), [{"a": ()}]), collections.OrderedDict(a=torch.zeros(1))],
)  # fmt: skip
def test_inputs_in_lists_and_dicts_are_read_as_they_were(given):
    read = examples_in(describe((given,))[0])
    drawn = tree_map_only(Example, Example.drawn, read)
    assert signature((drawn,)) == signature((given,))


@pytest.mark.parametrize(
    "text",
    ["", "[", "]", "[7", "[7]]", "[7 8]", "7, 8", "{'a' 7}", "{'a': }", "{a: 7}", "{7.5: 7}",
     "{[1]: 7}", "(7]", "[,]", "[7: 8]", "'a", "['a", "[__import__('os')]", "OrderedDict",
     "OrderedDict[7]", "Sample(7)", "[" * 40 + "]" * 40, "[7, " * 5000, "7'", "['a''b']",
     "{'a', 7}", "1j", "3x-4 float32", "1x" * 16 + "1 float32", "7" + " " * 10_000],
)  # fmt: skip
def test_what_no_input_is_written_as_is_foreign(text):
    with pytest.raises((Foreign, SyntaxError, ValueError, TypeError)):
        examples_in(text)


def test_a_device_that_is_not_here(tmp_path):
    nhwc.save(nn.Conv2d(3, 8, 3).eval(), tmp_path / "net.nhwc")
    with pytest.raises(InputError, match="device 'nowhere' is not usable here"):
        nhwc.load(tmp_path / "net.nhwc", device="nowhere")
    if not torch.backends.mps.is_available():
        with pytest.raises(InputError, match=r"from the 'MPS' backend\. Take another, as cpu\.$"):
            nhwc.load(tmp_path / "net.nhwc", device="mps")


class Pair(NamedTuple):
    mask: torch.Tensor
    score: torch.Tensor


@dataclasses.dataclass
class Found:
    mask: torch.Tensor
    score: torch.Tensor
    where: str = "here"


class Returns(nn.Module):
    """A result of a class of the user's."""

    def __init__(self, kind):
        super().__init__()
        self.conv, self.kind = nn.Conv2d(3, 8, 3), kind

    def forward(self, x):
        y = self.conv(x)
        return {"all": [self.kind(y, score=y.mean((2, 3)))]}


class Passes(nn.Module):
    """A result of a class of the user's that a part of the model makes."""

    def __init__(self, kind):
        super().__init__()
        self.part = Returns(kind)

    def forward(self, x):
        [one] = self.part(x)["all"]
        return {"all": [one], "twice": 2 * one.mask}


@pytest.mark.parametrize("whole", [Returns, Passes])
@pytest.mark.parametrize("kind", [Pair, Found])
@pytest.mark.parametrize("made", [lambda model, x: model, nhwc.optimize])
@torch.no_grad()
def test_named_tuples_and_dataclasses_come_back_plain(tmp_path, whole, kind, made):
    x = torch.rand(1, 3, 8, 8)
    model = whole(kind).eval()
    nhwc.save(made(model, x), tmp_path / "model.nhwc")
    [found] = nhwc.load(tmp_path / "model.nhwc")(x)["all"]
    [expected] = model(x)["all"]
    if kind is Found:
        assert (type(found), found.pop("where")) == (dict, "here")
        found = tuple(found.values())
    assert type(found) is tuple
    torch.testing.assert_close(found, (expected.mask, expected.score))
