"""Graphs inside opaque parts: planned for what they are given there, right for all else."""

import copy
import json
import pickle
import warnings
from collections import UserDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nhwc
from nhwc import InputError
from nhwc._optimize.inner import inner_graphs, unplanned
from nhwc.optimized import Optimized
from nhwc.passes import FOLDING
from nhwc.render.optimize_html import optimize_html
from nhwc.render.optimize_text import optimize_text
from nhwc.verify.widened import widened
from nhwc.zoo import randomize_batchnorm_

from ..browser import needs_browser, opened
from ..optimizing import close, force, remembered, won_by
from ..processor import computes


def block(inputs, outputs, **options):
    convolution = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False, **options)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


def made(kind, *inputs):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return randomize_batchnorm_(kind(*inputs)).eval()


class TwoWays(nn.Module):
    """Goes on by the values of what the first block finds."""

    def __init__(self):
        super().__init__()
        self.first, self.bright, self.dark = block(3, 8), block(8, 8), block(8, 6, stride=2)

    def forward(self, x):
        x = self.first(x)
        return self.bright(x) if x.mean() > 0.2 else self.dark(x)


class Pyramid(nn.Module):
    """One head for images of falling sizes, over a list, as long as there is something to see."""

    def __init__(self, levels=3):
        super().__init__()
        self.levels, self.trunk, self.head = levels, block(3, 8), block(8, 4)

    def forward(self, images):
        found = []
        for image in images:
            x = self.trunk(image[None])
            for _ in range(self.levels):
                found.append(self.head(x))
                x = F.avg_pool2d(x, 2)
            if x.sum() > 1e9:
                break
        return found


class Refining(nn.Module):
    """Until it is close enough, it refines what it has."""

    def __init__(self):
        super().__init__()
        self.start, self.step = block(3, 6), nn.Sequential(block(6, 6), nn.Conv2d(6, 6, 1))

    def forward(self, x):
        x = self.start(x)
        for _ in range(5):
            x = x - 0.1 * self.step(x)
            if x.abs().max() < 1e-3:
                break
        return x


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)

    def forward(self, x, scale):
        y = self.norm(self.conv(x)) * scale
        return {"whole": y, "half": (y[:, :4] + 1, y.mean())}


class Several(nn.Module):
    """Its part takes a number too, and answers with more than one tensor."""

    def __init__(self):
        super().__init__()
        self.halves = Halves()

    def forward(self, x):
        found = self.halves(x, 2.0)
        return found["half"] if found["half"][1] > 1e6 else (found["whole"], found["half"])


class Inside(nn.Module):
    """A part that branches between layers that a graph can hold."""

    def __init__(self):
        super().__init__()
        self.before, self.part, self.after = block(3, 8), TwoWays(), nn.Conv2d(8, 4, 1)
        self.part.first, self.part.dark = block(8, 8), block(8, 8, stride=2)

    def forward(self, x):
        return self.after(self.part(self.before(x)))


class Halved(nn.Module):
    """A part that branches, and writes into what it is given."""

    def forward(self, x):
        return x.mul_(0.5) if x.sum() < 1e9 else x


class Around(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part = part


class ByName(Around):
    def forward(self, x):
        y = self.part(scale=2.0, x=x)
        return y if y.sum() > 1e9 else y + 1


class Seeing(Around):
    """Reads what it gave to its part afterwards."""

    def forward(self, x):
        given = x.clone()
        y = self.part(given)
        return y if y.sum() > 1e9 else y + given.mean()


class Writing(Around):
    """Writes into one thing that its part returns, and reads the other."""

    def forward(self, x):
        y, flat = self.part(x)
        if y.sum() < 1e9:
            y.add_(1)
        return flat * 2


class OfObject(Around):
    def forward(self, x):
        y = self.part(UserDict({0: x, 1: x + 1}))
        return y if y.sum() > 1e9 else y + 1


class OfList(Around):
    def forward(self, x):
        y = self.part([x, x + 1])
        return y if y.sum() > 1e9 else y + 1


class Rectified(nn.Module):
    def __init__(self):
        super().__init__()
        self.act, self.body = nn.ReLU(inplace=True), block(3, 4)

    def forward(self, x):
        return self.body(self.act(x))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = block(3, 4)

    def forward(self, x, scale):
        return self.body(x) * scale


class Flat(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = block(3, 4)

    def forward(self, x):
        y = self.body(x)
        return y, y.flatten(1)


class Summed(Flat):
    def forward(self, images):
        return self.body(images[0]) + self.body(images[1])


def drawn(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def image():
    return drawn(2, 3, 20, 18)


def exact(model, *inputs):
    """What `model` answers in float64."""
    wide = [[y.double() for y in x] if isinstance(x, list) else x.double() for x in inputs]
    return widened(model)(*wide)


def same(ours, truth):
    if isinstance(ours, (list, tuple)):
        assert len(ours) == len(truth)
        for one, other in zip(ours, truth, strict=True):
            same(one, other)
    else:
        assert (ours.double() - truth).abs().max() <= 1e-5 * truth.abs().max()


def parts_of(fast):
    """The planned modules within, by the path of their graph."""
    inside = [m for m in fast.portable.modules() if isinstance(m, Optimized)]
    return {part.portable.meta["path"]: part for part in inside}


def served(fast, *inputs):
    """How many calls of each part a program answers, and how many its graph."""
    counts = {}

    def counted(kind, key):
        run = kind.__call__

        def call(module, *args, **named):
            if module is modules[key]:
                counts[key] = counts.get(key, 0) + 1
            return run(module, *args, **named)

        return mock.patch.object(kind, "__call__", call)

    parts = parts_of(fast)
    modules = {(path, "call"): part for path, part in parts.items()}
    modules |= {(path, "graph"): part.portable for path, part in parts.items()}
    with warnings.catch_warnings(), ExitStack() as stack:
        warnings.simplefilter("ignore")
        for key, module in modules.items():
            stack.enter_context(counted(type(module), key))
        fast(*inputs)
    return {
        path: (counts.get((path, "call"), 0) - counts.get((path, "graph"), 0),
               counts.get((path, "graph"), 0))
        for path in parts
    }  # fmt: skip


def planned(report):
    return [(plan.part, *plan.inputs) for plan in report.plans if plan.planned]


def reasons(report):
    return {plan.part: plan.reason for plan in report.plans if not plan.planned}


@torch.no_grad()
def test_blocks_around_a_branch(image):
    model = made(TwoWays)
    fast = force(model, image)
    assert fast.report.chosen == "plan"
    assert fast.report.reason == ""
    assert fast.report.verification.passed
    assert fast.report.verification.in_float64
    way = "bright" if model.first(image).mean() > 0.2 else "dark"
    other = {"bright": "dark", "dark": "bright"}[way]
    assert planned(fast.report) == [
        ("first", "2x3x20x18 float32"), (way, "2x8x20x18 float32"),
    ]  # fmt: skip
    assert reasons(fast.report) == {other: "the example does not call it"}
    for x in (image, drawn(2, 3, 20, 18, seed=3), image * 40, image * 0.001, image[:1]):
        same(fast(x), exact(model, x))
    assert served(fast, image) == {"first": (1, 0), way: (1, 0)}
    assert served(fast, image[:1])["first"] == (0, 1)


@torch.no_grad()
def test_a_part_called_with_several_shapes_over_a_list():
    model, images = made(Pyramid), [drawn(3, 24, 20), drawn(3, 24, 20, seed=2)]
    fast = force(model, images)
    assert planned(fast.report) == [
        ("trunk", "1x3x24x20 float32"), ("head", "1x8x24x20 float32"),
        ("head", "1x8x12x10 float32"), ("head", "1x8x6x5 float32"),
    ]  # fmt: skip
    same(fast(images), exact(model, images))
    assert served(fast, images) == {"trunk": (2, 0), "head": (6, 0)}
    others = [images[0], drawn(3, 15, 33)]
    same(fast(others), exact(model, others))
    assert served(fast, others) == {"trunk": (1, 1), "head": (3, 3)}


@torch.no_grad()
def test_of_many_shapes_the_largest_are_planned():
    model, images = made(Pyramid, 5), [drawn(3, 64, 64)]
    fast = force(model, images)
    assert [inputs for part, inputs in planned(fast.report) if part == "head"] == [
        "1x8x64x64 float32", "1x8x32x32 float32", "1x8x16x16 float32", "1x8x8x8 float32",
    ]  # fmt: skip
    assert reasons(fast.report) == {"head": "it is planned for 4 larger inputs"}
    assert served(fast, images)["head"] == (4, 1)
    same(fast(images), exact(model, images))


@torch.no_grad()
def test_a_part_that_is_given_a_list(image):
    model = made(lambda: OfList(Summed()))
    fast = force(model, image)
    assert planned(fast.report) == [("part", "[2x3x20x18 float32, 2x3x20x18 float32]")]
    assert served(fast, image) == {"part": (1, 0)}
    same(fast(image), exact(model, image))


@torch.no_grad()
def test_a_part_called_in_a_loop(image):
    model = made(Refining)
    fast = force(model, image)
    assert served(fast, image) == {"start": (1, 0), "step": (5, 0)}
    same(fast(image), exact(model, image))


@torch.no_grad()
def test_several_outputs_and_a_number(image):
    model = made(Several)
    fast = force(model, image)
    assert planned(fast.report) == [("halves", "2x3x20x18 float32", "2.0")]
    assert served(fast, image) == {"halves": (1, 0)}
    same(fast(image), exact(model, image))


@torch.no_grad()
def test_a_part_called_by_name(image):
    model = made(lambda: ByName(Scaled()))
    fast = force(model, image)
    assert planned(fast.report) == [("part", "2x3x20x18 float32", "2.0")]
    assert served(fast, image) == {"part": (1, 0)}
    same(fast(image), exact(model, image))


@torch.no_grad()
def test_the_whole_around_an_opaque_part_is_planned_too(image):
    model = made(Inside)
    fast = force(model, image)
    first, way, whole = (part for part, *_ in planned(fast.report))
    assert (first, whole) == ("part.first", "")
    assert way in ("part.bright", "part.dark")
    assert served(fast, image) == {first: (1, 0), way: (1, 0)}
    same(fast(image), exact(model, image))
    same(fast(image[:, :, :9]), exact(model, image[:, :, :9]))
    twin = pickle.loads(pickle.dumps(fast))
    same(twin(image), exact(model, image))


@torch.no_grad()
def test_what_an_opaque_part_writes_into_is_not_the_example(image):
    model, given = nn.Sequential(Halved(), nn.Conv2d(3, 4, 1)).eval(), image.clone()
    fast = force(model, given)
    assert torch.equal(given, image)
    assert "writes into input_1, which outlives the call" in fast.report.reason
    same(fast(given), exact(model, image.clone()))


@pytest.mark.parametrize(
    ("around", "part", "says"),
    [
        (Writing, Flat, "shares memory"),
        (OfObject, Summed, "more than tensors and numbers"),
    ],
)
@torch.no_grad()
def test_what_the_code_around_would_notice_is_not_planned(around, part, says, image):
    model = made(lambda: around(part()))
    fast = force(model, image)
    assert parts_of(fast) == {}
    assert says in reasons(fast.report)["part"]
    assert says in fast.report.reason
    same(fast(image), exact(model, image))


@torch.no_grad()
def test_the_code_around_sees_what_a_part_wrote_into_its_input(image):
    model = made(lambda: Seeing(Rectified()))
    fast = force(model, image)
    assert "part" in parts_of(fast)
    same(fast(image), exact(model, image))


def test_gradients_take_the_graphs(image):
    model = made(TwoWays)
    fast = force(model, image)
    x = image.clone().requires_grad_()
    with pytest.warns(UserWarning, match="gradients are wanted"):
        fast(x).sum().backward()
    ours, x.grad = x.grad, None
    model(x).sum().backward()
    close(ours, x.grad, 1e-4)
    assert not fast(image).requires_grad
    assert served(fast, image)["first"] == (1, 0)


@pytest.mark.skipif(not computes(torch.bfloat16), reason="torch does not convolve in bfloat16 here")
@torch.no_grad()
def test_autocast_takes_the_graphs_and_inference_mode_the_plans(image):
    model = made(TwoWays)
    fast = force(model, image)
    with torch.inference_mode():
        same(fast(image), exact(model, image))
        assert served(fast, image)["first"] == (1, 0)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert served(fast, image)["first"] == (0, 1)
            assert fast(image).dtype == model(image).dtype


class Mixed(nn.Module):
    """Sets autocast itself around two of its parts: the second is given half precision."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = block(3, 8), block(8, 8), block(8, 8)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.second(self.first(x))
        return self.last(x.float())


@pytest.mark.skipif(not computes(torch.bfloat16), reason="torch does not convolve in bfloat16 here")
@torch.no_grad()
def test_parts_that_the_model_calls_under_autocast_have_no_plan(image):
    model = made(Mixed)
    fast = force(model, image)
    assert parts_of(fast).keys() == {"last"}
    said = reasons(fast.report)
    assert "sets autocast" in said["first"]
    assert "sets autocast" in said["second"]
    torch.testing.assert_close(fast(image), model(image), atol=0.05, rtol=0.05)


class Guided(nn.Module):
    """Answers with a gradient of what its parts make of the image."""

    def __init__(self):
        super().__init__()
        self.first, self.last = block(3, 8), block(8, 8)

    def forward(self, x):
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.last(self.first(x)).sum(), x)
        return slope


def test_a_model_that_asks_for_gradients_itself_keeps_its_code(image):
    model = made(Guided)
    fast = nhwc.optimize(model, image)
    assert "with gradients" in fast.report.opaque[0].reason
    assert "sets autocast or gradients" in reasons(fast.report)["first"]
    close(fast(image), model(image), 1e-4)
    with torch.no_grad():
        close(fast(image), model(image), 1e-4)


@torch.no_grad()
def test_threads_share_the_parts():
    model = made(Pyramid)
    inputs = [[drawn(3, 24, 20, seed=seed)] for seed in range(8)]
    fast, answers = force(model, inputs[0]), {}

    def work(number):
        with torch.no_grad():
            for _ in range(5):
                answers[number] = fast(inputs[number])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(len(inputs))))
    for number, images in enumerate(inputs):
        same(answers[number], exact(model, images))


@torch.no_grad()
def test_copies_make_their_own_programs_and_new_weights_are_noticed(image):
    model = made(Refining)
    fast = force(model, image)
    twin = copy.deepcopy(fast)
    for weight in twin.parameters():
        weight.mul_(1.1)
    assert served(twin, image) == {"start": (1, 0), "step": (5, 0)}
    same(fast(image), exact(model, image))
    graph = copy.deepcopy(twin)
    for part in parts_of(graph).values():
        part._recipes = {}
    assert served(graph, image) == {"start": (0, 1), "step": (0, 5)}
    close(twin(image), graph(image))
    assert not torch.allclose(twin(image), fast(image))


@torch.no_grad()
def test_a_moved_model_answers_in_its_new_precision(image):
    model = made(TwoWays)
    fast = force(model, image).double()
    same(fast(image.double()), exact(model, image))


def test_the_model_is_left_as_it_was(image):
    model = made(Refining)
    modules, state = list(model.modules()), copy.deepcopy(model.state_dict())
    force(model, image)
    assert list(model.modules()) == modules
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in modules)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


@torch.no_grad()
def test_more_examples_are_planned_and_held_against_the_original(image):
    model, small = made(TwoWays), drawn(1, 3, 9, 9)
    fast = force(model, image, also=[small])
    first = [inputs for part, inputs in planned(fast.report) if part == "first"]
    assert first == ["2x3x20x18 float32", "1x3x9x9 float32"]
    same(fast(small), exact(model, small))
    assert {check.output for check in fast.report.verification.checks} == {"output"}
    assert len(fast.report.verification.checks) == 4


@torch.no_grad()
def test_where_the_plans_lose_the_graph_comes_back_without_them(image):
    model = made(TwoWays)
    fast = won_by("graph", model, image)
    assert parts_of(fast) == {}
    assert inner_graphs(fast.portable)
    assert set(fast.report.times) == {"input", "graph", "plan"}
    same(fast(image), exact(model, image))


def test_a_second_time_measures_nothing(image):
    force(made(Refining), image)
    again = force(made(Refining), image).report
    assert sum(plan.measured for plan in again.plans) == 0
    assert again.verification.remembered
    other = force(made(Refining), image, passes=FOLDING).report
    assert not other.verification.remembered


def test_a_wrong_plan_of_a_part_is_found(image, monkeypatch):
    import nhwc._optimize.planner as module

    def wrong(graph, *args, **options):
        plan = make(graph, *args, **options)
        kind = type(plan.program)
        call = kind.__call__
        monkeypatch.setattr(kind, "__call__", lambda self, x: call(self, x) * 1.001)
        return plan

    make = module.make_plan
    monkeypatch.setattr(module, "make_plan", wrong)
    with pytest.raises(nhwc.VerificationError, match="relative error"):
        force(made(Refining), image)


def test_parts_are_in_the_report(image):
    report = force(made(TwoWays), image).report
    text = optimize_text(report, "two ways")
    assert "(TwoWays) stays: it branches on data" in text
    assert "plan for first, 2x3x20x18 float32: 1 layer" in text
    assert "no plan\n" in text
    assert ": the example does not call it" in text
    page = optimize_html(report, "two ways")
    assert '"part":"first"' in page
    data = json.loads(json.dumps(report.to_dict()))
    assert [plan["part"] for plan in data["plans"]] == [plan.part for plan in report.plans]


@torch.no_grad()
def test_graphs_can_be_looked_into_again(image):
    fast = force(made(Refining), image)
    plain = unplanned(fast.portable)
    assert not any(isinstance(module, Optimized) for module in plain.modules())
    assert len(parts_of(fast)) == 2
    close(plain(image), fast(image))
    seen = [call.operator for call in nhwc.audit(plain, image).calls]
    assert seen.count("torch.nn.functional.conv2d") == 11


@needs_browser[1]
@needs_browser[0]
def test_the_page_shows_parts(image, tmp_path):
    from selenium.webdriver.common.by import By

    page = tmp_path / "page.html"
    page.write_text(optimize_html(force(made(TwoWays), image).report, "two ways"))
    with opened(page) as browser:
        heads = [head.text for head in browser.find_elements(By.CSS_SELECTOR, "#plans h2")]
        assert heads[0] == "Layers of first for 2x3x20x18 float32"
        assert len(heads) == 3
        [left] = browser.find_elements(By.CSS_SELECTOR, ".unplanned p")
        assert left.text.endswith(": the example does not call it")


def test_such_a_model_cannot_be_saved_and_one_line_says_why(image, tmp_path):
    fast = force(made(TwoWays), image)
    with pytest.raises(InputError, match="a TwoWays, whose own code it takes to load it") as error:
        nhwc.save(fast, tmp_path / "no.nhwc")
    assert "\n" not in str(error.value)
    assert list(tmp_path.iterdir()) == []


@torch.no_grad()
def test_a_detector_of_torchvision():
    from nhwc.models.vision import import_torchvision

    detection = import_torchvision().models.detection
    trunk = nn.Sequential(block(3, 8), nn.MaxPool2d(2), block(8, 16), nn.MaxPool2d(2))
    trunk.out_channels = 16
    anchors = detection.anchor_utils.AnchorGenerator(((8, 16),), ((1.0,),))
    pooler = nhwc.models.vision.import_torchvision().ops.MultiScaleRoIAlign(["0"], 3, 2)
    options = {"min_size": 64, "max_size": 64, "box_detections_per_img": 5}
    options |= {"rpn_post_nms_top_n_test": 20, "rpn_pre_nms_top_n_test": 40}
    model = made(
        lambda: detection.FasterRCNN(
            trunk, 3, rpn_anchor_generator=anchors, box_roi_pool=pooler, **options
        )
    )
    images = [drawn(3, 64, 64).sigmoid(), drawn(3, 48, 64, seed=2).sigmoid()]
    fast = force(model, images)
    assert fast.report.verification.passed
    assert {"backbone", "rpn.head.conv", "roi_heads.box_head"} <= {
        part for part, *_ in planned(fast.report)
    }
    assert served(fast, images)["backbone"] == (1, 0)
    for ours, theirs in zip(fast(images), model(images), strict=True):
        close(ours["scores"], theirs["scores"], 1e-3)
        close(ours["boxes"], theirs["boxes"], 1e-2)


class Heads(nn.Module):
    """Layers called straight from code that no graph can be made of, one in a loop."""

    def __init__(self):
        super().__init__()
        self.trunk, self.logits = block(3, 8), nn.Conv2d(8, 5, 3, padding=1)
        self.step, self.score = nn.Conv2d(8, 8, 1), nn.Linear(5, 3)
        self.hooked = nn.Conv2d(5, 5, 1)
        self.hooked.register_forward_hook(lambda module, args, result: result + 1)

    def forward(self, x):
        x = self.trunk(x)
        while x.abs().max() > 2:
            x = self.step(x) * 0.1
        x = self.hooked(self.logits(x)).mean((2, 3))
        return self.score(x)


class ReadingHeads(Heads):
    """Reads the weights of its layers too."""

    def forward(self, x):
        return super().forward(x) + self.score.bias


@pytest.fixture
def gaining(monkeypatch):
    """Whether a layer alone gains by a kernel is for timing, not for tests."""
    import nhwc._optimize.planner as module

    monkeypatch.setattr(module, "gains", lambda *_: True)


@torch.no_grad()
def test_layers_that_opaque_code_calls_are_planned_as_graphs_are(image, gaining):
    model = made(Heads)
    before = copy.deepcopy(model.state_dict())
    fast = force(model, image * 40)
    assert {part for part, *_ in planned(fast.report)} == {"trunk", "step", "logits", "score"}
    assert served(fast, image * 40)["step"][0] > 0
    for x in (image, image * 40, image[:1], image.to(memory_format=torch.channels_last)):
        same(fast(x), exact(model, x))
        same(copy.deepcopy(fast)(x), exact(model, x))
    assert fast.report.verification.in_float64
    close(model.state_dict(), before, 0)


@torch.no_grad()
def test_layers_whose_weights_are_read_are_left_alone(image, gaining):
    model = made(ReadingHeads)
    fast = force(model, image)
    assert {part for part, *_ in planned(fast.report)} == {"trunk"}
    same(fast(image), exact(model, image))


@torch.no_grad()
def test_a_layer_alone_that_gains_nothing_is_left_to_torch_and_the_report_says_so(
    image, monkeypatch
):
    import nhwc._optimize.planner as module

    monkeypatch.setattr(module, "gains", lambda *_: False)
    fast = force(made(Heads), image * 40)
    assert {part for part, *_ in planned(fast.report)} == {"trunk"}
    slower = "no kernel is faster than torch's on what it is given"
    assert reasons(fast.report) == {"step": slower, "logits": slower, "score": slower}


@torch.no_grad()
def test_what_a_layer_alone_gains_is_measured_once(image):
    force(made(Heads), image * 40)
    known = remembered("gain of")
    assert force(made(Heads), image * 40).report.plans
    assert remembered("gain of") == known != {}


@torch.no_grad()
def test_a_wrong_plan_of_a_layer_alone_is_found(image, gaining, monkeypatch):
    import nhwc._optimize.planner as module

    def wrong(plan, graph, inputs):
        found = serve(plan, graph, inputs)
        if graph.meta.get("path") != "score":
            return found
        return replace(found, program=lambda x: found.program(x) * 1.001)

    serve = module.served
    monkeypatch.setattr(module, "served", wrong)
    with pytest.raises(nhwc.VerificationError, match="relative error"):
        force(made(Heads), image * 40)


class Maps(nn.Module):
    """Runs one of its parts image by image, and the other as ever."""

    def __init__(self):
        super().__init__()
        self.net, self.head = block(3, 8), block(8, 4)

    def forward(self, x):
        y = torch.vmap(self.net)(x[:, None])[:, 0]
        return self.head(y) if y.sum() > 0 else self.head(y) - 1


@torch.no_grad()
def test_a_part_that_is_mapped_over_images_has_no_plan():
    """What `vmap` gives it has no memory to look at: optimize ended in torch's error."""
    model, x = randomize_batchnorm_(Maps()).eval(), torch.rand(2, 3, 8, 8)
    fast = force(model, x)
    close(fast(x), model(x))
    assert [plan.reason.rpartition("under ")[2] for plan in fast.report.plans] == [
        "vmap or another transform of torch.func",
        "",
    ]


class BothWays(nn.Module):
    """Calls a part with one image in both layouts, and counts on how its answers lie."""

    def __init__(self):
        super().__init__()
        self.part = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())

    def forward(self, x):
        first = self.part(x)
        second = self.part(x.contiguous(memory_format=torch.channels_last))
        if first.sum() > 1e9:
            return first
        return first.view(len(x), -1), second.permute(0, 2, 3, 1).view(len(x), -1)


@torch.no_grad()
def test_a_part_whose_answers_of_one_shape_lie_differently_has_no_plan():
    model, x = made(BothWays), torch.rand(1, 3, 12, 10)
    fast = force(model, x)
    assert "lies otherwise in memory" in reasons(fast.report)["part"]
    close(fast(x), model(x))
