"""Images in neither format: a plan hands views of them on as eager does, and copies for itself."""

import functools
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import nhwc
from nhwc import fuse
from nhwc.formats import Format
from nhwc.plan.binding import Packed, bind
from nhwc.plan.implementation import Timed
from nhwc.plan.scene import scene_of
from nhwc.plan.trials import time_layer

from ..optimizing import force


class Beside(nn.Module):
    """A view, and convolutions that a plan would rather read in a format."""

    def __init__(self, view):
        super().__init__()
        self.view = view
        self.first, self.second = nn.Conv2d(5, 16, 1), nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x):
        seen = self.view(x)
        return seen, F.relu(self.second(F.relu(self.first(seen)))), self.first(x)


class Opaque(nn.Module):
    def forward(self, x):
        return x if x.sum() < 1e9 else x + 1


VIEWS = {
    "transpose": lambda x: x.transpose(2, 3),
    "slice": lambda x: x[:, :, 1:],
    "chunk of dropout": lambda x: F.dropout2d(x, 0.0, True).chunk(2, 3)[1],
    "opaque": Opaque(),
}


class Convolved(nn.Module):
    """Views of an image that a plan reads in another format for a convolution."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 16, 3), nn.Conv2d(4, 8, 1)

    def forward(self, x):
        narrow = x.narrow(1, 4, 4)
        return self.first(x).relu(), narrow, self.second(narrow), x.flatten(2), x


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("reads", [Format.CONTIGUOUS, Format.CHANNELS_LAST])
def test_views_that_are_returned_share_memory_in_every_plan(layout, reads, monkeypatch):
    x = torch.randn(2, 8, 9, 9).to(memory_format=layout)
    model = Convolved().eval()
    graph = fuse(model)
    scene = scene_of(graph, [x])
    choice = {layer.node: Timed(scene.called(layer, reads, reads), 0.0) for layer in scene.layers}
    with torch.no_grad():
        expected, given = model(x), bind(scene, choice, Packed())(x)
    torch.testing.assert_close(given, expected)
    for mine, its in zip(given, expected, strict=True):
        if its.untyped_storage().data_ptr() == x.data_ptr():
            assert mine.untyped_storage().data_ptr() == x.data_ptr()
            assert mine.stride() == its.stride()


class Called(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


LAYOUTS = [torch.contiguous_format, torch.channels_last]


COPIES = {
    "contiguous": lambda x: x.contiguous(),
    "rows": lambda x: x.reshape(x.shape[0], -1),
    "pixels": lambda x: x.permute(0, 2, 3, 1).reshape(2, -1),
}


class Written(Called):
    def forward(self, x):
        result, beside = F.max_pool2d(x, 3, 1, 1), self.function(x)
        x.copy_(result)
        return result, beside


@torch.no_grad()
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("reads", [Format.CONTIGUOUS, Format.CHANNELS_LAST])
@pytest.mark.parametrize("copy", COPIES.values(), ids=COPIES)
def test_what_is_a_view_in_another_layout_than_the_examples_changes_with_it(copy, layout, reads):
    x = torch.randn(2, 4, 5, 5).to(memory_format=layout)
    other = next(one for one in LAYOUTS if one != layout)
    model = Written(copy).eval()
    scene = scene_of(fuse(model), [x.contiguous(memory_format=other)])
    choice = {layer.node: Timed(scene.called(layer, reads, reads), 0.0) for layer in scene.layers}
    expected, given = model(x.clone()), bind(scene, choice, Packed())(x)
    torch.testing.assert_close(given, expected)


class Stacked(nn.Module):
    def forward(self, x):
        return torch.stack([x * 2, x + 1])


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
@pytest.mark.parametrize("reads", [Format.CONTIGUOUS, Format.CHANNELS_LAST])
def test_a_stack_of_volumes_has_the_strides_of_eager_in_every_plan(layout, reads):
    x = torch.randn(2, 4, 3, 4, 3).to(memory_format=layout)
    model = Stacked().eval()
    scene = scene_of(fuse(model), [x])
    choice = {layer.node: Timed(scene.called(layer, reads, reads), 0.0) for layer in scene.layers}
    with torch.no_grad():
        given = bind(scene, choice, Packed())(x)
    torch.testing.assert_close(given, model(x), rtol=0, atol=0, check_stride=True)


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_of_strange_inputs_are_returned_as_they_are(view):
    x = torch.randn(5, 7, 2, 6).permute(2, 0, 1, 3)
    model = Beside(view).eval()
    fast = nhwc.optimize(model, x)
    with torch.no_grad():
        expected, given = model(x), fast(x)
    torch.testing.assert_close(given, expected)
    assert given[0].stride() == expected[0].stride()
    assert given[0].data_ptr() == expected[0].data_ptr()


class Shows(nn.Module):
    """A layer that returns its parameters beside what it computes."""

    def __init__(self):
        super().__init__()
        self.conv, self.scale = nn.Conv2d(5, 8, 3), nn.Parameter(torch.ones(8, 1, 1))

    def forward(self, x):
        return self.conv(x) * self.scale, self.scale, {"weight": self.conv.weight}


@torch.no_grad()
def test_a_parameter_that_is_returned_is_a_parameter():
    graph, x = fuse(Shows().eval()), torch.randn(1, 5, 6, 6)
    scene = scene_of(graph, (x,))
    reads = Format.CONTIGUOUS
    choice = {layer.node: Timed(scene.called(layer, reads, reads), 0.0) for layer in scene.layers}
    _, scale, held = bind(scene, choice, Packed())(x)
    _, wanted, also = graph(x)
    assert scale is wanted
    assert held["weight"] is also["weight"]


def filters_of_one_channel(x):
    return F.conv2d(x, x.mean((0, 2, 3)).view(8, 1, 1, 1).expand(8, 1, 3, 3) * 1.5, groups=8)


UNSURE = {
    "resized pixel": lambda x: F.interpolate(F.adaptive_avg_pool2d(x, 1), (5, 5)),
    "padded pixel": lambda x: F.pad(x.mean((2, 3), keepdim=True), (1, 1, 1, 1)),
    "computed filters": filters_of_one_channel,
    "every other channel": lambda x: F.max_pool2d((x * 2)[:, ::2], 2),
}


@torch.no_grad()
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("function", UNSURE.values(), ids=UNSURE)
def test_what_torch_makes_of_strides_that_say_little_lies_as_in_eager_in_every_plan(
    function, layout
):
    x = torch.randn(2, 8, 6, 7).to(memory_format=layout)
    model = Called(function).eval()
    scene = scene_of(fuse(model), [x])
    expected = model(x)
    ways = [[*time_layer(scene, layer)] for layer in scene.layers]
    for names in product(*ways):
        found = zip(scene.layers, names, strict=True)
        choice = {layer.node: Timed(scene.find(layer, name), 0.0) for layer, name in found}
        given = bind(scene, choice, Packed())(x)
        torch.testing.assert_close(given, expected, check_stride=True)


class AskingStrides(nn.Module):
    """Answers how its image, or what it made of it, lies in memory."""

    def __init__(self, ask):
        super().__init__()
        self.layers, self.ask = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3)), ask

    def forward(self, x):
        return self.ask(x, self.layers(x))


def asking_where_opaque(x, y):
    return y * 2 if y.is_contiguous() and y.sum() < 1e9 else y


class AskingInside(nn.Module):
    def forward(self, x):
        return asking_where_opaque(x, x)


class AskingBehind(nn.Module):
    """Holds the function that asks in a table, a list or a partial, of its own or of its class."""

    asks = (asking_where_opaque,)

    def __init__(self):
        super().__init__()
        self.table = {"ask": lambda x: asking_where_opaque(x, x)}
        self.ask = functools.partial(asking_where_opaque)


class AskingByTable(AskingBehind):
    def forward(self, x):
        return self.table["ask"](x)


class AskingByList(AskingBehind):
    def forward(self, x):
        return self.asks[0](x, x)


class AskingByPartial(AskingBehind):
    def forward(self, x):
        return self.ask(x, x)


class WritingInside(nn.Module):
    def forward(self, x):
        if x.sum() < 1e9:
            x.contiguous().add_(1)
        return x


@pytest.mark.parametrize(
    ("part", "why"),
    [
        (AskingInside(), "code of _1 asks how a tensor lies in memory (test_strange.py:"),
        (AskingByTable(), "code of _1 asks how a tensor lies in memory (test_strange.py:"),
        (AskingByList(), "code of _1 asks how a tensor lies in memory (test_strange.py:"),
        (AskingByPartial(), "code of _1 asks how a tensor lies in memory (test_strange.py:"),
        (WritingInside(), "code of _1 writes in place into what is a view or a copy as it lies"),
    ],
)
@torch.no_grad()
def test_a_closed_part_without_a_plan_says_what_it_does_by_the_layout(part, why):
    net = nn.Sequential(nn.Conv2d(3, 8, 3), part, nn.Conv2d(8, 8, 3)).eval()
    assert why in nhwc.optimize(net, torch.rand(1, 3, 16, 16)).report.plans[0].reason


@torch.no_grad()
@pytest.mark.parametrize("part", [AskingInside, AskingByTable, AskingByList, AskingByPartial])
def test_an_opaque_part_that_asks_for_strides_is_answered_as_by_the_model(part):
    net = nn.Sequential(nn.Conv2d(3, 8, 3), part(), nn.Conv2d(8, 8, 3)).eval()
    fast = force(net, torch.rand(1, 3, 16, 16))
    for layout in (torch.contiguous_format, torch.channels_last):
        x = torch.rand(1, 3, 16, 16).to(memory_format=layout)
        torch.testing.assert_close(fast(x), net(x))


@pytest.mark.parametrize(
    "ask",
    [
        lambda x, y: y * (x.stride(1) / 256.0),
        lambda x, y: (y, y.stride()),
        lambda x, y: (y, y.is_contiguous()),
        lambda x, y: y.as_strided((1, 8, 100), (1152, 144, 1)),
        lambda x, y: torch.as_strided(y, (1, 8, 100), (1152, 144, 1), 7),
        asking_where_opaque,
    ],
)
@torch.no_grad()
def test_what_asks_for_strides_is_answered_as_by_the_model(ask):
    net = AskingStrides(ask).eval()
    fast = force(net, torch.rand(1, 3, 16, 16))
    for layout in (torch.contiguous_format, torch.channels_last):
        x = torch.rand(1, 3, 16, 16).to(memory_format=layout)
        found, expected = fast(x), net(x)
        if isinstance(expected, tuple):
            assert found[1] == expected[1]
            found, expected = found[0], expected[0]
        torch.testing.assert_close(found, expected)


@torch.no_grad()
def test_a_constant_with_gaps_that_the_model_returns_costs_no_plan():
    net = AskingStrides(lambda x, y: (y, torch.arange(12.0).reshape(3, 4)[:, ::2])).eval()
    x = torch.rand(1, 3, 16, 16)
    fast = force(net, x)
    assert fast.report.chosen == "plan"
    torch.testing.assert_close(fast(x), net(x), check_stride=True)


@torch.no_grad()
def test_strides_of_a_parameter_are_those_of_the_model_in_a_plan():
    weight = nn.Parameter(torch.rand(8, 1, 1))
    net = AskingStrides(lambda x, y: y * net.weight * net.weight.stride(0)).eval()
    net.weight = weight
    x = torch.rand(1, 3, 16, 16)
    fast = force(net, x)
    assert fast.report.chosen == "plan"
    torch.testing.assert_close(fast(x), net(x))
