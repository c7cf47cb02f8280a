"""Two layers that mix channels, one behind the other, become one where that is less to compute."""

import pytest
import torch
from torch import nn

import nhwc
from nhwc.graph import capture
from nhwc.graph.nodes.seen import shape_at
from nhwc.graph.tracing.sized import capture_sized
from nhwc.passes import FOLDING, PASSES, exact_passes, run_passes
from nhwc.passes.fold_mixing import fold_mixing
from nhwc.zoo import import_torchvision

from ..fusing import Block, random_

IMAGE = torch.randn(2, 6, 4, 5, generator=torch.Generator().manual_seed(0))
ROWS = torch.randn(2, 20, 6, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def folded(net, x, *, sized=False):
    """How many were folded, and the reasons why others were not; answers and shapes are right."""
    random_(net)
    graph = capture(net).module
    if sized:
        graph, _ = capture_sized(graph, [x])
    *_, report = run_passes(graph, (*FOLDING, fold_mixing))
    seen = {node: shape_at(node) for node in graph.graph.nodes}

    class Checked(torch.fx.Interpreter):
        def run_node(self, node):
            result = super().run_node(node)
            assert seen[node] is None or seen[node] == result.shape
            return result

    torch.testing.assert_close(Checked(graph).run(x), net(x), rtol=1e-4, atol=1e-5)
    return len(report.applied), [site.reason for site in report.sites if not site.applied]


def chain(first, second):
    return Block(lambda self, x: self.second(self.first(x)).relu(), first=first, second=second)


@pytest.mark.parametrize("bias", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("sized", [True, False])
def test_layers_of_one_kind(bias, sized):
    one, two = bias
    linear = chain(nn.Linear(6, 12, bias=one), nn.Linear(12, 8, bias=two))
    assert folded(linear, ROWS, sized=sized) == (1, [])
    convs = chain(nn.Conv2d(6, 12, 1, bias=one), nn.Conv2d(12, 8, 1, bias=two))
    assert folded(convs, IMAGE, sized=sized) == (1, [])


def test_volumes_and_longer_chains():
    volumes = chain(nn.Conv3d(6, 12, 1), nn.Conv3d(12, 8, 1))
    assert folded(volumes, IMAGE.unsqueeze(2)) == (1, [])
    three = chain(nn.Linear(6, 12), nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 7)))
    assert folded(three, ROWS) == (2, [])


def test_norms_are_folded_before():
    first = nn.Sequential(nn.Conv2d(6, 12, 1, bias=False), nn.BatchNorm2d(12))
    assert folded(chain(first, nn.Conv2d(12, 8, 1)), IMAGE) == (1, [])


@pytest.mark.parametrize("turn", [lambda x: x.transpose(1, 2), lambda x: x.permute(0, 2, 1)])
@pytest.mark.parametrize("channels", [-1, 12])
@pytest.mark.parametrize("sized", [True, False])
def test_images_of_rows(turn, channels, sized):
    def forward(self, x):
        n, _, high, wide = x.shape
        rows = self.first(x.flatten(2).transpose(1, 2))
        return self.conv(turn(rows).reshape(n, channels, high, wide)).relu()

    net = Block(forward, first=nn.Linear(6, 12), conv=nn.Conv2d(12, 8, 1))
    assert folded(net, IMAGE, sized=sized) == (1, [])


def hooked():
    layer = nn.Linear(12, 8)
    layer.register_forward_hook(lambda module, inputs, result: result[..., :5])
    return layer


@pytest.mark.parametrize(
    ("net", "x"),
    [
        (chain(nn.Linear(6, 2), nn.Linear(2, 8)), ROWS),  # a product of low rank
        (chain(nn.Linear(6, 12), nn.Sequential(nn.ReLU(), nn.Linear(12, 8))), ROWS),
        (chain(nn.Conv2d(6, 12, 1, stride=2), nn.Conv2d(12, 8, 1)), IMAGE),
        (chain(nn.Conv2d(6, 12, 1, padding=1), nn.Conv2d(12, 8, 1)), IMAGE),
        (chain(nn.Conv2d(6, 12, 3), nn.Conv2d(12, 8, 1)), IMAGE),
        (chain(nn.Conv2d(6, 12, 1, groups=2), nn.Conv2d(12, 8, 1)), IMAGE),
        (chain(nn.Conv2d(6, 12, 1), nn.Conv2d(12, 8, 1, groups=2)), IMAGE),
        (chain(nn.Linear(6, 12), hooked()), ROWS),
        (chain(nn.Conv2d(6, 5, 1), nn.Linear(5, 8)), IMAGE),  # which mixes columns
        (chain(nn.Linear(6, 5), nn.Conv2d(4, 3, 1)), IMAGE.permute(0, 2, 3, 1)),
        (chain(nn.Linear(6, 12), nn.Sequential(nn.Flatten(1, 1), nn.Linear(12, 8))), ROWS),
        (
            Block(
                lambda self, x: self.second(y := self.first(x)) + y.sum(),
                first=nn.Linear(6, 12),
                second=nn.Linear(12, 8),
            ),
            ROWS,
        ),
    ],
)
def test_others_stay(net, x):
    assert folded(net, x)[0] == 0


def test_half_precision_is_left():
    net = chain(nn.Linear(6, 12), nn.Linear(12, 8)).bfloat16()
    assert folded(net, ROWS.bfloat16())[0] == 0


@pytest.mark.parametrize(
    ("turned", "channels"),
    [
        (lambda rows: rows.reshape(2, 12, 4, 5), 12),  # not brought to the front
        (lambda rows: rows.transpose(0, 1).reshape(2, 12, 4, 5), 12),
        (lambda rows: rows.transpose(1, 2).reshape(4, 12, 2, 5), 12),  # halves for images
        (lambda rows: rows.transpose(1, 2).reshape(rows.shape[0], 24, 2, 5), 24),
        (lambda rows: rows.transpose(1, 2).reshape(rows.shape[0], -1, 2, 5), 24),
        (lambda rows: rows.transpose(1, 2).reshape(rows.shape[1] // 5, -1, 2, 5), 12),
        (lambda rows: rows.transpose(1, 2).reshape(2, 12, 20).unsqueeze(-1), 12),
        (lambda rows: rows.unflatten(1, (4, 5)).transpose(1, 2).reshape(2, 12, 4, 5), 12),
    ],
)
@pytest.mark.parametrize("sized", [True, False])
def test_other_views_stay(turned, channels, sized):
    net = Block(
        lambda self, x: self.conv(turned(self.first(x))).relu(),
        first=nn.Linear(6, 12),
        conv=nn.Conv2d(channels, 8, 1),
    )
    assert folded(net, ROWS, sized=sized)[0] == 0


@pytest.mark.parametrize("sized", [True, False])
def test_rows_of_rows_stay(sized):
    net = Block(
        lambda self, x: self.conv(self.first(x).transpose(1, 2).reshape(x.shape[0], -1, 4, 5)),
        first=nn.Linear(6, 12),
        conv=nn.Conv2d(12, 8, 1),
    )
    assert folded(net, IMAGE.permute(0, 2, 3, 1), sized=sized)[0] == 0


@pytest.mark.parametrize("sized", [True, False])
def test_as_many_images_as_tokens_stay(sized):
    def forward(self, x):
        rows = self.first(x.reshape(2, 20, 6))
        return self.conv(rows.transpose(1, 2).reshape(x.shape[1], 12, 1, 2))

    net = Block(forward, first=nn.Linear(6, 12), conv=nn.Conv2d(12, 8, 1))
    assert folded(net, ROWS, sized=sized)[0] == 0


def test_a_frozen_norm_that_gives_an_image_a_batch_stays():
    frozen = import_torchvision().ops.misc.FrozenBatchNorm2d(12)
    first = nn.Sequential(nn.Conv2d(6, 12, 1), frozen)
    assert folded(chain(first, nn.Conv2d(12, 8, 1)), IMAGE[0])[0] == 0


def test_layers_that_are_called_or_read_elsewhere_stay_for_those():
    net = chain(nn.Linear(6, 12), nn.Linear(12, 8))
    net.run = lambda self, x: self.second(self.first(x)) + self.second(self.first(x + 1.0).relu())
    assert folded(net, ROWS) == (1, [])
    net.run = lambda self, x: self.second(self.first(x)) * (self.first.weight * x[0, 0]).sum()
    assert folded(net, ROWS) == (1, [])


@torch.no_grad()
def test_numbers_that_would_be_infinite_stay():
    net = random_(chain(nn.Linear(6, 12), nn.Linear(12, 8)))
    net.first.weight.fill_(1e30)
    net.second.weight.fill_(1e30)
    graph = capture(net).module
    *_, report = run_passes(graph, (fold_mixing,))
    assert [site.reason for site in report.sites] == ["the product does not fit torch.float32"]


@pytest.mark.processor
@torch.no_grad()
def test_planned_with_other_sizes_and_exactly():
    net = random_(chain(nn.Conv2d(6, 12, 1), nn.Conv2d(12, 8, 1)))
    fast = nhwc.optimize(net, IMAGE)
    assert "fold_mixing" in {one.name for one in fast.report.passes if one.applied}
    for x in (IMAGE, IMAGE[:1, :, 1:]):
        torch.testing.assert_close(fast(x), net(x), rtol=1e-4, atol=1e-5)
    assert fold_mixing in PASSES
    assert fold_mixing not in exact_passes(PASSES)
