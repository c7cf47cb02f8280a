"""Code that counts by the whole numbers of an input: a plan is for these numbers alone."""

import copy
import pickle

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import nhwc
from nhwc.files.container import read, write
from nhwc.files.examples import Example
from nhwc.files.plain import Foreign
from nhwc.graph.modules.layers import assert_numbers
from nhwc.graph.tracing.recorded import record_run
from nhwc.graph.tracing.sized import capture_sized
from nhwc.optimized import signature

from ..optimizing import close, force, runs_program

X = torch.randn(96, 48, generator=torch.Generator().manual_seed(0))
GRID = torch.tensor([[8, 4], [8, 8]])
OTHER = torch.tensor([[4, 8], [4, 16]])


class Tower(nn.Module):
    """The images of a batch as rows of tokens one behind the other; `grid` says where each ends."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(48, 64)
        self.qkv = nn.Linear(64, 192)
        self.out = nn.Linear(64, 48)

    def forward(self, x, grid):
        places = []
        for height, width in grid.tolist():
            rows = torch.arange(height)[:, None].expand(height, width)
            places.append((rows + 0.1 * torch.arange(width)).flatten())
        x = self.embed(x) + torch.cat(places)[:, None].sin()
        sizes = grid.prod(1).tolist()
        parts = [part.split(sizes) for part in self.qkv(x).chunk(3, -1)]
        mixed = [
            F.scaled_dot_product_attention(*(each[None, None] for each in one))[0, 0]
            for one in zip(*parts, strict=True)
        ]
        return self.out(torch.cat(mixed))


def last_weight(model):
    [weight] = [p for n, p in model.named_parameters() if ".out." in n and p.dim() == 2]
    return weight


@pytest.fixture(scope="module")
def tower():
    torch.manual_seed(0)
    return Tower().eval()


def test_a_plan_is_for_the_numbers_that_code_counts_by(tower):
    fast = force(tower, X, GRID)
    for grid, served in [(GRID, True), (OTHER, False), (GRID.int(), False), (GRID, True)]:
        assert fast.serves((X, grid)) is served
        assert runs_program(fast, X, grid) is served
        close(fast(X, grid), tower(X, grid))
    close(fast(X[:32], GRID[:1]), tower(X[:32], GRID[:1]))
    plan = fast.report.plans[0]
    assert plan.counts
    assert plan.inputs == ("96x48 float32", "2x2 int64 numbers 8,4,8,8")
    assert "for these shapes and numbers alone" in str(fast.report)


def test_each_example_has_its_numbers(tower):
    fast = force(tower, X, GRID, also=[(X, OTHER)])
    for one in (fast, copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        for grid in (OTHER, GRID):
            assert one.serves((X, grid))
            close(one(X, grid), tower(X, grid))
        assert not one.serves((X, GRID.flip(0)))
        close(one(X, GRID.flip(0)), tower(X, GRID.flip(0)))


def test_new_weights_end_the_plan(tower):
    model = copy.deepcopy(tower)
    fast = force(model, X, GRID)
    with torch.no_grad():
        model.out.weight.mul_(2)
        last_weight(fast).mul_(2)
    with pytest.warns(UserWarning, match="numbers 8,4,8,8 is dropped"):
        close(fast(X, GRID), model(X, GRID))
    close(fast(X, OTHER), model(X, OTHER))


class Timed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Tower()

    def forward(self, x, step, grid):
        return self.inner(x, grid) * step.cos()[0]


def test_a_graph_is_made_for_as_few_numbers_as_it_takes():
    model, step = Timed().eval(), torch.tensor([3])
    fast = force(model, X, step, GRID)
    assert fast.report.plans[0].inputs[1:] == ("1 int64", "2x2 int64 numbers 8,4,8,8")
    later = torch.tensor([5])
    assert fast.serves((X, later, GRID))
    close(fast(X, later, GRID), model(X, later, GRID))


class Around(nn.Module):
    """Has layers of its own before the part that counts."""

    def __init__(self):
        super().__init__()
        self.before = nn.Sequential(nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 48))
        self.inner = Tower()

    def forward(self, x, grid):
        return self.inner(self.before(x), grid)


def test_calls_with_other_numbers_have_a_plan_of_what_does_not_count(tmp_path):
    model = Around().eval()
    fast = force(model, X, GRID)
    counted, around = [plan for plan in fast.report.plans if not plan.part]
    assert (counted.planned, counted.counts) == (around.planned, not around.counts) == (True, True)
    assert [layer.what for layer in around.layers if "linear" in layer.what.lower()]
    for grid in (OTHER, GRID, GRID.flip(0)):
        assert runs_program(fast, X, grid)
        close(fast(X, grid), model(X, grid))
    with torch.no_grad():
        model.before[0].weight.mul_(2)
        next(p for n, p in fast.named_parameters() if "before" in n and p.dim() == 2).mul_(2)
    with pytest.warns(UserWarning, match="is dropped"):
        close(fast(X, GRID), model(X, GRID))
    for grid in (GRID, OTHER):
        assert runs_program(fast, X, grid)
        close(fast(X, grid), model(X, grid))


def test_examples_that_differ_by_their_numbers_share_the_plan_for_any():
    fast = force(Around().eval(), X, GRID, also=[(X, OTHER)])
    texts = [plan.inputs[1] for plan in fast.report.plans if not plan.part]
    assert texts == ["2x2 int64 numbers 8,4,8,8", "2x2 int64 numbers 4,8,4,16", "2x2 int64"]


def test_numbers_that_do_not_help_cost_one_run(monkeypatch):
    class Asking(nn.Module):
        def forward(self, x, first, second, third):
            return x[:, : int(first + second + third) + int(x[0, 0] > 0)]

    runs = []
    record = lambda *given: runs.append(given[2:]) or record_run(*given)
    monkeypatch.setattr("nhwc.graph.tracing.sized.record_run", record)
    nhwc.optimize(Asking().eval(), X, *map(torch.tensor, (1, 2, 3)))
    assert runs == [(), ((1, 2, 3),)]


def test_two_inputs_are_counted_by_where_it_takes_both():
    class Cut(nn.Module):
        def forward(self, x, begin, end):
            return torch.relu(x[:, int(begin) : int(end)]) + begin

    model, ends = Cut().eval(), (torch.tensor(3), torch.tensor(20))
    fast = force(model, X, *ends)
    assert fast.report.plans[0].inputs[1:] == (" int64 numbers 3", " int64 numbers 20")
    for other in [ends, (torch.tensor(3), torch.tensor(21)), (torch.tensor(4), ends[1])]:
        close(fast(X, *other), model(X, *other))


def test_examples_of_one_shape_may_count_by_other_inputs():
    class Either(nn.Module):
        def forward(self, x, first, second):
            if int(first) == 0:
                return torch.relu(x)[:, : int(second[0])]
            return torch.relu(x)[:, : int(first)] * second.sum()

    model, second = Either().eval(), torch.tensor([7, 3])
    fast = force(model, X, torch.tensor(0), second, also=[(X, torch.tensor(5), second)])
    for first, added, served in [(0, 0, 1), (5, 0, 1), (5, 1, 1), (0, 1, 0), (4, 0, 0)]:
        given = (X, torch.tensor(first), second + added)
        assert fast.serves(given) == served
        close(fast(*given), model(*given))


def test_code_that_asks_for_the_numbers_of_an_image_stays_code():
    class Asking(nn.Module):
        def forward(self, x, grid):
            return x[:, : int(grid[0]) + int(x[0, 0] > 0)]

    model = Asking().eval()
    fast = nhwc.optimize(model, X, torch.tensor([7]))
    assert not fast.serves((X, torch.tensor([7])))
    close(fast(-X, torch.tensor([7])), model(-X, torch.tensor([7])))


def test_more_numbers_than_a_call_should_compare_are_none_to_count_by():
    class Picking(nn.Module):
        def forward(self, x, lengths):
            return torch.cat([one[: int(n)] for one, n in zip(x, lengths, strict=True)])

    model, lengths = Picking().eval(), torch.arange(300) % 48
    x = X.repeat(4, 1)[:300]
    fast = nhwc.optimize(model, x, lengths)
    assert not fast.serves((x, lengths))
    close(fast(x, lengths.flip(0)), model(x, lengths.flip(0)))


class Words(nn.Module):
    """Works on the words that a mask leaves, as `forward` of its kinds does."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(48, 48)


class Packed(Words):
    def forward(self, x, mask):
        return torch.zeros_like(x).index_copy(0, mask.nonzero()[:, 0], self.mix(x[mask]))


class PutBack(Words):
    def forward(self, x, mask):
        y = x.clone()
        y[mask] = self.mix(x[mask])
        return y[:, 1:]


class Folded(Words):
    def forward(self, x, mask):
        sides = mask.view(8, 12)
        return self.mix(x.view(8, 12, 48)[sides]) + x[mask].view(1, -1, 48)[:, : int(mask.sum())]


class Repeated(Words):
    def forward(self, x, mask):
        return self.mix(x.repeat_interleave(mask.long() * 2, 0)) + int(mask.sum())


def test_what_is_taken_by_a_constant_index_shares_no_memory_with_it():
    class Turned(Words):
        def forward(self, x, order):
            return self.mix(x)[torch.tensor(order.tolist())]

    model, order = Turned().eval(), torch.arange(96).flip(0)
    sized, _ = capture_sized(nhwc.graph.capture(model, [(X, order)]).module, (X, order))
    assert "clone" not in sized.code
    close(sized(X, order), model(X, order))


@pytest.mark.parametrize("kind", [Packed, PutBack, Folded, Repeated])
def test_a_mask_that_code_makes_an_index_of_is_counted_by(kind, tmp_path):
    model, mask = kind().eval(), torch.arange(96) % 3 > 0
    fast = force(model, X, mask)
    nhwc.save(fast, tmp_path / "m.nhwc")
    loaded = nhwc.load(tmp_path / "m.nhwc")
    for one in (fast, loaded):
        assert one.serves((X, mask))
        close(one(X, mask), model(X, mask))
    close(fast(X, ~mask), model(X, ~mask))
    with pytest.raises(nhwc.InputError, match="the numbers"):
        loaded(X, ~mask)


@pytest.mark.parametrize(
    "write",
    [
        lambda grid: grid.__setitem__(0, grid[0] + 1),
        lambda grid: grid[:1].add_(1),
        lambda grid: grid.view(-1)[0].add_(1),
        lambda grid: grid.numpy().__iadd__(1),
    ],
    ids=["itself", "a part", "a view", "numpy"],
)
def test_code_that_writes_into_what_it_counts_by_stays_code(write):
    class Writing(nn.Module):
        def forward(self, x, grid):
            write(grid)
            return torch.relu(x[:, : int(grid[0])])

    fast, given = force(Writing().eval(), X, torch.tensor([7])), torch.tensor([7])
    assert fast(X, given).shape == (96, 8)
    assert given.tolist() == [8]


@pytest.mark.parametrize(
    "ask",
    [lambda grid: grid.stride(0), Tensor.is_contiguous, lambda grid: grid[1:].storage_offset()],
    ids=["stride", "is_contiguous", "storage_offset"],
)
def test_code_that_asks_how_the_numbers_lie_stays_code(ask):
    class Asking(nn.Module):
        def forward(self, x, grid):
            return torch.relu(x[:, : int(grid[0])]) * (1 + ask(grid))

    model, spread = Asking().eval(), torch.tensor([[0, 0], [7, 5], [3, 5]])[1:, 0]
    fast = force(model, X, torch.tensor([7, 3]))
    for grid in (torch.tensor([7, 3]), spread):
        close(fast(X, grid), model(X, grid))


class Optional(Tower):
    def forward(self, x, grid=None):
        return super().forward(x, grid)


@pytest.mark.filterwarnings("ignore:The TorchScript type system")
@pytest.mark.parametrize("kind", [Tower, Optional])
def test_a_file_has_the_numbers_and_refuses_others(kind, tmp_path):
    tower = kind().eval()
    nhwc.save(force(tower, X, GRID), tmp_path / "m.nhwc")
    loaded = nhwc.load(tmp_path / "m.nhwc")
    scripted = torch.jit.script(loaded)
    again = force(loaded, X, GRID)
    for one in (loaded, again):
        assert one.serves((X, GRID))
        with pytest.raises(nhwc.InputError, match=r"the numbers \[8, 4, 8, 8\], not \[4, 8, 4, 16"):
            one(X, OTHER)
    for one in (loaded, again):
        close(one(X, GRID), tower(X, GRID))
    exported = torch.export.export(loaded, (X, GRID)).module()
    traced = torch.jit.trace(loaded, (X, GRID))
    for one in (scripted, traced, exported):
        close(one(X, GRID), tower(X, GRID))
        with pytest.raises((RuntimeError, torch.jit.Error), match="an input with other numbers"):
            one(X, OTHER)


def test_a_compiled_check_of_one_number_refuses_many_that_are_alike():
    check = torch.compile(lambda n: assert_numbers(n, [2]) + 1, backend="eager", dynamic=True)
    close(check(torch.tensor([2])), torch.tensor([3]))
    with pytest.raises(nhwc.InputError, match=r"numbers \[2\], not one with 2 numbers"):
        check(torch.tensor([2, 2]))


def test_a_file_of_a_model_whose_plan_has_ended_is_for_the_numbers_of_its_example(tower, tmp_path):
    fast = force(tower, X, GRID)
    with torch.no_grad():
        last_weight(fast).mul_(2)
    wanted = fast.portable(X, GRID)
    nhwc.save(fast, tmp_path / "m.nhwc")
    close(nhwc.load(tmp_path / "m.nhwc")(X, GRID), wanted)


def test_a_file_is_for_no_numbers_that_nobody_gave(tmp_path):
    class Deep(nn.Module):
        def forward(self, x, count):
            for _ in range(int(count)):
                x = x + 1
            return x

    fast = nhwc.optimize(Deep().eval(), X, torch.tensor(6000))
    with pytest.raises(nhwc.InputError, match="the model cannot be saved"):
        nhwc.save(fast, tmp_path / "m.nhwc")


@pytest.mark.parametrize(
    "text",
    [
        "2x2 int64 numbers 8,4,8",
        "2x2 float32 numbers 8,4,8,8",
        "2 int8 numbers 8,400",
        "1 int64 numbers 99999999999999999999",
        "257 int64 numbers " + ",".join("1" * 257),
        "2 bool numbers 0,2",
        "1 float64 numbers 1",
    ],
)
def test_an_example_has_as_many_numbers_as_its_shape_says_and_of_its_type(text):
    with pytest.raises(Foreign, match="number"):
        Example.of(text)


def test_what_a_file_says_of_numbers_is_only_what_its_plan_is_for(tower, tmp_path):
    path = tmp_path / "m.nhwc"
    nhwc.save(force(tower, X, GRID), path)
    header, tensors = read(path)
    del header["tensors"]
    other = ["96x48 float32", "2x2 int64 numbers 4,8,4,16"]
    write(path, header | {"planned": [other]}, tensors)
    loaded = nhwc.load(path)
    assert not loaded.serves((X, OTHER))
    close(loaded(X, GRID), tower(X, GRID))
    with pytest.raises(nhwc.InputError, match="the numbers"):
        loaded(X, OTHER)


def test_a_file_checks_the_numbers_of_inputs_alone(tmp_path):
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(assert_numbers, (graph.call_method("long", (x,)), [0]))
    graph.output(graph.call_function(torch.relu, (x,)))
    nhwc.save(fx.GraphModule(nn.Module(), graph).eval(), tmp_path / "m.nhwc")
    with pytest.raises(nhwc.FileError, match="no input's"):
        nhwc.load(tmp_path / "m.nhwc")


def test_a_fraction_that_a_file_checks_is_told_from_others():
    half = torch.tensor([1.5])
    keys = [signature((one,), (0,)) for one in (half, half + 0.25, half * float("nan"))]
    assert len({*keys}) == 3
