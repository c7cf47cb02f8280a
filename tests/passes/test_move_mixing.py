"""1x1 convolutions come before their inputs are enlarged, behind averages, or stay in place."""

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import nhwc
from nhwc.graph import capture, module_of
from nhwc.graph.nodes.seen import shape_at
from nhwc.graph.tracing.sized import capture_sized
from nhwc.passes import FOLDING, PASSES, exact_passes, run_passes
from nhwc.passes.move_mixing import move_mixing

from ..fusing import Block, random_

SMALL = torch.randn(2, 48, 4, 3, generator=torch.Generator().manual_seed(0))
LARGE = torch.randn(2, 16, 8, 6, generator=torch.Generator().manual_seed(1))


class Running(fx.Interpreter):
    """Runs a graph, and notes how many pixels convolutions compute, and shapes that are untrue."""

    def __init__(self, graph):
        super().__init__(graph)
        self.pixels, self.untrue = [], []

    def run_node(self, node):
        result = super().run_node(node)
        if isinstance(module_of(node), nn.Conv2d | nn.Conv3d):
            self.pixels.append(result[0, 0].numel())
        if isinstance(result, torch.Tensor) and shape_at(node) not in (None, result.shape):
            self.untrue.append(node)
        return result


@torch.no_grad()
def moved(net, *inputs, sized=False):
    """How many convolutions were moved, and how many pixels each convolution computes now."""
    random_(net)
    graph = capture(net).module
    if sized:
        graph, _ = capture_sized(graph, inputs)
    *_, report = run_passes(graph, (*FOLDING, move_mixing))
    running = Running(graph)
    torch.testing.assert_close(running.run(*inputs), net(*inputs), rtol=1e-4, atol=1e-5)
    assert not running.untrue
    resized = graph.graph.find_nodes(op="call_function", target=F.interpolate)
    assert not sized or None not in map(shape_at, resized)
    return len(report.applied), running.pixels


def enlarge(x, **how):
    return F.interpolate(x, **(how or {"scale_factor": 2}))


@pytest.mark.parametrize(
    "resize",
    [
        lambda x: enlarge(x),
        lambda x: enlarge(x, scale_factor=(2.0, 3.0), mode="nearest-exact"),
        lambda x: enlarge(x, scale_factor=2, mode="bilinear"),
        lambda x: enlarge(x, scale_factor=2.5, mode="bilinear", align_corners=True),
        lambda x: enlarge(x, scale_factor=2, mode="bicubic"),
        nn.Upsample(scale_factor=2),
        nn.Upsample(scale_factor=(2, 2), mode="bilinear"),
    ],
)
def test_a_resize_comes_last(resize):
    net = Block(lambda self, x: self.conv(self.resize(x)).relu(), conv=nn.Conv2d(48, 20, 1))
    net.resize = resize
    assert moved(net, SMALL) == (1, [12])
    assert moved(net, SMALL, sized=True) == (1, [12])


def test_a_size_that_is_read_from_another_image():
    def forward(self, x, y):
        return self.conv(enlarge(x, size=y.shape[-2:], mode="bilinear")) + self.side(y)

    class Two(Block):
        def forward(self, x, y):
            return forward(self, x, y)

    net = Two(None, conv=nn.Conv2d(48, 20, 1), side=nn.Conv2d(16, 20, 1))
    assert moved(net, SMALL, LARGE) == (1, [12, 48])


def test_volumes_and_groups():
    net = Block(lambda self, x: self.conv(enlarge(x)), conv=nn.Conv3d(48, 24, 1, groups=2))
    assert moved(net, torch.randn(1, 48, 2, 3, 4)) == (1, [24])


class Joined(nn.Module):
    """Features of several sizes, brought to the largest, as heads that segment join them."""

    def __init__(self, bias=True, rest=True, norm=True, mode="bilinear"):
        super().__init__()
        self.deep, self.middle, self.own = (nn.Conv2d(n, 64, 1) for n in (48, 48, 16))
        self.fuse = nn.Conv2d(192 if rest else 128, 40, 1, bias=bias)
        self.norm = nn.BatchNorm2d(40) if norm else nn.Identity()
        self.mode, self.rest = mode, rest

    def forward(self, x, y):
        images = [
            F.interpolate(self.deep(x), size=y.shape[-2:], mode=self.mode),
            F.interpolate(self.middle(x).relu(), size=y.shape[-2:], mode=self.mode),
        ]
        if self.rest:
            images.insert(1, self.own(y))
        return self.norm(self.fuse(torch.cat(images, dim=1))).relu()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rest", [True, False])
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("sized", [True, False])
def test_each_part_by_itself(bias, rest, norm, sized):
    times, pixels = moved(Joined(bias, rest, norm), SMALL, LARGE, sized=sized)
    # Two layers before, the parts of the last behind, and the large image with its part.
    assert (times, sorted(pixels)) == (1, [12] * 4 + [48] * 2 * rest)


@pytest.mark.processor
@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
@torch.no_grad()
def test_planned_saved_and_with_other_sizes(mode, tmp_path):
    net = random_(Joined(mode=mode))
    fast = nhwc.optimize(net, SMALL, LARGE)
    assert "move_mixing" in {one.name for one in fast.report.passes if one.applied}
    for inputs in ((SMALL, LARGE), (SMALL[:1, :, 1:], LARGE[:1, :, 3:])):
        torch.testing.assert_close(fast(*inputs), net(*inputs), rtol=1e-4, atol=1e-5)
    nhwc.save(fast, tmp_path / "net.nhwc")
    loaded = nhwc.load(tmp_path / "net.nhwc")
    torch.testing.assert_close(loaded(SMALL, LARGE), fast(SMALL, LARGE))


@pytest.mark.parametrize(
    ("forward", "conv"),
    [
        (lambda self, x: self.conv(enlarge(x, scale_factor=0.5)), nn.Conv2d(48, 20, 1)),
        (lambda self, x: self.conv(enlarge(x, scale_factor=(1.25, 1.0))), nn.Conv2d(48, 20, 1)),
        (lambda self, x: self.conv(enlarge(x)), nn.Conv2d(48, 20, 3)),
        (lambda self, x: self.conv(enlarge(x)), nn.Conv2d(48, 20, 1, stride=2)),
        (lambda self, x: self.conv(enlarge(x)), nn.Conv2d(48, 20, 1, padding=1)),
        (lambda self, x: self.conv(enlarge(x)), nn.Conv2d(48, 480, 1, groups=48)),
        (lambda self, x: self.conv(enlarge(x)), nn.ConvTranspose2d(48, 20, 1)),
        (lambda self, x: self.conv(y := enlarge(x)) + y.mean(), nn.Conv2d(48, 20, 1)),
        (lambda self, x: self.conv(enlarge(x).relu()), nn.Conv2d(48, 20, 1)),
        (lambda self, x: self.conv(enlarge(F.adaptive_avg_pool2d(x, 1))), nn.Conv2d(48, 20, 1)),
        (lambda self, x: self.conv(torch.cat([enlarge(x)] * 2, 1)), nn.Conv2d(96, 20, 1)),
        (lambda self, x: self.conv(torch.cat([enlarge(x), enlarge(x)], 2)), nn.Conv2d(48, 20, 1)),
        (
            lambda self, x: self.conv(torch.cat([enlarge(x), enlarge(x)], 1)),
            nn.Conv2d(96, 20, 1, groups=2),
        ),
    ],
)
def test_others_stay(forward, conv):
    for sized in (False, True):
        assert moved(Block(forward, conv=conv), SMALL, sized=sized)[0] == 0


def test_sizes_that_are_numbers_must_be_known():
    net = Block(lambda self, x: self.conv(enlarge(x, size=(8, 8))), conv=nn.Conv2d(48, 20, 1))
    assert moved(net, SMALL) == (0, [64])
    assert moved(net, SMALL, sized=True) == (1, [12])
    assert moved(net, torch.randn(1, 48, 9, 9), sized=True) == (0, [64])


@pytest.mark.parametrize(
    "pool",
    [
        nn.AvgPool2d(2),
        nn.AvgPool2d((2, 3), stride=(2, 1)),
        nn.AvgPool2d(2, ceil_mode=True),
        lambda x: F.avg_pool2d(x, 2),
        lambda x: F.avg_pool2d(x, kernel_size=2, stride=2, padding=0),
    ],
)
@pytest.mark.parametrize("sized", [True, False])
def test_an_average_comes_first(pool, sized):
    net = Block(lambda self, x: self.pool(self.conv(x.relu())).tanh(), conv=nn.Conv2d(48, 40, 1))
    net.pool = pool
    pixels = pool(SMALL)[0, 0].numel()
    assert moved(net, SMALL, sized=sized) == (1, [pixels])


def test_an_average_of_volumes():
    net = Block(lambda self, x: self.pool(self.conv(x)).tanh(), conv=nn.Conv3d(48, 48, 1))
    net.pool = nn.AvgPool3d(2)
    assert moved(net, torch.randn(1, 48, 2, 4, 4)) == (1, [4])


@torch.no_grad()
def test_an_average_of_volumes_is_float32_under_autocast_as_before():
    net = nn.Sequential(nn.Conv3d(48, 48, 1), nn.AvgPool3d(2)).eval()
    graph = nhwc.fuse(net, passes=(move_mixing,))
    assert graph.report.passes[0].applied
    with torch.autocast("cpu", torch.bfloat16):
        assert graph(torch.ones(1, 48, 2, 4, 4)).dtype == net(torch.ones(1, 48, 2, 4, 4)).dtype


@pytest.mark.parametrize(
    "forward",
    [
        lambda self, x: F.avg_pool2d(self.conv(x), 2, padding=1),
        lambda self, x: F.avg_pool2d(self.conv(x), 2, padding=(0, 1)),
        lambda self, x: F.avg_pool2d(self.conv(x), 2, divisor_override=3),
        lambda self, x: F.avg_pool2d(self.conv(x), 2, stride=1),
        lambda self, x: F.avg_pool2d(self.conv(x).relu(), 2),
        lambda self, x: F.max_pool2d(self.conv(x), 2),
        lambda self, x: F.avg_pool2d(y := self.conv(x), 2).sum() + y,
    ],
)
def test_other_averages_stay(forward):
    net = Block(forward, conv=nn.Conv2d(48, 24, 1))
    assert moved(net, SMALL)[0] == 0


def test_an_average_that_leaves_all_pixels_stays():
    net = Block(lambda self, x: F.avg_pool2d(self.conv(x), 2, 1), conv=nn.Conv2d(48, 480, 1))
    assert moved(net, SMALL)[0] == 0


def test_an_average_of_many_channels_more_stays():
    net = Block(lambda self, x: F.avg_pool2d(self.conv(x), 2), conv=nn.Conv2d(48, 2, 1))
    assert moved(net, SMALL)[0] == 0


@torch.no_grad()
def test_what_is_written_between_is_read_before():
    def forward(self, x):
        y = x + 1.0
        z = self.conv(y)
        y.mul_(2.0)
        return F.avg_pool2d(z, 2).tanh()

    net = random_(Block(forward, conv=nn.Conv2d(48, 24, 1)))
    graph = capture(net).module
    report, *_ = run_passes(graph, (move_mixing,))
    torch.testing.assert_close(graph(SMALL), net(SMALL), rtol=1e-4, atol=1e-5)
    assert not report.applied


@pytest.mark.parametrize("where", ["conv", "resize", "pool"])
def test_a_hook_sees_what_it_saw(where):
    net = Block(
        lambda self, x: self.pool(self.conv(self.resize(x))).tanh(),
        conv=nn.Conv2d(48, 40, 1),
        resize=nn.Upsample(scale_factor=2) if where != "pool" else nn.Identity(),
        pool=nn.AvgPool2d(2) if where != "resize" else nn.Identity(),
    )
    getattr(net, where).register_forward_hook(lambda module, inputs, result: result[..., 2:])
    assert moved(net, SMALL)[0] == 0


def test_a_resize_to_the_size_that_is_there_goes_where_it_is_only_read():
    same = lambda x: enlarge(x, size=(4, 3), mode="bilinear")
    conv = nn.Conv2d(48, 20, 1)
    read = Block(lambda self, x: self.conv(same(x)), conv=conv)
    assert moved(read, SMALL, sized=True) == (1, [12])
    joined = Block(lambda self, x: self.conv(torch.cat([same(x)[:, :8], same(x)], 1)))
    joined.conv = nn.Conv2d(56, 20, 1)
    assert moved(joined, SMALL, sized=True) == (1, [12])
    moving = Block(
        lambda self, x: self.conv(enlarge(x, scale_factor=1.1, mode="bilinear")), conv=conv
    )
    assert moved(moving, SMALL, sized=True)[0] == 0
    returned = Block(lambda self, x: (self.conv(x), same(x)), conv=conv)
    assert moved(returned, SMALL, sized=True)[0] == 0


def test_half_precision_adds_no_roundings():
    net = Block(lambda self, x: self.conv(enlarge(x)), conv=nn.Conv2d(48, 20, 1)).bfloat16()
    assert moved(net, SMALL.bfloat16())[0] == 0


def test_exact_sums_are_left():
    assert move_mixing in PASSES
    assert move_mixing not in exact_passes(PASSES)
