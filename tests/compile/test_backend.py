"""torch.compile with nhwc behind it answers as the model does, whatever Dynamo makes of that."""

import contextlib
import copy
import gc
import inspect
import pickle
import sys
import threading
import warnings
import weakref
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import same
from torch.utils._pytree import tree_leaves

import nhwc
from nhwc._compile import core, planned
from nhwc._compile.behaviour import Unserved, behaviour
from nhwc._optimize import stages
from nhwc.graph.effects.replaced import replaced

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    torch.compiler.reset()
    torch.manual_seed(0)
    # These models are so small that a plan may not pay, and a busy machine may call it slower.
    monkeypatch.setattr(planned, "_seconds", lambda look: float("-inf"))
    monkeypatch.setattr(stages, "winner", lambda compared: ([*compared][-1], ""))
    yield
    torch.compiler.reset()


class Two(nn.Module):
    """Two convolutions, and what a model may have besides."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 1)
        self.norm = nn.BatchNorm2d(4)
        self.last = nn.Conv2d(4, 4, 1)
        self.register_buffer("count", torch.zeros(()))
        self.table = torch.arange(4.0).reshape(4, 1, 1)

    def forward(self, x):
        return self.last(self.norm(self.first(x)).relu())


class Branches(Two):
    def forward(self, x):
        y = self.first(x)
        y = y + 1 if y.sum() > 0 else y - 1
        return self.last(y)


class WritesItsInput(Two):
    def forward(self, x):
        x.mul_(2)
        return super().forward(x)


class WritesAfterABreak(Two):
    def forward(self, x):
        y = self.first(x)
        torch._dynamo.graph_break()
        return self.last(F.relu(y, inplace=True)), y


class KeepsWhatIsWrittenInto(Two):
    """Features that are taken before the next layer writes into them."""

    def forward(self, x):
        y = self.first(x)
        z = self.last(F.relu(y, inplace=True))
        return z, z + y[:, :1]


class WritesInItsMidst(Two):
    def forward(self, x):
        y = self.first(x)
        y[:, :2] += 1
        y[y < 0.3] = 0
        y[..., 0].mul_(2)
        shifted = torch.zeros_like(y)
        shifted[:, :2], shifted[:, 2:, 1:] = y[:, 2:], y[:, :2, :-1]
        shifted[0, -1, ..., ::2] = x[0, 0, :8, :4]
        return self.last(shifted), y


class WritesWhereAViewIsReadLater(Two):
    def forward(self, x):
        y = self.first(x)
        part = y[:, 2:]
        y[:, 1:3] = 1
        return self.last(y + part.mean())


class ReturnsAPartThatItWroteInto(Two):
    """Made anew, the part would lie in memory without gaps."""

    def forward(self, x):
        part = torch.cat([self.first(x), x], 1)[:, :4]
        part.relu_()
        return self.last(part), part


class WritesIntoAPartOfItsInput(Two):
    def forward(self, x):
        y = self.first(x)
        x[:, :1] = y[:, :1, :1, :1]
        return self.last(self.first(x))


class WritesAtItsEnd(Two):
    def forward(self, x):
        y = self.last(self.first(x))
        y[:, :2] = 3
        return y, x


class WritesBehind(Two):
    """What the second write writes to is read behind the first one."""

    def forward(self, x):
        y = super().forward(x)
        x.mul_(2)
        z = x + self.count
        self.count.add_(1)
        return y, z


class WritesSeveralAtOnce(Two):
    """One of them is read by layers before."""

    def forward(self, x):
        y = super().forward(x)
        torch._foreach_mul_([self.count, x], 2.0)
        return y


class ScalesItsInput(Two):
    """A weight of no matrix is no layer."""

    def forward(self, x):
        x.mul_(self.last.bias.sum())
        return super().forward(x)


class Counts(Two):
    def forward(self, x):
        self.count += 1
        return super().forward(x) * self.count


class CountsPastVersions(Two):
    """What is written to `data` raises no version of the buffer's own."""

    def forward(self, x):
        self.count.data.add_(1)
        return super().forward(x) * self.count


class FillsWhatIsEmpty(Two):
    """As one joins channels or polyphase parts, without `cat`."""

    def forward(self, x):
        y = self.first(x)
        out = torch.empty(2, 8, 8, 8)
        out[:, :4], out[:, 4:] = y, self.last(y)
        like = torch.empty_like(y)
        halves = like.chunk(2, 1)
        halves[0].copy_(y[:, :2])
        halves[1].copy_(y[:, 2:])
        return out, like, torch.add(y, 1, out=x.new_empty(2, 4, 8, 8)) + 1


class ReturnsViews(Two):
    def forward(self, x):
        y = self.last(self.first(x))
        a, b = y.chunk(2, 1)
        return y, y.flatten(1), a, b, x, x[:, :1], self.last.weight.view(-1), {"t": y.mT}


class AsksForSizes(Two):
    def forward(self, x):
        y = super().forward(x)
        return y.view(y.shape[0], -1), y.shape[0], x.shape[2] * 2


class SetsContexts(Two):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            y = self.first(x)
        with torch.no_grad():
            y = self.last(y.float())
        return y + self.table


class Sorts(Two):
    def forward(self, x):
        values, places = super().forward(x).flatten(1).topk(3)
        return values, places, values > 0


class InBfloat16(Two):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = self.first(x)
        return self.last(y.float())


class DropsOut(Two):
    def forward(self, x):
        return self.last(F.dropout(self.first(x)))


class NeedsNoInput(Two):
    """As a generator of one image."""

    def __init__(self):
        super().__init__()
        self.latent = nn.Parameter(torch.randn(1, 3, 8, 8))

    def forward(self, x):
        return super().forward(self.latent)


class ReturnsWhatItTurns(Two):
    def forward(self, x):
        return super().forward(x).transpose_(2, 3)


class Unravels(Two):
    """Torch returns the columns of one tensor."""

    def forward(self, x):
        return super().forward(x), *torch.unravel_index(torch.arange(3), (2, 2))


class Conditional(Two):
    def forward(self, x):
        y = self.first(x)
        return torch.cond(y.sum() > 0, torch.sin, torch.cos, (self.last(y),))


PLANNED = (
    *(Two, Branches, WritesItsInput, WritesAfterABreak, WritesAtItsEnd, Counts, ReturnsViews),
    *(AsksForSizes, SetsContexts, Sorts, KeepsWhatIsWrittenInto, CountsPastVersions),
    *(WritesBehind, WritesSeveralAtOnce, ScalesItsInput, FillsWhatIsEmpty),
    WritesInItsMidst,
)
LEFT = {
    WritesWhereAViewIsReadLater: "setitem writes into",
    WritesIntoAPartOfItsInput: "setitem writes into",
    ReturnsAPartThatItWroteInto: "relu_ writes into",
    InBfloat16: "_enter_autocast, which changes how torch computes",
    DropsOut: "it draws random numbers",
    Conditional: "cond, which runs graphs of its own",
    NeedsNoInput: "it has no input but weights",
    ReturnsWhatItTurns: "what it returns lies in memory that it wrote to",
    Unravels: "what it returns shares memory, and not by views alone",
}


def answers(kind):
    """A compiled model and the model itself, held against one another; the backend."""
    model = kind().eval()
    own = copy.deepcopy(model)
    backend = nhwc.backend()
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        for size in (8, 8, 6) if kind in (AsksForSizes, ReturnsViews) else (8, 8):
            x = torch.randn(2, 3, size, size)
            given = x.clone()
            torch.manual_seed(1)
            found = compiled(x)
            torch.manual_seed(1)
            wanted = own(given)
            assert torch.equal(x, given)
            assert torch.equal(model.count, own.count)
            assert_alike(found, wanted)
            # Whoever writes into what is returned sees it in what shares memory with that.
            for one in (tree_leaves(found), tree_leaves(wanted)):
                one[0].add_(1)
            assert_alike(found, wanted)
    return backend


def assert_alike(found, wanted):
    pairs = list(zip(tree_leaves(found), tree_leaves(wanted), strict=True))
    for one, other in pairs:
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
            assert one.stride() == other.stride()
        else:
            assert one == other


@pytest.mark.parametrize("kind", PLANNED)
def test_what_is_planned_answers_as_the_model(kind):
    reports = [graph.reports for graph in answers(kind).graphs]
    assert any(reports)
    assert {one.chosen for some in reports for one in some} == {"plan"}


IN_PLACE = [
    kind
    for kind in (getattr(nn, name) for name in nn.modules.activation.__all__)
    if "inplace" in inspect.signature(kind).parameters
]


@pytest.mark.parametrize("kind", IN_PLACE)
def test_activations_in_place_are_no_names_for_their_input(kind):
    """Torch's modules hand `inplace` to its functions by name, or by place."""
    needed = (0.1, 20.0) if kind is nn.Threshold else ()
    model = nn.Sequential(nn.Conv2d(3, 4, 1), kind(*needed, inplace=True), nn.Conv2d(4, 4, 1))
    compiled, x = torch.compile(model.eval(), backend="nhwc"), 5 * torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        assert_alike(compiled(x), model(x))


def test_a_part_that_was_cut_out_wrongly_is_not_used(monkeypatch):
    """What is verified is the part; so the part is held against the graph first."""
    monkeypatch.setattr(core, "_acts", lambda node: False)
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU6(inplace=True), nn.Conv2d(4, 4, 1)).eval()
    compiled, x = torch.compile(model, backend="nhwc"), torch.randn(2, 3, 8, 8)
    with torch.no_grad(), pytest.warns(match="the part to plan does not answer as the graph does"):
        assert_alike(compiled(x), model(x))


@pytest.mark.parametrize("kind", LEFT)
def test_what_no_plan_does_is_left_to_torch(kind):
    backend = answers(kind)
    assert [graph.reports for graph in backend.graphs] == [()] * len(backend.graphs)
    assert all(LEFT[kind] in graph.reason for graph in backend.graphs)


@pytest.mark.parametrize("probability", [0.0, 0.1])
def test_attention_draws_random_numbers_where_it_drops(probability):
    """As on a GPU, where one operator attends and drops."""
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    graph = fx.symbolic_trace(lambda x: attend(x, x, x, dropout_p=probability)[0])
    left = pytest.raises(Unserved, match="draws random numbers")
    with left if probability else contextlib.nullcontext():
        behaviour(graph, [torch.ones(1, 2, 4, 8)])


@pytest.mark.parametrize("train", [False, True])
def test_a_recurrent_layer_may_be_in_training_mode(train):
    def run(x, h, w, u, b):
        return torch.lstm(x, (h, h), (w, u, b, b), True, 1, 0.0, train, False, False)

    sizes = ((5, 2, 3), (1, 2, 4), (16, 3), (16, 4), (16,))
    left = pytest.raises(Unserved, match="training mode")
    with left if train else contextlib.nullcontext():
        behaviour(fx.symbolic_trace(run), [torch.ones(size) for size in sizes])


@pytest.mark.parametrize(
    "norm", [nn.InstanceNorm2d(4), nn.BatchNorm2d(4, track_running_stats=False)]
)
def test_a_norm_without_statistics_is_in_no_training_mode(norm):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.Conv2d(4, 4, 1)).eval()
    x, backend = torch.randn(2, 3, 8, 8), nhwc.backend()
    with torch.no_grad():
        found = torch.compile(model, backend=backend)(x)
        torch.testing.assert_close(found, model(x))
    assert [len(graph.reports) for graph in backend.graphs] == [1]


def test_a_layer_has_the_users_name():
    backend = nhwc.backend()
    with torch.no_grad():
        torch.compile(nn.Sequential(Two()).eval(), backend=backend)(torch.randn(2, 3, 8, 8))
    [graph] = backend.graphs
    assert graph.place.endswith(" in forward")
    [plan] = graph.reports[0].plans
    assert [layer.name for layer in plan.layers] == ["0_first", "0_last"]


class Gates(Two):
    def forward(self, x):
        y = self.first(x)
        return self.last(y * (y > 0))


def test_what_decides_between_layers_leaves_these_in_the_plan():
    backend = nhwc.backend()
    with torch.no_grad():
        torch.compile(Gates().eval(), backend=backend)(torch.randn(2, 3, 8, 8))
    [plan] = backend.graphs[0].reports[0].plans
    assert {"first", "last"} <= {layer.name for layer in plan.layers}


def test_weights_are_those_of_now():
    model, backend = Two().eval(), nhwc.backend()
    compiled = torch.compile(model, backend=backend)
    x = torch.randn(2, 3, 8, 8)
    other = {name: value + 1 for name, value in model.state_dict().items()}
    changes = (
        lambda: model.first.weight.mul_(2),
        lambda: model.load_state_dict(other),
        lambda: model.load_state_dict({k: v * 2 for k, v in other.items()}, assign=True),
        lambda: model.norm.running_mean.add_(1),
        lambda: setattr(model.last.bias, "data", torch.ones(4)),
        lambda: setattr(model, "last", nn.Conv2d(4, 4, 1)),
        lambda: model.first.weight.data.mul_(3),
    )
    with torch.no_grad():
        compiled(x)
        for change in changes:
            change()
            for _ in range(2):
                torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    assert len(backend.graphs[0].reports) > 3


@torch.no_grad()
def test_weights_of_one_call_are_not_packed_each_time():
    model, backend = Two().eval(), nhwc.backend()
    call = lambda weights, x: torch.func.functional_call(model, weights, x)
    compiled, x = torch.compile(call, backend=backend), torch.randn(2, 3, 8, 8)
    for factor in range(1, 5):
        weights = {n: nn.Parameter(factor * p) for n, p in model.named_parameters()}
        assert_alike(compiled(weights, x), call(weights, x))
    [graph] = backend.graphs
    assert len(graph.reports) == 1


def test_a_graph_serves_all_modules_that_share_it():
    blocks = nn.ModuleList(Two() for _ in range(2)).eval()
    backend = nhwc.backend()
    compiled = [torch.compile(block, backend=backend) for block in blocks]
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        for _ in range(3):
            for block, fast in zip(blocks, compiled, strict=True):
                torch.testing.assert_close(fast(x), block(x), rtol=1e-4, atol=1e-4)
    assert sum(len(graph.reports) for graph in backend.graphs) == 2


def test_shapes_beyond_the_bound_run_the_graph():
    model, backend = Two().eval(), nhwc.backend()
    compiled = torch.compile(model, backend=backend, dynamic=True)
    with torch.no_grad():
        for size in range(4, 10):
            x = torch.randn(2, 3, size, size)
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    [graph] = backend.graphs
    assert len(graph.reports) == 4
    assert graph.reason == "it has met 4 sets of shapes, and is planned for no more"


class Head(nn.Module):
    """As SegFormer's: tokens of two sizes become images of the larger, and are mixed."""

    def __init__(self):
        super().__init__()
        self.lift = nn.ModuleList([nn.Linear(8, 64), nn.Linear(16, 64)])
        self.fuse = nn.Conv2d(128, 64, 1)

    def forward(self, wide, deep):
        images = []
        for lift, x in zip(self.lift, (wide, deep), strict=True):
            tokens = lift(x.flatten(2).transpose(1, 2)).transpose(1, 2)
            image = tokens.reshape(x.shape[0], -1, *x.shape[2:])
            images.append(F.interpolate(image, wide.shape[2:], mode="bilinear"))
        return self.fuse(torch.cat(images, 1)).relu()


@torch.no_grad()
@pytest.mark.parametrize("dynamic", [False, True])
def test_passes_know_the_sizes_that_dynamo_made_numbers(dynamic):
    model, backend = Head().eval(), nhwc.backend()
    compiled = torch.compile(model, backend=backend, dynamic=dynamic)
    for wide, deep in ((8, 2), (4, 8), (6, 3)):
        x, y = torch.randn(2, 8, wide, wide), torch.randn(2, 16, deep, deep)
        torch.testing.assert_close(compiled(x, y), model(x, y), rtol=1e-4, atol=1e-4)
    reports = [report for graph in backend.graphs for report in graph.reports]
    passes = [{one.name: len(one.applied) for one in report.passes} for report in reports]
    moved = [(one["move_mixing"], one["fold_mixing"]) for one in passes]
    # What is made smaller is mixed afterwards, with what keeps its size.
    assert moved == [(2, 2), (1, 0), (2, 2)]


def test_a_plan_that_does_not_pay_is_not_used(monkeypatch):
    monkeypatch.setattr(planned, "_seconds", lambda look: 1e9)
    model, backend = Two().eval(), nhwc.backend()
    compiled = torch.compile(model, backend=backend)
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        assert torch.equal(compiled(x), model(x))
    [graph] = backend.graphs
    assert "gains less than it takes" in graph.reason


def test_what_never_comes_again_is_not_planned_for():
    """A conjugated tensor is stored with other numbers, so no plan is found by its key."""
    model = nn.Sequential(Imaginary(), Two()).eval()
    backend = nhwc.backend()
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        for _ in range(2):
            x = torch.randn(2, 3, 8, 8, dtype=torch.complex64).conj()
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    [graph] = backend.graphs
    assert (graph.reports, graph.reason) == ((), "an input is no plain tensor")


class Imaginary(nn.Module):
    def forward(self, x):
        return x.imag


def test_a_batch_of_no_image_runs_the_graph():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)).eval()
    backend = nhwc.backend()
    compiled = torch.compile(model, backend=backend, dynamic=False)
    with torch.no_grad():
        assert compiled(torch.randn(0, 3, 8, 8)).shape == (0, 4, 8, 8)
    assert backend.graphs[0].reason == "an input has no numbers"


class Looks(Two):
    """Up in a table, which has four rows."""

    def forward(self, x):
        rows = self.first.weight.flatten(1)[x]
        return self.last(rows.view(-1, 1, 1, 1).expand(-1, 4, 1, 1)), rows


@torch.no_grad()
def test_a_first_call_that_fails_is_no_reason_against_a_plan():
    model, backend = Looks().eval(), nhwc.backend()
    compiled = torch.compile(model, backend=backend)
    for _ in range(2):
        with pytest.raises(IndexError):
            compiled(torch.tensor([0, 4]))
    assert_alike(compiled(torch.tensor([0, 3])), model(torch.tensor([0, 3])))
    assert backend.graphs[0].reports
    with pytest.raises(IndexError):
        compiled(torch.tensor([0, 4]))


class ReturnsItsInputDoubled(Two):
    def forward(self, x):
        return super().forward(x), x * 2


@torch.no_grad()
def test_strides_follow_those_of_the_input_where_no_guard_asks_for_them():
    model = ReturnsItsInputDoubled().eval()
    unguarded = {"guard_filter_fn": lambda guards: [False for _ in guards]}
    compiled = torch.compile(model, backend=nhwc.backend(), options=unguarded)
    x = torch.randn(2, 3, 8, 8)
    for one in (x, x.to(memory_format=torch.channels_last), x):
        assert_alike(compiled(one), model(one))


class ToAPower(Two):
    def forward(self, x):
        return 2 ** -super().forward(x)


class OverASideOfOne(Two):
    def forward(self, x):
        y = super().forward(x)
        return torch.einsum("bchw,bdhw->bcd", y, y[:, :1])


@torch.no_grad()
@pytest.mark.parametrize("kind", [ToAPower, OverASideOfOne])
def test_strides_are_those_of_real_tensors_where_fake_ones_have_others(kind):
    model, backend = kind().eval().to(memory_format=torch.channels_last), nhwc.backend()
    x = torch.randn(1, 3, 8, 8).to(memory_format=torch.channels_last)
    assert_alike(torch.compile(model, backend=backend)(x), model(x))
    assert backend.graphs[0].reports


class WritesBetween(Two):
    """What it reads first may lie in what it writes to."""

    def forward(self, x, y):
        z = y + 1
        x.mul_(2)
        return super().forward(x) + super().forward(z)


@torch.no_grad()
def test_inputs_that_overlap_run_the_graph_that_writes():
    model, backend = WritesBetween().eval(), nhwc.backend()
    compiled, x = torch.compile(model, backend=backend), torch.randn(3, 3, 8, 8)
    assert_alike(compiled(x[:1].clone(), x[2:]), model(x[:1].clone(), x[2:]))
    assert backend.graphs[0].reports
    found, wanted = x.clone(), x.clone()
    assert_alike(compiled(found[:1], found[:1]), model(wanted[:1], wanted[:1]))
    assert_alike(compiled(found[:2], found[1:]), model(wanted[:2], wanted[1:]))
    torch.testing.assert_close(found, wanted)


@torch.no_grad()
def test_an_input_of_a_fixed_address_is_no_weight():
    model, backend = Two().eval(), nhwc.backend()
    compiled, x = torch.compile(model, backend=backend), torch.randn(2, 3, 8, 8)
    torch._dynamo.mark_static_address(x)
    for _ in range(2):
        assert_alike(compiled(x), model(x))
        x.add_(1)
    [graph] = backend.graphs
    assert len(graph.reports) == 1


class HasAnEmptyBuffer(Two):
    def __init__(self):
        super().__init__()
        self.register_buffer("none", torch.empty(0))

    def forward(self, x):
        return super().forward(x) + self.none.sum()


@torch.no_grad()
def test_a_buffer_of_no_number_is_no_reason_against_a_plan():
    model, backend = HasAnEmptyBuffer().eval(), nhwc.backend()
    compiled, x = torch.compile(model, backend=backend), torch.randn(2, 3, 8, 8)
    assert_alike(compiled(x), model(x))
    assert backend.graphs[0].reports


class TakesANumber(Two):
    def forward(self, x):
        return super().forward(x) * self.count.item()


@torch.no_grad()
@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_a_buffer_that_is_taken_for_a_number_is_no_weight():
    model, backend = TakesANumber().eval(), nhwc.backend()
    compiled, x = torch.compile(model, backend=backend, fullgraph=True), torch.randn(2, 3, 8, 8)
    for number in (2.0, 3.0):
        model.count.fill_(number)
        assert_alike(compiled(x), model(x))
    [graph] = backend.graphs
    assert len(graph.reports) == 2


def test_hooks_fire_and_strides_are_kept():
    model = Two().eval().to(memory_format=torch.channels_last)
    calls = []
    model.first.register_forward_hook(lambda *_: calls.append(1))
    compiled = torch.compile(model, backend=nhwc.backend())
    with torch.no_grad():
        for x in (torch.randn(2, 3, 8, 8), torch.randn(2, 3, 8, 8)):
            x = x if calls else x.to(memory_format=torch.channels_last)
            assert_alike(compiled(x), model(x))
    assert len(calls) == 4


def test_nothing_keeps_the_weights_of_a_model_that_is_gone(monkeypatch):
    packed, optimize = [], planned.optimize

    def noted(*given, **options):
        fast = optimize(*given, **options)
        packed.append(weakref.ref(fast))
        return fast

    monkeypatch.setattr(planned, "optimize", noted)
    model = Two().eval()
    compiled = torch.compile(model, backend=nhwc.backend())
    with torch.no_grad():
        compiled(torch.randn(2, 3, 8, 8))
    weight, [plan] = weakref.ref(model.first.weight), packed
    assert plan() is not None
    del model, compiled
    gc.collect()
    assert weight() is None
    assert plan() is None


@pytest.mark.parametrize(
    ("training", "grad", "said"),
    [(False, True, "gradients are wanted"), (True, False, "training mode")],
)
def test_what_trains_is_left_to_eager_and_said_once(training, grad, said):
    model = nn.Sequential(Two(), nn.Conv2d(4, 4, 1)).train(training)
    own = copy.deepcopy(model)
    compiled = torch.compile(model, backend=nhwc.backend())
    x = torch.randn(2, 3, 8, 8)
    with warnings.catch_warnings(record=True) as caught, torch.set_grad_enabled(grad):
        warnings.simplefilter("always")
        for _ in range(2):
            found, wanted = compiled(x), own(x)
            torch.testing.assert_close(found, wanted)
        if grad:
            found.sum().backward()
            wanted.sum().backward()
    assert [said in str(one.message) for one in caught] == [True]
    mine, theirs = dict(model.named_parameters()), dict(own.named_parameters())
    assert all(same(mine[name].grad, theirs[name].grad) for name in mine)
    assert torch.equal(model[0].norm.running_mean, own[0].norm.running_mean)


def test_modes_of_a_call():
    model, backend = Two().eval(), nhwc.backend()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        plain = model(x)
        torch.testing.assert_close(compiled(x), plain)
        with torch.autocast("cpu", torch.bfloat16):
            assert compiled(x).dtype is torch.bfloat16
        assert [len(graph.reports) for graph in backend.graphs] == [1, 0]
        assert "under autocast" in backend.graphs[1].reason
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x.clone()), plain)
    torch.compiler.reset()
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), plain)


def test_a_function_and_a_compiled_part():
    model = Two().eval()
    inner = nn.Sequential(torch.compile(model, backend=nhwc.backend()), nn.Flatten())
    x = torch.randn(2, 3, 8, 8)
    backend = nhwc.backend()
    outer = torch.compile(lambda x: inner(x).relu(), backend=backend)
    with torch.no_grad():
        wanted = model(x).flatten(1).relu()
        torch.testing.assert_close(inner(x).relu(), wanted)
        torch.testing.assert_close(outer(x), wanted)
    assert backend.graphs[0].reports


def test_copies_and_pickles():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()).eval()
    compiled = torch.compile(model, backend=nhwc.backend(exact=True))
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        wanted = compiled(x)
        copied = copy.deepcopy(compiled)
        copied._orig_mod[0].weight.mul_(2)
        torch.testing.assert_close(compiled(x), wanted)
        torch.testing.assert_close(copied(x), copied._orig_mod(x))
    assert pickle.loads(pickle.dumps(nhwc.backend(exact=True))).exact


def test_threads():
    model, backend = Two().eval(), nhwc.backend()
    inputs = [torch.randn(2, 3, 8, 8) for _ in range(4)]
    seen = []

    def record(graph, example):
        seen.append((graph, example))
        return graph.forward

    # Dynamo itself fails now and then if threads compile at once: here they share its one graph.
    with torch.no_grad():
        torch.compile(model, backend=record)(inputs[0])
        (graph, example) = seen[0]
        planned = backend(graph, example)
    found = [None] * len(inputs)

    def run(number):
        with torch.no_grad():
            for _ in range(5):
                x = inputs[number]
                found[number] = planned(*(x if t.shape == x.shape else t for t in example))[0]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with torch.no_grad():
        for x, one in zip(inputs, found, strict=True):
            torch.testing.assert_close(one, model(x), rtol=1e-4, atol=1e-4)
    assert [len(graph.reports) for graph in backend.graphs] == [1]


def test_what_others_compile_meanwhile_is_compiled_once(monkeypatch):
    model, other, x, frames = Two().eval(), Two().eval(), torch.randn(2, 3, 8, 8), []

    def count(graph, example):
        frames.append(graph)
        return graph.forward

    compiled, own = torch.compile(other, backend=count), planned.optimize
    thread = threading.Thread(target=compiled, args=(x,))

    def meanwhile(*given, **named):
        with replaced((nn.Module, "__call__", nn.Module.__call__)):
            thread.start()
            thread.join(1)
        return own(*given, **named)

    monkeypatch.setattr(planned, "optimize", meanwhile)
    with torch.no_grad():
        torch.compile(model, backend=nhwc.backend())(x)
    thread.join()
    compiled(x)
    assert len(frames) == 1


@pytest.fixture
def by_name(monkeypatch):
    """The name that an installed nhwc has in torch's list, from what pyproject.toml says."""
    if sys.version_info < (3, 11):
        pytest.skip("no tomllib")
    import tomllib
    from torch._dynamo.backends import registry

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    group = "torch_dynamo_backends"
    [(name, value)] = project["entry-points"][group].items()
    torch._dynamo.list_backends()
    monkeypatch.setitem(registry._BACKENDS, name, EntryPoint(name, value, group))
    monkeypatch.delitem(registry._COMPILER_FNS, name, raising=False)
    yield name
    registry._COMPILER_FNS.pop(name, None)


def test_the_name_that_torch_finds(by_name):
    assert by_name == "nhwc"
    assert by_name in torch._dynamo.list_backends()
    model = Two().eval()
    x = torch.randn(2, 3, 8, 8)
    with torch.no_grad():
        compiled = torch.compile(model, backend="nhwc", options={"exact": True})
        torch.testing.assert_close(compiled(x), model(x))
    from nhwc._compile import by_name as found

    assert found.graphs[-1].reports[0].exact


@pytest.mark.skipif(
    not hasattr(torch._dynamo.config, "invalidate_compile_context_weakrefs"),
    reason="Dynamo itself keeps weak references",
)
@torch.no_grad()
def test_weights_can_be_swapped(by_name):
    """Torch swaps no tensor that has a weak reference, and drops its own for a backend by name."""
    model, x = Two().eval(), torch.randn(2, 3, 8, 8)
    compiled = torch.compile(model, backend=by_name)
    for _ in range(3):
        assert_alike(compiled(x), model(x))
        torch.utils.swap_tensors(model.first.weight, nn.Parameter(torch.randn(4, 3, 1, 1)))


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ({"mode": "max-autotune"}, "mode is 'max-autotune'; the backend nhwc has no"),
        (
            {"options": {"speed": 1}},
            "options has 'speed'; the backend nhwc knows exact",
        ),
        ({"options": {"exact": "yes"}}, "options has exact='yes'; it is True or False"),
    ],
)
def test_refused_in_words(chosen, said):
    compiled = torch.compile(Two().eval(), backend=nhwc.backend(), **chosen)
    with torch.no_grad(), pytest.raises(BackendCompilerFailed) as error:
        compiled(torch.randn(2, 3, 8, 8))
    assert said in str(error.value)
    assert isinstance(error.value.inner_exception, nhwc.InputError)


class Energy(Two):
    """Needs gradients inside, whoever calls it."""

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = super().forward(x).square().sum()
        return energy * 2


class WantsGradients(Two):
    """What its weights want, whoever calls it."""

    @torch.enable_grad()
    def forward(self, x):
        return super().forward(x)


class MakesALeaf(Two):
    def forward(self, x):
        y = super().forward(x)
        return y * y.new_ones(1, requires_grad=True)


@pytest.mark.parametrize(
    ("kind", "grad", "wanted"),
    [
        (Energy, False, False),
        (WantsGradients, False, True),
        (MakesALeaf, True, False),
        (MakesALeaf, False, False),
    ],
)
def test_gradients_that_a_model_turns_on_are_kept(kind, grad, wanted):
    model = kind().eval().requires_grad_(wanted)
    compiled = torch.compile(model, backend="nhwc")
    x = torch.randn(2, 3, 8, 8)
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            found, expected = compiled(x), model(x)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
            assert found.requires_grad == expected.requires_grad


class ReturnsAViewWithHistory(Two):
    def forward(self, x):
        with torch.enable_grad():
            view = self.last.weight.view(-1)
        return super().forward(x), view


class GivesItsInputHistory(Two):
    def forward(self, x):
        with torch.enable_grad():
            x.mul_(self.last.bias.sum())
        return super().forward(x), x


@pytest.mark.parametrize("kind", [ReturnsAViewWithHistory, GivesItsInputHistory])
@torch.no_grad()
def test_a_history_that_a_model_turns_on_is_kept(kind):
    model = kind().eval()
    compiled, x = torch.compile(model, backend="nhwc"), torch.randn(2, 3, 8, 8)
    for _ in range(2):
        found, wanted = compiled(x.clone()), model(x.clone())
        assert_alike(found, wanted)
        assert [one.is_leaf for one in found] == [one.is_leaf for one in wanted] == [True, False]


@torch.no_grad()
def test_weights_that_change_while_a_plan_is_made_get_another(monkeypatch):
    model, x = Two().eval().requires_grad_(False), torch.randn(2, 3, 8, 8)
    backend, make = nhwc.backend(), planned.PlannedGraph._made
    compiled = torch.compile(model, backend=backend)

    def interrupted(self, *given):
        plan = make(self, *given)
        monkeypatch.undo()
        model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
        thread = threading.Thread(target=torch.no_grad()(compiled), args=(x,))
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
        return plan

    monkeypatch.setattr(planned.PlannedGraph, "_made", interrupted)
    compiled(x)
    for _ in range(3):
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)


class Alternates(Two):
    def forward(self, x):
        return (-2.0) ** self.first(x).round()


@torch.no_grad()
def test_a_power_of_a_negative_number_is_the_models():
    # Torch writes it as `-2.0 ** x` into the code of its graphs, and answers with that.
    model, x = Alternates().eval(), torch.randn(1, 3, 8, 8)
    found = torch.compile(model, backend=nhwc.backend())(x)
    torch.testing.assert_close(found, model(x), rtol=1e-4, atol=1e-4)
