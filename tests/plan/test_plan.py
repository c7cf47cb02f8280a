"""The planner: layers and their keys, purity, layouts by cost, what is computed and dropped."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import fx, nn

import nhwc
from nhwc import kernels
from nhwc import plan as plans
from nhwc.formats import Format
from nhwc.graph.modules.layers import Fused
from nhwc.graph.modules.mended import Attention, GlobalResponse
from nhwc.operators.activations import NamedActivation
from nhwc.passes import PASSES, run_passes
from nhwc.plan import Unplannable, make_plan, remake_plan, scene
from nhwc.plan.assigning import assign
from nhwc.plan.implementation import Implementation, Timed
from nhwc.plan.ledger import Ledger
from nhwc.plan.others import kernels_of_others
from nhwc.plan.recognize import layers_of
from nhwc.plan.recording import record
from nhwc.plan.scene import scene_of, why_impure
from nhwc.plan.specs import Convolution
from nhwc.plan.stretch import alone

NCHW, NHWC = Format.CONTIGUOUS, Format.CHANNELS_LAST


def traced(function_or_module):
    if isinstance(function_or_module, nn.Module):
        return fx.symbolic_trace(function_or_module)
    return fx.GraphModule(nn.Module(), fx.Tracer().trace(function_or_module))


@pytest.fixture
def ledger(tmp_path):
    return Ledger(tmp_path / "memory.json")


@pytest.fixture
def image():
    return torch.randn(2, 4, 9, 9)


@fx.wrap
def rolled(x, by):
    """A leaf of the trace that writes into the list it is given, as Swin3D's do."""
    by[0] += x.size(3)
    return x.roll(by, [3])


@torch.no_grad()
@pytest.mark.parametrize("call", [lambda x: rolled(x, [2]), lambda x: rolled(x, by=[2])])
def test_lists_are_new_ones_at_every_call(ledger, image, call):
    graph = traced(call)
    plan = make_plan(graph, (image,), ledger)
    for _ in range(2):
        torch.testing.assert_close(plan.program(image), graph(image))


@fx.wrap
def shifted(x, by):
    """A leaf of the trace that writes into its input without a word, as MViT's do."""
    x[:, :, 1:].add_(by)
    return x


class LooksUp(nn.Module):
    """A model whose floats are indices, as flat patches with their row and column hold them."""

    def __init__(self):
        super().__init__()
        self.table, self.conv = nn.Embedding(4, 8), nn.Conv2d(8, 8, 3)

    def forward(self, x):
        return self.conv(self.table(x[:, 0].long()).permute(0, 3, 1, 2))


@torch.no_grad()
def test_plans_are_timed_on_the_numbers_of_the_example(ledger, monkeypatch):
    assigned = plans._assignments
    monkeypatch.setattr(plans, "_assignments", lambda *given: 2 * assigned(*given))
    model, x = LooksUp(), torch.arange(64.0).view(1, 1, 8, 8) % 4
    plan = make_plan(fx.symbolic_trace(model), (x,), ledger)
    assert len(plan.whole.seconds) >= 2
    torch.testing.assert_close(plan.program(x), model(x))


@torch.no_grad()
def test_writes_that_no_name_tells_of(ledger, image):
    seen = traced(lambda x: (y := x.relu() + 1) * 2 + shifted(y, 1))
    with pytest.raises(Unplannable, match="shifted writes into add, which others may read"):
        make_plan(seen, (image,), ledger)
    before = image.clone()
    with pytest.raises(Unplannable, match="shifted writes into x, which outlives the call"):
        make_plan(traced(lambda x: shifted(x, 1)), (image,), ledger)
    assert torch.equal(image, before)
    unseen = traced(lambda x: shifted(x.relu() + 1, 1) * 2)
    plan = make_plan(unseen, (image,), ledger)
    for _ in range(2):
        torch.testing.assert_close(plan.program(image), unseen(image))


def test_a_run_that_is_recorded_has_inputs_of_its_own_as_they_lie():
    """They have the same strides, and share memory where the given ones do."""
    graph = traced(lambda x, y: (shifted(x, 1), y * 1))
    whole = torch.zeros(2, 6, 9, 9).to(memory_format=torch.channels_last)
    found = record(graph, (whole[:, :2], whole[:, 2:]))
    assert not whole.any()
    assert [(by.name, read.name) for by, read in found.writes] == [("shifted", "x")]
    assert {node.name for node in found.strange} == {"x", "y", "shifted"}


def test_shapes_are_constants_and_data_is_not(image):
    graph = traced(lambda x: x.view(x.size(0), x.shape[1] // 2, -1) * x.sum().item())
    found = record(graph, (image,))
    fixed = {node.name for node in found.fixed}
    assert {"size", "getattr_1", "getitem", "floordiv"} <= fixed
    assert "item" not in fixed
    assert [layer.node.name for layer in layers_of(graph, found)] == [
        "view",
        "sum_1",
        "item",
        "mul",
    ]


@torch.no_grad()
def test_a_plan_computes_what_follows_from_the_data(ledger, image):
    graph = traced(lambda x: x.view(x.size(0), x.shape[1] // 2, -1) * x.sum().item())
    plan = make_plan(graph, (image,), ledger)
    other = torch.randn_like(image)
    torch.testing.assert_close(plan.program(other), graph(other))


@pytest.mark.parametrize(
    ("module", "key"),
    [
        (nn.Conv2d(4, 6, 3), "conv2d 2x4x9x9 w6x4x3x3 s1x1 p0x0 d1x1 g1 bias float32 cpu"),
        (
            nn.Conv2d(4, 6, (3, 5), padding="same", dilation=2, bias=False),
            "conv2d 2x4x9x9 w6x4x3x5 s1x1 p2x4 d2x2 g1 float32 cpu",
        ),
        (
            Fused(nn.Conv2d(4, 4, 1, groups=4), nn.LeakyReLU(0.2)),
            "conv2d 2x4x9x9 w4x1x1x1 s1x1 p0x0 d1x1 g4 bias leaky_relu 0.2 float32 cpu",
        ),
        (Fused(nn.BatchNorm2d(4), nn.ReLU6()), "affine 2x4x9x9 hardtanh 0 6 float32 cpu"),
        (nn.Linear(9, 5), "linear 2x4x9x9 w5x9 bias float32 cpu"),
    ],
)
def test_what_a_layer_is_called_in_the_memory(module, key, image):
    graph = traced_call(module)
    (layer,) = layers_of(graph, record(graph, (image,)))
    assert layer.spec.key == key


@pytest.mark.parametrize(
    "module",
    [
        nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"),
        nn.utils.parametrizations.weight_norm(nn.Conv2d(4, 6, 3)),
        Fused(nn.Conv2d(4, 6, 3), nn.ELU(0.5)),
        nn.ConvTranspose2d(4, 6, 3),
    ],
)
@torch.no_grad()
def test_what_no_kernel_of_ours_computes_is_called_as_it_is(module, ledger, image):
    graph = traced_call(module.eval())
    (layer,) = layers_of(graph, record(graph, (image,)))
    assert layer.op is None
    plan = make_plan(graph, (image,), ledger)
    torch.testing.assert_close(plan.program(image), graph(image))


def traced_call(module):
    root = nn.Module()
    root.part = module.eval()
    graph = fx.Graph()
    graph.output(graph.call_module("part", (graph.placeholder("x"),)))
    return fx.GraphModule(root, graph).eval()


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("activation", [None, nn.ReLU(), nn.ReLU6(), nn.SiLU(), nn.Hardsigmoid()])
@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(4, 8, 3, 2, 1),
        nn.Conv2d(4, 8, 1, bias=False),
        nn.Conv2d(4, 8, (1, 3), padding=(0, 1), groups=2),
        nn.Conv2d(4, 4, 3, padding=2, dilation=2, groups=4),
    ],
)
@torch.no_grad()
def test_every_implementation_computes_the_layer(conv, activation, residual):
    x = torch.randn(2, 4, 7, 6)
    fused = Fused(conv, activation).eval()
    other = torch.randn_like(conv(x))
    inputs = (x, other) if residual else (x,)
    root = nn.Module()
    root.part = fused
    graph = fx.Graph()
    places = [graph.placeholder(f"x{i}") for i in range(len(inputs))]
    graph.output(graph.call_module("part", tuple(places)))
    module = fx.GraphModule(root, graph)
    seen = scene_of(module, inputs)
    (layer,) = seen.layers
    expected = fused(*inputs)
    kept = other.clone()
    for one in seen.implementations[layer.node]:
        run = alone(seen.record, layer, one, seen.constants(layer))
        layout = torch.channels_last if one.reads is NHWC else torch.contiguous_format
        given = [value.contiguous(memory_format=layout) for value in inputs]
        result = run(*given)
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
        assert result.is_contiguous(
            memory_format=torch.channels_last if one.writes is NHWC else layout
        )
        if residual:
            assert torch.equal(given[1], kept)


@torch.no_grad()
def test_a_convolution_may_add_what_it_reads(ledger, image):
    root = nn.Module()
    root.part = Fused(nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.ReLU()).eval()
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_module("part", (x, x)))
    module = fx.GraphModule(root, graph).eval()
    plan = make_plan(module, (image,), ledger)
    torch.testing.assert_close(plan.program(image), module(image), rtol=1e-4, atol=1e-5)
    (timed,) = plan.timings.values()
    assert {one.implementation.name for one in timed} > {"torch"}
    assert any(one.implementation.ours for one in timed) == kernels.available()


@torch.no_grad()
@pytest.mark.parametrize("sizes", [(1, 9), (9, 1)])
def test_an_addition_that_broadcasts_is_left_to_torch(sizes, ledger):
    root = nn.Module()
    root.part = Fused(nn.Conv2d(4, 4, 1), nn.ReLU()).eval()
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    graph.output(graph.call_module("part", (x, y)))
    module = fx.GraphModule(root, graph).eval()
    inputs = [torch.randn(2, 4, size, size) for size in sizes]
    plan = make_plan(module, inputs, ledger)
    torch.testing.assert_close(plan.program(*inputs), module(*inputs))


@torch.no_grad()
def test_a_module_may_have_two_names(ledger, image):
    root = nn.Module()
    root.one = root.other = nn.Conv2d(4, 4, 3).eval()
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_module("other", (graph.call_module("one", (x,)),)))
    module = fx.GraphModule(root, graph).eval()
    plan = make_plan(module, (image,), ledger)
    torch.testing.assert_close(plan.program(image), module(image), rtol=1e-4, atol=1e-5)


class Volumes(nn.Module):
    """What video models are made of."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv3d(3, 8, (1, 3, 3), (1, 2, 2), (0, 1, 1))
        self.second = nn.Conv3d(8, 8, 3, padding="same", groups=2)
        self.pool = nn.MaxPool3d(2)

    def forward(self, x):
        y = torch.relu(self.first(x))
        y = self.pool(torch.relu(self.second(y) + y))
        return y.flatten(1)


@pytest.mark.parametrize("looks", [False, True])
@torch.no_grad()
def test_volumes_are_convolved_by_any_kernel(looks, ledger):
    model = Volumes().eval()
    graph = nhwc.graph.capture(model).module
    run_passes(graph, PASSES)
    if looks:
        flat = graph.graph.find_nodes(op="call_method", target="flatten")[0]
        flat.target, flat.args = "view", (flat.args[0], 2, -1)
        graph.recompile()
    x = torch.randn(2, 3, 6, 12, 10)
    seen = scene_of(graph, (x,))
    layers = [layer for layer in seen.layers if isinstance(layer.spec, Convolution)]
    assert [layer.spec.key.split()[0] for layer in layers] == ["conv3d", "conv3d"]
    assert [layer.spec.residual for layer in layers] == [False, True]
    for layer in layers:
        constants = seen.constants(layer)
        made = {node: torch.randn(seen.record.values[node].shape) for node in layer.inputs}
        inputs = [made[node] for node in layer.inputs]
        results = {
            one.label: alone(seen.record, layer, one, constants)(*inputs)
            for one in seen.implementations[layer.node]
        }
        for name, result in results.items():
            torch.testing.assert_close(result, results["torch contiguous"], rtol=1e-4, atol=1e-5)
            if "channels_last" in name:
                assert result.stride(1) == 1, name
        assert {"onednn channels_last", "nhwc direct channels_last"} <= set(results)
    plan = make_plan(graph, (x,), ledger)
    torch.testing.assert_close(plan.program(x), model(x), rtol=1e-4, atol=1e-5)


SHUFFLES = [
    nn.PixelShuffle(2),
    nn.PixelUnshuffle(2),
    lambda x: nn.functional.pixel_shuffle(x, 2),
    lambda x: torch.pixel_unshuffle(input=x, downscale_factor=2),
]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("shuffle", SHUFFLES)
@torch.no_grad()
def test_shuffles_take_volumes_as_a_plan_lays_them(shuffle, channels):
    """Torch's own refuse volumes that lie channels last, by strides that one channel may have."""
    x = torch.randn(2, channels, 4, 6, 8)
    module = isinstance(shuffle, nn.Module)
    seen = scene_of(traced(nn.Sequential(shuffle) if module else shuffle), (x,))
    (layer,) = seen.layers
    run = seen.called(layer, None, None).prepare()
    last = torch.empty(x.shape, memory_format=torch.channels_last_3d).copy_(x)
    assert torch.equal(run(last), shuffle(x))


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda x: x.relu_(), "writes into x, which outlives the call"),
        (lambda x: (y := x + 1).add_(1) + y, "writes into add, which others may read"),
        (lambda x: (x + 1)[:, :2].mul_(2), "writes into getitem, which others may read"),
        # Also what is read before: a step may be joined with a later one.
        (lambda x: (y := x + 1) * 2 + y.relu_(), "writes into add, which others may read"),
        (lambda x: torch.relu_(torch.flatten(x, 1)), "writes into flatten"),
        (lambda x: nn.functional.relu(x, True), "writes into x"),
        (lambda x: torch.add(x, 1, out=x), "writes into x"),
    ],
)
def test_graphs_that_write_into_shared_values_are_not_planned(function, says, ledger, image):
    graph = traced(function)
    assert says in why_impure(graph)
    with pytest.raises(Unplannable, match=says):
        make_plan(graph, (image,), ledger)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.permute(0, 3, 1, 2).float().div_(255).sub_(0.5).div_(0.25),
        lambda x: x.to(torch.float32).mul_(2),
        lambda x: x.unsqueeze(0).contiguous().type(torch.float32)[0].add(1).relu_(),
    ],
)
def test_bytes_that_became_floats_are_new_numbers(function, ledger):
    graph = traced(function)
    bytes_ = torch.randint(0, 256, (2, 6, 8, 3), dtype=torch.uint8)
    program = make_plan(graph, (bytes_,), ledger).program
    before = bytes_.clone()
    torch.testing.assert_close(program(bytes_), graph(bytes_))
    assert torch.equal(bytes_, before)


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (lambda x: x.float().div_(255), torch.float32),
        (lambda x: x.to(torch.float64).mul_(2), torch.float64),
        (lambda x: x.view(torch.float32).mul_(2), torch.int32),
    ],
)
def test_what_may_be_the_input_itself_is_not_written_into(function, kind, ledger):
    x = torch.randint(0, 256, (2, 3, 6, 8)).to(kind)
    with pytest.raises(Unplannable, match="which others may read"):
        make_plan(traced(function), (x,), ledger)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x + 1).relu_(),
        lambda x: nn.functional.relu(x + 1, inplace=True),
        lambda x: (x * 2).add_(x),
    ],
)
@torch.no_grad()
def test_writing_into_what_nobody_else_sees_is_planned(function, ledger, image):
    graph = traced(function)
    plan = make_plan(graph, (image,), ledger)
    kept = image.clone()
    torch.testing.assert_close(plan.program(image), graph(image))
    assert torch.equal(image, kept)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@torch.no_grad()
def test_what_is_put_back_into_an_input_is_there_after_a_call(layout, ledger, image):
    convolution = nn.Conv2d(image.shape[1], 4, 3)

    class Scales(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution = convolution

        def forward(self, x):
            scaled = x * 2 + 1
            result = torch.relu(self.convolution(scaled))
            x.copy_(scaled)
            return result

    graph = traced(Scales())
    plan = make_plan(graph, (image,), ledger)
    for _ in range(2):  # A program that kept what it was given would answer alike.
        given, expected = (torch.randn_like(image, memory_format=layout) for _ in range(2))
        expected.copy_(given)
        strides = given.stride()
        torch.testing.assert_close(plan.program(given), graph(expected), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(given, expected)
        assert given.stride() == strides


def chain(count=3):
    """The scene of so many convolutions in a row."""
    graph = traced(nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(count))))
    return scene_of(graph, (torch.randn(1, 4, 8, 8),))


def alike(seen, *kernels):
    """The same timings for every layer: of each kernel its name, layouts and seconds."""
    timed = tuple(Timed(Implementation(*kernel), seconds) for *kernel, seconds in kernels)
    return {layer.node: timed for layer in seen.layers}


@pytest.mark.parametrize(
    ("nchw", "nhwc", "copy", "expected"),
    [
        (1.0, 2.0, 0.1, NCHW),
        (2.0, 1.0, 0.1, NHWC),
        (1.1, 1.0, 0.1, NHWC),  # 0.3 saved in three layers, 0.1 paid once.
        (1.1, 1.0, 0.9, NCHW),
    ],
)
def test_layouts_follow_cost_conversions_counted(nchw, nhwc, copy, expected):
    seen = chain()
    timings = alike(seen, ("a", NCHW, NCHW, nchw), ("b", NHWC, NHWC, nhwc))
    choice = assign(seen, timings, lambda value: copy)
    assert {timed.implementation.reads for timed in choice.values()} == {expected}


def test_a_kernel_may_convert_on_the_way():
    seen = chain()
    kernels = [("plain", NCHW, NCHW, 1.0), ("last", NHWC, NHWC, 0.5), ("bridge", NCHW, NHWC, 0.6)]
    choice = assign(seen, alike(seen, *kernels), lambda value: 0.3)
    chosen = [choice[layer.node].implementation.name for layer in seen.layers]
    assert chosen == ["bridge", "last", "last"]


def test_two_that_are_slower_by_less_than_the_way_out_and_back_stay_together_with_ours():
    seen = chain(4)
    ours = Implementation("ours", NHWC, NHWC, emit=lambda *given: None)
    torchs = Implementation("torch", NHWC, NHWC)
    first, *middle, last = (layer.node for layer in seen.layers)
    timings = {node: (Timed(ours, 1.0),) for node in (first, last)}
    timings |= {node: (Timed(torchs, 1.0), Timed(ours, 1.3)) for node in middle}
    copy = lambda value: 0.0
    # One of them alone would move the border; only both make it go.
    choice = assign(seen, timings, copy, switch=0.5)
    assert {timed.implementation for timed in choice.values()} == {ours}
    choice = assign(seen, timings, copy, switch=0.2)
    assert [choice[node].implementation for node in middle] == [torchs, torchs]


def test_a_second_plan_asks_the_memory(ledger):
    graph = chain().graph
    x = torch.randn(1, 4, 8, 8)
    first = make_plan(graph, (x,), ledger)
    assert first.measured > 0
    ledger.save()
    known = Ledger(ledger.path)
    again = make_plan(graph, (x,), known)
    assert again.measured == known.measured == 0
    assert again.kernels == first.kernels


@pytest.mark.parametrize("rubbish", [[], [{}], "x", [{"kernel": "torch"}], 3])
def test_a_memory_of_rubbish_is_measured_over(rubbish, ledger):
    graph = chain(1).graph
    x = torch.randn(1, 4, 8, 8)
    make_plan(graph, (x,), ledger)
    for key in list(ledger._new):
        ledger.put(key, rubbish)
    plan = make_plan(graph, (x,), ledger)
    assert plan.program(x).shape == (1, 4, 8, 8)


def test_kernels_that_are_no_more_are_measured_over(ledger):
    graph, x = chain(1).graph, torch.randn(1, 4, 8, 8)
    make_plan(graph, (x,), ledger)
    gone = {"kernel": "nhwc fastest", "reads": None, "writes": None, "s": 0.0}
    for key in [key for key in ledger._new if key.startswith("conv2d")]:
        ledger.put(key, [gone])
    assert "nhwc fastest" not in names(make_plan(graph, (x,), ledger).timings)


@torch.no_grad()
def test_layers_that_only_look_alike_are_timed_apart(ledger, image):
    net = nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.MaxPool2d(3, 1, 1))
    net[0].register_forward_hook(lambda module, given, result: 2 * result)
    graph = fx.symbolic_trace(net)
    plan = make_plan(graph, (image,), ledger)
    hooked, plain = plan.timings.values()
    assert {one.implementation.ours for one in hooked} == {False}
    assert any(one.implementation.ours for one in plain) == kernels.available()
    torch.testing.assert_close(plan.program(image), net(image))


@torch.no_grad()
def test_equal_layers_whose_answers_lie_differently_are_timed_apart(ledger, image):
    image = nhwc.to_format(image, NHWC)
    graph = traced(lambda x: (x.roll(1, 2), x.contiguous().roll(1, 2)))
    plan = make_plan(graph, (image,), ledger)
    torch.testing.assert_close(plan.program(image), graph(image))


@torch.no_grad()
def test_a_plan_made_again_has_the_graphs_new_weights(ledger):
    graph = chain().graph
    x = torch.randn(1, 4, 8, 8)
    plan = make_plan(graph, (x,), ledger)
    old = plan.program(x)
    for parameter in graph.parameters():
        parameter.mul_(0.5)
    new = remake_plan(graph, (x,), plan.kernels)(x)
    torch.testing.assert_close(new, graph(x))
    assert not torch.allclose(new, old)
    with pytest.raises(Unplannable, match="not those that were planned"):
        remake_plan(graph, (torch.randn(1, 4, 9, 9),), plan.kernels)


@torch.no_grad()
def test_results_nobody_reads_are_not_computed(ledger, image):
    graph = traced(lambda x: (x.exp(), x.sin())[1])
    plan = make_plan(graph, (image,), ledger)
    assert [step.name for step in plan.program.steps if "planned" not in step.name] == ["sin"]


def names(timings):
    return {one.implementation.name for timed in timings.values() for one in timed}


def test_exact_leaves_out_what_is_not(ledger, monkeypatch):
    def more(layer):
        good = kernels_of_others(layer)
        return (*good, replace(good[-1], name="loose", exact=False))

    monkeypatch.setattr(scene, "kernels_of_others", more)
    graph, x = chain(1).graph, torch.randn(1, 4, 8, 8)
    assert "loose" in names(make_plan(graph, (x,), ledger).timings)
    assert "loose" not in names(make_plan(graph, (x,), ledger, exact=True).timings)


def test_a_kernel_that_computes_something_else_is_never_chosen(ledger, monkeypatch):
    def more(layer):
        wrong = lambda weight, bias: lambda x: torch.zeros(1, 4, 8, 8)
        good = kernels_of_others(layer)
        return (*good, Implementation("wrong", NHWC, NHWC, wrong))

    monkeypatch.setattr(scene, "kernels_of_others", more)
    plan = make_plan(chain(1).graph, (torch.randn(1, 4, 8, 8),), ledger)
    assert "wrong" not in names(plan.timings)


def test_a_key_says_all_that_speed_depends_on():
    base = {
        "input": (1, 4, 8, 8), "weight": (4, 4, 3, 3), "stride": (1, 1), "padding": (1, 1),
        "dilation": (1, 1), "groups": 1, "bias": True, "residual": False, "activation": None,
        "dtype": torch.float32, "device": "cpu",
    }  # fmt: skip
    changes = [
        {}, {"input": (2, 4, 8, 8)}, {"weight": (8, 4, 3, 3)}, {"stride": (2, 2)},
        {"padding": (0, 0)}, {"dilation": (2, 2)}, {"groups": 2}, {"bias": False},
        {"residual": True}, {"dtype": torch.float64}, {"device": "cuda:0"},
        {"behind": (2, 1)}, {"held": True}, {"activation": NamedActivation("leaky_relu", (0.1,))},
        {"activation": NamedActivation("leaky_relu", (0.2,))},
    ]  # fmt: skip
    keys = {Convolution(**(base | change)).key for change in changes}
    assert len(keys) == len(changes)


class OwnPool(nn.AvgPool2d):
    """Takes other arguments than the layer that it is."""

    def __init__(self, rounds_up):
        super().__init__(2, ceil_mode=rounds_up)


@pytest.mark.parametrize(
    ("kind", "one", "other"),
    [
        (Attention, {"heads": 2}, {"heads": 4}),
        (Attention, {"heads": 2}, {"heads": 2, "first": 1}),
        (Attention, {"heads": 2}, {"heads": 2, "batch_first": False}),
        (GlobalResponse, {"channels": 4}, {"channels": 4, "batched": True}),
        (nn.AvgPool2d, {"kernel_size": 2}, {"kernel_size": 2, "ceil_mode": True}),
        (nn.AvgPool2d, {"kernel_size": 2}, {"kernel_size": 2, "divisor_override": 3}),
        (OwnPool, {"rounds_up": False}, {"rounds_up": True}),
        (
            partial(nn.Upsample, scale_factor=2, mode="bilinear"),
            {"align_corners": False},
            {"align_corners": True},
        ),
    ],
)
def test_operators_that_differ_in_a_setting_have_keys_of_their_own(kind, one, other, image):
    """One that computes its first tokens alone was timed for all others of its shape."""
    keys = set()
    for settings in (one, other):
        graph = traced_call(kind(**settings))
        seen = record(graph, (torch.randn(2, 4, 24),) if kind is Attention else (image,))
        keys |= {layer.spec.key for layer in layers_of(graph, seen)}
    assert len(keys) == 2
