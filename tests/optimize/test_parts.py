"""Models that decide by values: proven part by part where the whole may answer otherwise."""

import pytest
import torch
from torch import nn

import nhwc
from nhwc._optimize import planner
from nhwc._optimize.parts import verify_or_parts
from nhwc.verify import observe, verify
from nhwc.zoo import randomize_batchnorm_

from ..optimizing import close, force


class Sorting(nn.Module):
    """As a detector does, it loops over a list of images and sorts what is almost equal."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU())
        self.head = nn.Sequential(nn.Conv2d(16, 8, 1), nn.BatchNorm2d(8))

    def forward(self, images):
        found = []
        for image in images:
            values = self.head(self.trunk(image[None])).flatten()
            # By the last digits, which fall as the rounding falls.
            order = (values * 1e6).frac().argsort()
            found.append({"places": order, "largest": values[order[-1:]]})
        return found


class Shuffling(Sorting):
    """Answers with values in an order that falls as the rounding falls."""

    def forward(self, images):
        orders = [found["places"] for found in super().forward(images)]
        heads = [self.head(self.trunk(image[None])).flatten() for image in images]
        return [head[order] for head, order in zip(heads, orders, strict=True)]


class Finding(Sorting):
    """Answers with nothing."""

    def forward(self, images):
        return [found["largest"][:0] for found in super().forward(images)]


@pytest.fixture
def images():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, 12, 10, generator=generator) for _ in range(2)]


@pytest.fixture
def model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return randomize_batchnorm_(Sorting()).eval()


def test_a_model_that_sorts_is_optimized_on_a_list_of_images(model, images):
    before = list(model.modules())
    truth = observe(model, [(images,)])
    fused = nhwc.fuse(model)
    assert len(fused.report.applied) == 2
    assert not verify(truth, fused).passed, "the whole is expected to sort otherwise"
    found = verify_or_parts(truth, model, fused)
    assert found.passed
    assert {check.output for check in found.checks} >= {"trunk", "head", "output[0]['places']"}
    fast = nhwc.optimize(model, images)
    assert fast.report.verification.passed
    assert verify_or_parts(truth, model, fast).passed
    assert before == list(model.modules())
    assert not any(m._forward_hooks for m in (*model.modules(), *fused.modules()))


class Overwriting(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x, y):
        z = self.conv(x)
        y.mul_(0)
        return z + x


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = Overwriting()

    def forward(self, x):
        return x if x.sum() > 1e9 else self.part(x, x)


@torch.no_grad()
def test_a_part_is_held_on_what_it_was_given_before_it_wrote_there():
    model, x = Twice().eval(), torch.randn(1, 3, 8, 8)
    truth, fused = observe(model, [(x,)]), nhwc.fuse(model)
    assert verify_or_parts(truth, model, fused).passed
    fused.get_submodule("model.part.conv").bias.add_(0.5)
    assert not verify_or_parts(truth, model, fused).passed


def test_a_model_that_finds_nothing_is_held_by_its_parts(model, images):
    model.__class__ = Finding
    truth, fused = observe(model, [(images,)]), nhwc.fuse(model)
    assert verify(truth, fused).passed
    assert {check.output for check in verify_or_parts(truth, model, fused).checks} > {"trunk"}
    with torch.no_grad():
        next(iter(fused.get_submodule("model.head").parameters())).mul_(1.0001)
    assert not verify_or_parts(truth, model, fused).passed


def test_a_model_that_strays_from_its_own_float64_run_is_held_by_its_parts(model, images):
    model.__class__ = Shuffling
    truth, fused = observe(model, [(images,)]), nhwc.fuse(model)
    assert verify_or_parts(truth, model, fused).passed
    with torch.no_grad():
        next(iter(fused.get_submodule("model.head").parameters())).mul_(1.0001)
    assert verify(truth, fused).passed, "ten times an error of everything allows anything"
    assert not verify_or_parts(truth, model, fused).passed


def test_a_part_that_is_wrong_is_found(model, images):
    truth, fused = observe(model, [(images,)]), nhwc.fuse(model)
    with torch.no_grad():
        next(iter(fused.get_submodule("model.head").parameters())).mul_(1.0001)
    found = verify_or_parts(truth, model, fused)
    assert not found.passed
    assert found.worst.output == "head"


def test_other_code_around_the_parts_is_found(model, images):
    truth, fused = observe(model, [(images,)]), nhwc.fuse(model)
    shell = fused.get_submodule("model")
    again, shell.forward = shell.forward, lambda images: again(images[::-1])
    assert not verify_or_parts(truth, model, fused).passed
    shell.forward = lambda images: again(images[:1])
    found = verify_or_parts(truth, model, fused)
    assert "it is called less often" in {check.reason for check in found.checks}


def test_a_model_that_is_one_graph_has_no_parts():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).eval()
    truth, fused = observe(model, [(torch.randn(1, 3, 8, 8),)]), nhwc.fuse(model)
    with torch.no_grad():
        next(iter(fused.parameters())).mul_(2)
    assert [check.output for check in verify_or_parts(truth, model, fused).checks] == ["output"]


class Magnifying(nn.Module):
    """Exact on ones, and far from it on whatever is nearly one."""

    def __init__(self):
        super().__init__()
        self.tenth = nn.Parameter(torch.tensor(0.1))

    def forward(self, x):
        return (x * self.tenth - self.tenth) * 1e4 + x


@pytest.mark.parametrize(("model", "passes"), [(Magnifying(), True), (nn.Identity(), False)])
def test_an_original_that_is_exact_by_luck_may_be_met_less_exactly(model, passes):
    truth = observe(model, [(torch.ones(1, 3, 4, 4),)])

    def erring(error):
        class Erring(nn.Module):
            def forward(self, x):
                return model(x) + error

        return Erring()

    assert not verify(truth, erring(5e-5)).passed
    assert verify_or_parts(truth, model, erring(5e-5)).passed is passes
    assert not verify_or_parts(truth, model, erring(1e-3)).passed


class LastDigits(nn.Module):
    """Answers with what falls as the rounding falls, in code that only a recording can follow."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x):
        if type(x) is not torch.Tensor:
            return x
        return (self.conv(x) * 1e6).frac().round()


@torch.no_grad()
def test_a_whole_that_decides_by_values_answers_as_the_original_does():
    """Its own float64 run says nothing of it: against that every answer is as good."""
    model, x = LastDigits().eval(), torch.randn(1, 3, 16, 16)
    truth = observe(model, [(x,)])
    assert truth.exact is not None
    wrong = nn.Sequential(model, Flipped())
    assert verify(truth, wrong).passed
    assert not verify_or_parts(truth, model, wrong).passed
    assert verify_or_parts(truth, model, model).passed


class Choosing(nn.Module):
    """Traced as a whole; what it chooses falls as the rounding falls."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Conv2d(8, 4, 3)

    def forward(self, x):
        y = self.head(self.stem(x)).flatten(1)
        return (y * 1e7).frac().topk(9).indices


@torch.no_grad()
def test_a_whole_graph_that_chooses_otherwise_is_left_to_the_model():
    model, x = randomize_batchnorm_(Choosing()).eval(), torch.randn(2, 3, 12, 12)
    assert torch.equal(nhwc.optimize(model, x)(x), model(x))


@torch.no_grad()
def test_a_graph_whose_plan_alone_chooses_otherwise_is_kept(monkeypatch):
    def other(self, x):
        return call(self, x).flip(1)

    def plan(graph, *args, **options):
        nonlocal call
        made = make(graph, *args, **options)
        call = call or type(made.program).__call__
        monkeypatch.setattr(type(made.program), "__call__", other)
        return made

    call, make = None, planner.make_plan
    monkeypatch.setattr(planner, "make_plan", plan)
    model, x = Choosing(), torch.randn(2, 3, 12, 12)
    model.stem[1] = nn.Identity()
    model.eval()
    fast = nhwc.optimize(model, x)
    assert call is not None
    assert not fast.serves((x,))
    assert torch.equal(fast(x), model(x))
    assert [p.reason[:28] for p in fast.report.plans] == ["it sorts, picks or rounds, a"]
    assert not fast.report.opaque


class Flipped(nn.Module):
    def forward(self, x):
        return x.flip(1)


class Wanting(nn.Module):
    """As torch's matrix product does, it computes in another way where gradients are wanted."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 1)

    def forward(self, x):
        if type(x) is not torch.Tensor:
            return x
        return self.conv(x) + self.conv.weight.requires_grad


@torch.no_grad()
def test_a_copy_of_the_models_own_code_is_believed_if_it_agrees_unfrozen():
    model, x = Wanting().eval(), torch.randn(1, 3, 16, 16)
    result = nhwc.optimize(model, x)
    assert not any(parameter.requires_grad for parameter in result.parameters())
    torch.testing.assert_close(result(x), model(x) - 1)


class AnotherInFloat64(nn.Module):
    """The run in float64 is of no use: it computes something else."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x):
        return self.conv(x) if x.dtype is torch.float32 else 3 * self.conv(x)


class Chaotic(nn.Module):
    """Its answer is all rounding: of two right models none is near the other."""

    def forward(self, x):
        for _ in range(60):
            x = 3.9 * x * (1 - x)
        return x


@torch.no_grad()
def test_a_run_in_float64_that_computes_something_else_allows_nothing():
    model, x = AnotherInFloat64().eval(), torch.randn(2, 3, 8, 8)
    truth, wrong = observe(model, [(x,)]), lambda x: model(x) + 0.1
    assert verify(truth, wrong).passed, "ten times an error of everything allows anything"
    assert not verify_or_parts(truth, model, wrong).passed
    assert verify_or_parts(truth, model, lambda x: model.conv(x) * (1 + 1e-6)).passed
    assert nhwc.optimize(model, x).report.verification.passed


@torch.no_grad()
def test_what_is_all_rounding_is_not_held_against_its_own():
    model, x = Chaotic().eval(), torch.rand(2, 3, 8, 8)
    truth = observe(model, [(x,)])
    assert verify_or_parts(truth, model, lambda x: model(x * (1 + 1e-7))).passed


class Bank(nn.Module):
    """A part that no graph holds, with a length: of 0, as long as nothing is kept."""

    def __init__(self):
        super().__init__()
        self.kept = nn.ModuleList()

    def __len__(self):
        return len(self.kept)

    def forward(self, x):
        return x * 2 if x.sum() > 1e9 else x[:, :4]


class WritesIntoAPart(nn.Module):
    """The part returns a view, and has the name of a function that does not."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1)
        self.relu = Bank()

    def forward(self, x):
        y = self.first(x)
        self.relu(y).mul_(3)
        return self.last(y)


class Doubles(nn.Module):
    def __init__(self):
        super().__init__()
        self.within = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())

    def forward(self, x):
        return self.within(x) * 2


def has_a_compiled_part():
    return nn.Sequential(nn.Conv2d(3, 3, 1), torch.compile(Doubles().eval(), backend="eager"))


@pytest.mark.parametrize("made", [WritesIntoAPart, has_a_compiled_part])
@torch.no_grad()
def test_a_part_without_a_length_is_a_part(made):
    """It was taken for a function of its name; a compiled one has none to tell, and ended all."""
    model, x = made().eval(), torch.rand(2, 3, 8, 8)
    close(force(model, x)(x), model(x))
