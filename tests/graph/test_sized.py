"""Models whose code computes with sizes: planned for the shapes of the example, right for all."""

import copy
import functools
import math
import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import nhwc
from nhwc import InputError
from nhwc.graph import capture
from nhwc.graph.tracing.sized import capture_sized
from nhwc.models.vision import import_torchvision
from nhwc.passes import PASSES, run_passes
from nhwc.passes.sizes import for_sizes
from nhwc.render.optimize_text import optimize_text
from nhwc.verify import observe, verify
from nhwc.verify.inputs import random_inputs
from nhwc.zoo import load_model, randomize_batchnorm_

from ..optimizing import close, force, runs_program, won_by


class Layers(nn.Module):
    """What the functions below work with, as methods of a class of its own."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.scale = nn.Parameter(torch.randn(8, 1, 1))
        self.table = None
        self.calls = 0


def net(does):
    """`Layers` with `does` as its forward."""
    return woken(type("Layers", (Layers,), {"forward": does}))


def woken(kind):
    torch.manual_seed(0)
    return randomize_batchnorm_(kind()).eval()


def image(*shape, seed=1):
    return torch.randn(shape or (2, 3, 9, 10), generator=torch.Generator().manual_seed(seed))


def odd(self, x):
    if x.shape[-1] % 2 == 0:
        x = F.pad(x, (0, 1, 0, 0))
    return self.norm(self.conv(x))


class Odd(Layers):
    forward = odd


@torch.fx.wrap
def shaded(y, above):
    """A function that libraries keep closed, for the sizes it asks for."""
    height = y.shape[2] // 2
    if y.shape[3] % 2 == 0:
        y = F.pad(y, (0, 1, 0, 0))
    shade, half = y.new_zeros(y.shape[2:]), y.new_full((1,), 0.5)
    shade[:height] = above
    return y + shade.masked_fill(shade == 0, 3.0) * half


def with_closed_function(self, x):
    return shaded(self.norm(self.conv(x)), 2)


def rows(self, x):
    y = self.norm(self.conv(x))
    return torch.stack([y[:, :, i] * i for i in range(y.shape[2])], 2)


def halves(self, x):
    y = self.norm(self.conv(x))
    h, w = y.shape[-2:]
    return F.interpolate(y, (int(h / 2), math.ceil(w / 2)), mode="bilinear")


def grid(self, x):
    h, w = x.shape[-2:]
    columns = torch.tensor([column / w for column in range(w)])
    ys, xs = torch.meshgrid(torch.arange(h) / h, columns, indexing="ij")
    return self.norm(self.conv(x)) + torch.stack((ys, xs)).sum(0)


def windows(self, x):
    y = self.norm(self.conv(x))
    mask = torch.zeros(y.shape[-2:])
    for number, top in enumerate(range(0, y.shape[-2], 4)):
        mask[top : top + 4] = number
    return y.masked_fill(mask.to(y.device) == 0, 0.5)


def by_batch(self, x):
    return self.conv(x) if len(x) > 1 else self.norm(self.conv(x))


def each(self, x):
    return torch.cat([self.norm(self.conv(one[None])) for one in x])


def parted(self, x):
    first, *rest = self.norm(self.conv(x)).split(3, dim=2)
    return first[:, :, :1] + sum(part.mean(2, keepdim=True) for part in rest)


def cached(self, x):
    if self.table is None or len(self.table) != x.shape[-1]:
        self.table = torch.arange(x.shape[-1]) / 10
    return self.norm(self.conv(x)) + self.table


def divides(self, x):
    y = self.norm(self.conv(x)) + 1 if x.ndim == 4 else x
    y /= y.abs().sum(1).unsqueeze(1)
    return y


def typed(self, x):
    parts = self.norm(self.conv(x)).chunk(2, 1)
    assert isinstance(x, torch.Tensor)
    return parts[0] * len(parts) if isinstance(parts, (tuple, list)) else parts


def of_parameters(self, x):
    return self.norm(self.conv(x)) * (self.scale if x.size(1) == len(self.scale) - 5 else 2)


SIZED = [odd, rows, halves, grid, windows, by_batch, each, parted, cached, divides, typed]
SIZED += [of_parameters]


def by_value(self, x):
    y = self.norm(self.conv(x))
    return y * 2 if y.mean() > 0 else y - 1


def counted(self, x):
    y = self.norm(self.conv(x))
    return y * int((y > 0).sum()) if x.shape[0] == 2 else y


def found(self, x):
    y = self.norm(self.conv(x))
    return y * (1 if len((y > 0).nonzero()) % 2 else 3)


def picked(self, x):
    y = self.norm(self.conv(x))
    return y * (1 if y[y > 0].shape[0] % 2 else 3)


def item(self, x):
    y = self.norm(self.conv(x))
    return y * (1 if y.amax().item() > 0.5 else 3)


def listed(self, x):
    y = self.norm(self.conv(x))
    return y * sum(y.flatten()[:3].tolist())


def distinct(self, x):
    y = self.norm(self.conv(x))
    return y * len(y.round().unique())


def weight_value(self, x):
    return self.norm(self.conv(x)) * (2 if self.scale[0].item() > 0 and x.shape[0] else 3)


def drawn(self, x):
    if x.shape[0] > 1:
        x = x + torch.rand(x.shape[-1])
    return self.norm(self.conv(x))


def shaken(self, x):
    return self.norm(self.conv(x)) * (random.random() if x.shape[0] else 1)


def rolled(self, x):
    return self.norm(self.conv(x)) * (float(numpy.random.rand()) if x.shape[0] else 1)


def seeded(self, x):
    torch.manual_seed(x.shape[0])
    return nn.functional.dropout(self.norm(self.conv(x)), 0.5, True)


def seeded_for_a_while(self, x):
    with torch.random.fork_rng():
        torch.manual_seed(x.shape[0])
        return nn.functional.dropout(self.norm(self.conv(x)), 0.5, True)


def counting(self, x):
    self.calls += x.shape[0]
    return self.norm(self.conv(x)) * self.calls


def strided(self, x):
    return self.norm(self.conv(x)) * (2 if x.stride(1) == 1 and x.shape[0] else 3)


VALUED = [by_value, counted, found, picked, item, listed, distinct, weight_value, drawn, shaken]
VALUED += [rolled, seeded, seeded_for_a_while, counting, strided]


def opened(model, *inputs):
    captured = capture(model)
    run_passes(captured.module)
    return captured, for_sizes(captured.module, inputs, captured.opaque, PASSES)[0]


@pytest.mark.parametrize("does", SIZED, ids=lambda does: does.__name__)
def test_code_that_computes_with_sizes_is_one_graph_for_them(does):
    model, x = net(does), image()
    captured, sized = opened(model, x)
    assert captured.opaque
    assert sized.opened == captured.opaque
    for other in random_inputs((x,), 3):
        close(sized.graph(*other), copy.deepcopy(model)(*other))
    assert verify(observe(model, random_inputs((x,), 3)), sized.graph).passed


@pytest.mark.parametrize("does", VALUED, ids=lambda does: does.__name__)
def test_code_that_decides_by_more_than_sizes_is_none(does):
    captured, sized = opened(net(does), image())
    assert captured.opaque
    assert sized is None


class Drawing(nn.Module):
    """It asks for a size, which is known in a plan, and draws numbers."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x):
        y = self.conv(x)
        return y + torch.rand(y.shape) if x.shape[0] > 0 else y


def test_a_model_that_no_size_opens_is_told_what_stops_it_there():
    [part] = force(Drawing().eval(), image()).report.opaque
    assert "branches on a size" in part.reason
    assert "; with sizes known, it seeds torch's random numbers, or draws" in part.reason


def made(self, x):
    y = self.norm(self.conv(x))
    size = y.shape[1:] if torch.numel(x) > 1 else (1, 1, 1)
    return y + y.new_ones(size) + y.new_zeros(*size) + y.new_full(size, 2)


class Beside(nn.Module):
    def __init__(self, does):
        super().__init__()
        self.one, self.other = net(does), net(by_value)

    def forward(self, x):
        return self.one(x), self.other(x)


@pytest.mark.parametrize("does", [*SIZED, made], ids=lambda does: does.__name__)
def test_it_is_opened_beside_a_part_that_decides_by_more(does):
    model, x = Beside(does).eval(), image()
    sized, closed = capture_sized(capture(model).module, [x])
    assert [*closed] == ["other"]
    for one in (x, -x):
        close(sized(one), copy.deepcopy(model)(one))


def test_a_loop_that_is_too_long_stays_one(monkeypatch):
    assert opened(net(rows), image())[1] is not None
    for file in ("recorded", "sized"):
        monkeypatch.setattr(f"nhwc.graph.tracing.{file}.MOST", 12)
    assert opened(net(rows), image())[1] is None


def fills(self, x):
    out = torch.zeros(x.shape[0], 8, *x.shape[2:])
    out[:, :, :4] = self.norm(self.conv(x))[:, :, :4]
    return out * 2


def reuses(self, x):
    mask = torch.zeros(x.shape[-1])
    y = self.norm(self.conv(x)) + mask
    mask.fill_(1)
    return y * mask


@pytest.mark.parametrize("does", [fills, reuses], ids=lambda does: does.__name__)
def test_a_tensor_that_is_made_and_then_written_to_is_made_in_every_call(does):
    model, x = net(does), image()
    close(nhwc.fuse(model)(x), model(x))
    fast = force(model, x)
    for other in random_inputs((x,), 3):
        close(fast(*other), model(*other))


@torch.no_grad()
def test_what_the_first_call_keeps_of_values_is_not_frozen():
    def calibrated(self, x):
        y = self.norm(self.conv(x if x.shape[0] else -x))
        if self.table is None:
            self.table = y.abs().mean()
        return y / self.table

    model = net(calibrated)
    fast = force(model, image())
    assert not any(plan.opened for plan in fast.report.plans)
    close(copy.deepcopy(fast)(image(seed=2) * 3), copy.deepcopy(model)(image(seed=2) * 3))


def normalizes(self, x, *_):
    if self.table is None:
        self.table = x.float().mean()
    return self.norm(self.conv(x.float())) / self.table


def weighs(self, x, mask):
    if self.table is None:
        self.table = mask.sum(-1, keepdim=True)
    return self.norm(self.conv(x)) / (1 + self.table)


PIXELS = torch.randint(0, 256, (2, 1, 3, 9, 10), generator=torch.Generator().manual_seed(0)).byte()
MASKS = torch.rand(2, 9, 10, generator=torch.Generator().manual_seed(0)) > 0.5


@pytest.mark.parametrize(
    ("does", "given", "others"),
    [
        (normalizes, (image(),), (image(seed=2) + 1,)),
        (normalizes, (PIXELS[0],), (PIXELS[1] // 2,)),
        (weighs, (image(), MASKS[0]), (image(), MASKS[1])),
    ],
    ids=["floats", "bytes", "masks"],
)
@torch.no_grad()
def test_what_the_first_call_keeps_of_any_numbers_is_not_frozen(does, given, others, tmp_path):
    model = net(does)
    fast = force(model, *given)
    assert not any(plan.opened for plan in fast.report.plans)
    with pytest.raises(InputError, match="cannot be saved"):
        nhwc.save(fast, tmp_path / "model.nhwc")
    close(fast(*others), copy.deepcopy(model)(*others))


@torch.no_grad()
def test_what_is_returned_belongs_to_the_caller():
    model, x = net(lambda self, x: (self.norm(self.conv(x)), torch.arange(x.shape[-1]))), image()
    fast = force(model, x)
    assert runs_program(fast, x)
    fast(x)[1].zero_()
    assert torch.equal(fast(x)[1], torch.arange(10))
    constant = net(lambda self, x: (self.norm(self.conv(x)), torch.arange(4)))
    fused = nhwc.fuse(constant)
    fused(x)[1].zero_()
    assert torch.equal(fused(x)[1], torch.arange(4))


@torch.no_grad()
def test_other_shapes_take_the_graph_for_all():
    model = net(odd)
    fast = force(model, image(), also=[image(1, 3, 9, 9)])
    for shape in [(2, 3, 9, 10), (1, 3, 9, 9)]:
        assert runs_program(fast, image(*shape))
    for shape in [(2, 3, 9, 11), (1, 3, 9, 10), (5, 3, 12, 12)]:
        assert not runs_program(fast, image(*shape))
    for shape in [(2, 3, 9, 10), (1, 3, 9, 9), (2, 3, 9, 11), (1, 3, 9, 10), (5, 3, 12, 12)]:
        close(fast(image(*shape)), model(image(*shape)))


@torch.no_grad()
def test_the_report_says_what_holds_for_these_shapes_alone():
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU(), net(odd), nn.ReLU()).eval()
    fast = force(model, image())
    [plan] = fast.report.plans
    assert [part.path for part in plan.opened] == ["2"]
    assert "branches" in plan.opened[0].reason
    # The convolution pads by itself.
    assert {layer.name for layer in plan.layers} == {"0", "2.conv"}
    assert [site.what for report in plan.passes for site in report.applied]
    text = " ".join(optimize_text(fast.report, "net").split())
    assert "for these shapes alone, with sizes known: 2 can be opened" in text
    assert fast.report.to_dict()["plans"][0]["opened"][0]["path"] == "2"


@dataclass
class Answer:
    features: torch.Tensor
    size: int


@torch.no_grad()
def test_a_function_that_fx_keeps_closed_is_opened_and_its_tables_are_made_once():
    model, x = net(with_closed_function), image()
    fast = force(model, x)
    assert [part.path for part in fast.report.plans[0].opened] == ["shaded"]
    assert "torch.fx.wrap" in fast.report.plans[0].opened[0].reason
    [recipe] = fast.recipes
    names = {str(node.target) for node in recipe.graph.graph.nodes}
    assert not names & {"new_zeros", "new_full", "masked_fill", "slice_scatter"}
    assert runs_program(fast, x)
    for one in (x, image(1, 3, 7, 9), image(2, 3, 9, 10, seed=2)):
        close(fast(one), model(one))


@torch.no_grad()
def test_two_inputs_and_structures_come_back_as_they_are():
    def does(self, x, y, flip: bool = False):
        y = F.interpolate(y, x.shape[-2:]) if y.shape != x.shape else y
        z = self.norm(self.conv(x.flip(-1) if flip else x)) + self.conv(y)
        return {"answer": Answer(z, z.shape[-1]), "parts": [z.mean(1), (z.amax(1),)]}

    model, x, y = net(does), image(), image(2, 3, 4, 5)
    for inputs in ((x, y), (x, y, True)):
        fast = force(model, *inputs)
        assert verify(observe(model, random_inputs(inputs, 3)), fast).passed
        close(fast(x, y)["answer"].features, model(x, y)["answer"].features)
        close(fast(x, y, True)["parts"][0], model(x, y, True)["parts"][0])
    assert runs_program(fast, x, y, True)
    assert not runs_program(fast, x, y, False)


@torch.no_grad()
def test_a_mode_that_code_sets_for_a_part_is_set_in_every_call():
    class Trains(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm2d(3)

        def forward(self, x):
            self.norm.train(x.shape[2] > 4)
            y = self.norm(x)
            self.norm.eval()
            return y

    model, x = Trains().eval(), image()
    sized, _ = capture_sized(capture(model).module, [x])
    close(sized(x), copy.deepcopy(model)(x))


@torch.no_grad()
def test_a_part_inside_that_decides_by_values_stays_and_the_rest_is_planned():
    def outer(self, x):
        if x.shape[-1] % 2 == 0:
            x = F.pad(x, (0, 1))
        return self.after(self.within(x) if len(x) else x)

    model = net(outer)
    model.within, model.after = net(by_value), nn.Sequential(nn.Conv2d(8, 4, 1), nn.ReLU())
    fast = force(model.eval(), image())
    [plan] = [plan for plan in fast.report.plans if plan.opened]
    assert [part.path for part in plan.opened] == [""]
    for x in (image(), -image(seed=2), image(1, 3, 8, 8)):
        close(fast(x), model(x))


@torch.no_grad()
@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_a_layer_whose_padding_became_a_layer_of_its_own_keeps_it(mode):
    model = net(odd)
    model.conv = nn.Conv2d(3, 8, 3, padding=1, padding_mode=mode)
    captured = capture(model, layers=True)
    run_passes(captured.module)
    sized, _ = for_sizes(captured.module, [image()], captured.opaque, PASSES)
    close(sized.graph(image(seed=2)), model(image(seed=2)))


@torch.no_grad()
def test_new_weights_end_the_plan_and_change_the_answers():
    model, x = woken(Odd), image()
    for change in (
        lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}),
        lambda m: m._apply(lambda t: t * 2 if t.is_floating_point() else t),
    ):
        fast = force(model, x)
        assert runs_program(fast, x)
        change(fast)
        expected = fast.portable(x)
        assert not torch.allclose(expected, model(x))
        with pytest.warns(UserWarning, match="made of the weights as they were") as told:
            close(fast(x), expected)
        assert told[0].filename == __file__
        close(fast(x), expected)
        close(pickle.loads(pickle.dumps(fast))(x), expected)
    fast = force(model, x)
    next(fast.parameters()).mul_(2)
    copied = copy.deepcopy(fast)
    with pytest.warns(UserWarning, match="made of the weights as they were"):
        close(copied(x), fast.portable(x))


class Writing(Layers):
    def forward(self, x):
        return x if x.shape[2] > 100 else self.written(self.norm(self.conv(x)))


class IntoContiguous(Writing):
    def written(self, y):
        z = y.contiguous()
        z.mul_(2)
        return y + z


class IntoPartOfContiguous(Writing):
    def written(self, y):
        z = y.contiguous()
        z[:, :2] = 0
        return y + z


class IntoConverted(Writing):
    def written(self, y):
        z = y.to(memory_format=torch.channels_last)
        torch.add(z, 1, out=z)
        return y * z


class IntoReshaped(Writing):
    def written(self, y):
        z = y.reshape(len(y), -1)
        z += z.mean()
        return y + z.sum()


class IntoWhatWasFlattened(Writing):
    def written(self, y):
        z = torch.flatten(y, 1)
        torch.relu_(y)
        return y + z.sum()


class IntoPassedOn(Writing):
    def written(self, y):
        torch.relu_(y.contiguous().permute(0, 2, 3, 1))
        return y * 2


@pytest.mark.parametrize("example", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    "kind",
    [
        *(IntoContiguous, IntoPartOfContiguous, IntoConverted, IntoReshaped),
        *(IntoWhatWasFlattened, IntoPassedOn),
    ],
)
@torch.no_grad()
def test_a_write_into_what_may_be_a_copy_shows_where_it_does_in_eager(kind, example):
    model, x = woken(kind), image()
    fast = force(model, x.to(memory_format=example))
    for layout in (torch.contiguous_format, torch.channels_last):
        given = x.to(memory_format=layout)
        close(fast(given), model(given))


class IntoItsOwnType(Writing):
    def written(self, y):
        z = y.to(y.dtype)
        z[:, :2] = z[:, 2:4].to("cpu", y.dtype)
        return y + z


@torch.no_grad()
def test_what_has_the_type_already_is_no_copy_in_any_call_and_written_into_in_the_plan():
    model, x = woken(IntoItsOwnType), image()
    fast = force(model, x)
    for given in (x, x.to(memory_format=torch.channels_last)):
        assert runs_program(fast, given)
        close(fast(given), model(given))
    close(fast.double()(x.double()), model.double()(x.double()))


class Summed(Layers):
    def forward(self, x):
        if x.shape[2] > 100:
            return x
        y = self.norm(self.conv(x))
        total = x.new_zeros(y.shape)
        total[:, :2].add_(y[:, :2])
        total.add_(y)
        return total.flatten(1)


@pytest.mark.parametrize("kind", [Odd, Summed])
@torch.no_grad()
def test_copies_and_moves_that_change_nothing_keep_the_plan(kind):
    model, x = woken(kind), image()
    fast = force(model, x)
    for same in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast)), fast.to("cpu").float()):
        close(same(x), model(x))
        assert runs_program(same, x)
    assert not runs_program(fast.double(), x.double())
    close(fast(x.double()).float(), model(x))


@torch.no_grad()
def test_threads_share_it():
    model = net(windows)
    fast, wrong = force(model, image()), []

    def work(seed):
        for turn in range(10):
            x = image(2, 3, 9, 10 + turn % 2, seed=seed)
            if not torch.allclose(fast(x), model(x), atol=2e-5):
                wrong.append(seed)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert not wrong


def test_gradients_and_weights_are_those_of_the_graph_for_all():
    model, x = nn.Sequential(nn.Conv2d(3, 3, 1), woken(Odd)).eval(), image().requires_grad_()
    before = copy.deepcopy(model.state_dict())
    fast = force(model, x.detach())
    with pytest.warns(UserWarning, match="gradients"):
        fast(x).sum().backward()
    assert x.grad is not None
    assert not [name for name in fast.state_dict() if not name.startswith("portable.")]
    assert all(
        torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True)
    )
    [recipe] = fast.recipes
    assert recipe.graph.get_submodule("0").weight is fast.portable.get_submodule("0").weight


@torch.no_grad()
def test_saved_for_its_shapes_it_refuses_others(tmp_path):
    model, x = net(odd), image()
    fast = force(model, x)
    nhwc.save(fast, tmp_path / "model.nhwc")
    loaded = nhwc.load(tmp_path / "model.nhwc")
    close(loaded(x), model(x))
    assert len(loaded.recipes) == 1
    for other in (image(1, 3, 9, 10), image(2, 3, 9, 11), x.double()):
        with pytest.raises(InputError, match=r"was saved for an input of \[2, 3, 9, 10\]"):
            loaded(other)
    nhwc.save(loaded, tmp_path / "again.nhwc")
    close(nhwc.load(tmp_path / "again.nhwc")(x), model(x))
    both = force(model, x, also=[image(1, 3, 9, 9)])
    with pytest.raises(InputError, match="2 sets of shapes"):
        nhwc.save(both, tmp_path / "both.nhwc")


@torch.no_grad()
@pytest.mark.parametrize("stage", ["input", "graph"])
@pytest.mark.parametrize("does", [odd, cached])
def test_what_was_not_planned_is_saved_for_its_shapes_too(does, stage, tmp_path):
    model, x = net(does), image()
    fast = won_by(stage, model, x)
    nhwc.save(fast, tmp_path / "model.nhwc")
    loaded = nhwc.load(tmp_path / "model.nhwc")
    close(loaded(x), model(x))
    with pytest.raises(InputError, match=r"was saved for an input of \[2, 3, 9, 10\]"):
        loaded(image(2, 3, 9, 11))
    with pytest.raises(InputError, match=r"by sizes alone, save what nhwc.optimize returns"):
        nhwc.save(model, tmp_path / "given.nhwc")
    both = won_by(stage, model, x, also=[image(1, 3, 9, 9)])
    with pytest.raises(InputError, match="2 sets of shapes"):
        nhwc.save(both, tmp_path / "both.nhwc")


@torch.no_grad()
def test_new_weights_are_saved_where_a_plan_for_known_sizes_held_the_old_ones(tmp_path):
    model, x = net(odd), image()
    fast = force(model, x)
    for parameter in fast.parameters():
        parameter.mul_(0.5)
    expected = fast.portable(x)
    nhwc.save(fast, tmp_path / "model.nhwc")
    close(nhwc.load(tmp_path / "model.nhwc")(x), expected)


@torch.no_grad()
def test_a_graph_that_computes_something_else_is_dropped(monkeypatch):
    import nhwc._optimize.stages as module

    def spoiled(*args):
        sized, _ = for_sizes(*args)
        next(sized.graph.modules()).register_buffer("wrong", torch.tensor(2.0))
        [output] = sized.graph.graph.find_nodes(op="output")
        with sized.graph.graph.inserting_before(output):
            twice = sized.graph.graph.call_function(torch.add, (output.args[0], 1))
        output.args = (twice,)
        sized.graph.recompile()
        return sized, ""

    monkeypatch.setattr(module, "for_sizes", spoiled)
    model, x = net(odd), image()
    fast = force(model, x)
    assert fast.report.verification.passed
    assert not any(plan.opened for plan in fast.report.plans)
    said = [plan.reason.partition(":")[0] for plan in fast.report.plans]
    assert said[0] == "with sizes known, the plan differs in output on input 0"
    close(fast(x), model(x))


@pytest.mark.parametrize(
    ("name", "side"),
    [("mobilevit_xxs", 64), ("tiny_vit_5m_224", 224), ("twins_svt_small", 224)],
)
@torch.no_grad()
def test_models_of_timm(name, side):
    import_torchvision()
    pytest.importorskip("timm")
    model = randomize_batchnorm_(load_model(f"timm:{name}")).eval()
    x = image(1, 3, side, side)
    captured, sized = opened(model, x)
    assert captured.opaque
    assert sized.opened == captured.opaque
    assert verify(observe(model, [(x,)]), sized.graph).passed


class Wrapping(nn.Module):
    """Asks for the result of a part that decides by data: all sizes stop at the question."""

    def __init__(self):
        super().__init__()
        self.inner = net(by_value)

    def forward(self, x):
        y = self.inner(x)
        return x if y is None else y * 2


def test_what_ends_a_run_with_sizes_known_is_told_though_the_model_can_be_called_as_a_whole():
    [whole] = [part for part in force(Wrapping().eval(), image()).report.opaque if not part.path]
    assert whole.reason.startswith("it asks whether the result of a part that cannot be traced")
    assert "; with sizes known, it branches on data" in whole.reason


def decorated(forward):
    @functools.wraps(forward)
    def passing(self, *args, **kwargs):
        return forward(self, *args, **kwargs)

    return passing


class Decorated(nn.Module):
    """Has an option and branches on a size; and one part decides by data."""

    def __init__(self):
        super().__init__()
        self.inner, self.last = net(by_value), nn.Conv2d(8, 8, 3)

    @decorated
    def forward(self, x, mask=None, scale=2):
        y = self.inner(x if x.shape[-1] % 2 == 0 else x * 2)
        return self.last(y * scale) if mask is None else y


@torch.no_grad()
def test_a_model_with_options_is_opened_around_the_part_that_decides_by_data():
    model, x = Decorated().eval(), image()
    fast = force(model, x)
    [said] = [plan for plan in fast.report.plans if not plan.part]
    assert "" in [part.path for part in said.opened]
    assert [layer.name for layer in said.layers if "last" in layer.name]
    for given in (x, image(1, 3, 8, 9)):
        close(fast(given), model(given))
    close(fast(x, scale=3), model(x, scale=3))
    close(fast(x, mask=x), model(x, mask=x))


def of_types(self, x):
    if self.scale.dtype in (torch.float16, torch.bfloat16) or self.scale.T.dtype == torch.float64:
        x = x.to(self.scale.dtype)
    return self.norm(self.conv(x)) * self.scale


class Typed(nn.Module):
    def __init__(self):
        super().__init__()
        self.deciding, self.last = net(by_value), net(of_types)
        self.last.conv = nn.Conv2d(8, 8, 3)

    def forward(self, x):
        return self.last(self.deciding(x if x.shape[-1] % 2 == 0 else x * 2))


@torch.no_grad()
def test_beside_a_part_that_decides_by_data_code_may_ask_for_the_type_of_a_weight():
    model, x = Typed().eval(), image()
    fast = force(model, x)
    [said] = [plan for plan in fast.report.plans if not plan.part]
    assert "last" in [part.path for part in said.opened]
    close(fast(x), model(x))
    close(fast.double()(x.double()), model.double()(x.double()))


def uncast(self, x):
    with torch.autocast("cpu", torch.float32):
        return self.norm(self.conv(x))


@pytest.mark.filterwarnings("ignore:In CPU autocast, but the target dtype")
def test_autocast_to_a_type_that_torch_ignores_changes_nothing():
    model, x = net(uncast), image()
    fast = force(model, x)
    assert runs_program(fast, x)
    close(fast(x), copy.deepcopy(model)(x))
