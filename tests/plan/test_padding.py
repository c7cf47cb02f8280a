"""Padding that convolutions do themselves: which is, which is not, and every kernel for it."""

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from nhwc import kernels
from nhwc.formats import Format
from nhwc.graph.modules.layers import Fused
from nhwc.graph.modules.ordered import Repeat
from nhwc.plan.binding import bind
from nhwc.plan.implementation import Timed
from nhwc.plan.scene import scene_of
from nhwc.plan.specs import Convolution

pytestmark = pytest.mark.skipif(
    not kernels.available(), reason=kernels.unavailable() or "the kernels are available"
)

IMAGE, VOLUME, COLOURS = (2, 8, 9, 8), (2, 8, 5, 7, 6), (2, 3, 9, 36)


class Padded(nn.Module):
    def __init__(self, pad, conv):
        super().__init__()
        self.pad, self.conv, self.repeat = pad, conv, Repeat()

    def forward(self, x):
        padded = self.pad(x) if isinstance(self.pad, nn.Module) else self.pad(self, x)
        return self.conv(padded)


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m, qualified_name):
        return not isinstance(m, (Padded, Summed))


def scene(net, x):
    net = net.eval()
    return scene_of(fx.GraphModule(net, _Tracer().trace(net)), [x])


def convolved(scene):
    (layer,) = [layer for layer in scene.layers if isinstance(layer.spec, Convolution)]
    return layer


def same_size(_, x):
    """TensorFlow's padding, which follows from the size of what is padded."""
    height, width = x.shape[2] % 2 + 1, x.shape[3] % 2 + 1
    return F.pad(x, (width // 2, width - width // 2, height // 2, height - height // 2))


def first_again(net, x):
    return torch.cat([net.repeat(x[:, :, :1], [1, 1, 2, 1, 1]), x], dim=2)


def both_ends(_, x):
    first, last = x[:, :, 0:1, :, :].expand(-1, -1, 2, -1, -1), x[:, :, -1:]
    return torch.cat([first, x, last, x[:, :, 4:]], -3)


TAKEN = {
    "causal": (lambda _, x: F.pad(x, (1, 1, 1, 1, 2, 0)), nn.Conv3d(8, 8, 3), VOLUME),
    "causal, of frames alone": (
        *(lambda _, x: F.pad(x, (0, 0, 0, 0, 2, 0)), nn.Conv3d(8, 8, (3, 1, 1)), VOLUME),
    ),
    "causal, depthwise": (
        *(lambda _, x: F.pad(x, (0, 0, 0, 0, 4, 0)), nn.Conv3d(8, 8, (5, 1, 1), groups=8), VOLUME),
    ),
    "its own zeros beside": (
        lambda _, x: F.pad(x, (0, 0, 0, 0, 2, 0)),
        nn.Conv3d(8, 6, 3, (1, 2, 2), (0, 1, 1), groups=2),
        VOLUME,
    ),
    "the first frame again": (
        lambda _, x: F.pad(x, (0, 0, 0, 0, 2, 0), mode="replicate"),
        nn.Conv3d(8, 8, 3, padding=(0, 1, 1)),
        VOLUME,
    ),
    "frames again, depthwise": (
        nn.ReplicationPad3d((0, 0, 0, 0, 1, 2)),
        nn.Conv3d(8, 8, (3, 5, 3), (2, 1, 1), groups=8),
        VOLUME,
    ),
    "the first frame again, by cat": (first_again, nn.Conv3d(8, 8, 3, padding=(0, 1, 1)), VOLUME),
    "both ends again, by cat": (both_ends, nn.Conv3d(8, 8, 3, padding=(0, 1, 1)), VOLUME),
    "a list of first frames": (
        lambda _, x: torch.cat([x[:, :, :1]] * 2 + [x], 2),
        nn.Conv3d(8, 8, 3, dilation=2, padding=(0, 2, 2)),
        VOLUME,
    ),
    "the first frame again, of one": (
        lambda _, x: F.pad(x, (0, 0, 0, 0, 2, 0), mode="replicate"),
        nn.Conv3d(8, 8, 3, padding=(0, 1, 1)),
        (2, 8, 1, 7, 6),
    ),
    "an image": (lambda _, x: F.pad(x, (0, 1, 0, 1)), nn.Conv2d(8, 8, 3, 2), IMAGE),
    "as much on both sides": (nn.ZeroPad2d(1), nn.Conv2d(8, 8, 3), IMAGE),
    "depthwise": (nn.ConstantPad2d((0, 1, 2, 0), 0.0), nn.Conv2d(8, 8, 3, 2, groups=8), IMAGE),
    "far behind": (nn.ZeroPad2d((0, 3, 0, 3)), nn.Conv2d(8, 8, 3, groups=8), (2, 8, 9, 16)),
    "the first layer": (same_size, nn.Conv2d(3, 16, 3, 2), COLOURS),
    "twice": (
        lambda _, x: F.pad(F.pad(x, (1, 0)), (1, 1, 0, 2)),
        nn.Conv2d(8, 16, 3, padding=1),
        IMAGE,
    ),
    "same": (lambda _, x: x, nn.Conv2d(8, 8, (2, 4), padding="same"), IMAGE),
}


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", TAKEN)
@torch.no_grad()
def test_a_convolution_pads_for_itself(name):
    pad, conv, shape = TAKEN[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    net = Padded(pad, conv)
    expected = net.double()(x.double()).float()
    found = scene(net.float(), x)
    (layer,) = found.layers
    offered = found.implementations[layer.node]
    assert {one.ours for one in offered} == {True, False}
    for one in offered:
        program = bind(found, {layer.node: Timed(one, 0.0)})
        torch.testing.assert_close(program(x), expected, rtol=1e-4, atol=1e-5)


class Twice(nn.Module):
    """A padded value that a convolution reads, and something else."""

    def __init__(self, pad):
        super().__init__()
        self.pad, self.conv = pad, nn.Conv3d(8, 8, 3)

    def forward(self, x):
        padded = self.pad(x)
        return self.conv(padded), padded.relu()


LEFT = {
    "another value": Padded(nn.ConstantPad2d(1, 2.0), nn.Conv2d(8, 8, 3)),
    "lines again": Padded(nn.ReplicationPad3d((0, 0, 1, 1, 2, 0)), nn.Conv3d(8, 8, 3)),
    "mirrored": Padded(nn.ReflectionPad3d((0, 0, 0, 0, 2, 0)), nn.Conv3d(8, 8, 3)),
    "lines cut off": Padded(nn.ZeroPad2d((1, -1, 0, 1)), nn.Conv2d(8, 8, 3)),
    "zeros beside what is held": Padded(
        nn.ReplicationPad3d((0, 0, 0, 0, 2, 0)), nn.Conv3d(8, 8, 3, padding=1)
    ),
    "another frame": Padded(
        lambda net, x: torch.cat([x[:, :, 1:2], x], 2), nn.Conv3d(8, 8, 3, padding=(0, 1, 1))
    ),
    "two frames": Padded(
        lambda net, x: torch.cat([x[:, :, :2], x], 2), nn.Conv3d(8, 8, 3, padding=(0, 1, 1))
    ),
    "the first frame of another volume of the batch": Padded(
        lambda net, x: torch.cat([x[[1, 0], :, :1], x], 2), nn.Conv3d(8, 8, 3, padding=(0, 1, 1))
    ),
    "the first line again": Padded(nn.ReplicationPad2d((0, 0, 1, 1)), nn.Conv2d(8, 8, 3)),
    "the first frame behind": Padded(
        lambda net, x: torch.cat([x, x[:, :, :1]], 2), nn.Conv3d(8, 8, 3, padding=(0, 1, 1))
    ),
    "another volume": Padded(
        lambda net, x: torch.cat([x.relu()[:, :, :1], x], 2), nn.Conv3d(8, 8, 3)
    ),
    "another reader": Twice(nn.ZeroPad3d((0, 0, 0, 0, 2, 0))),
    "a hook": Padded(nn.ZeroPad2d(1), nn.Conv2d(8, 8, 3)),
}
LEFT["a hook"].pad.register_forward_hook(lambda module, args, result: result * 2)


@pytest.mark.parametrize("name", LEFT)
@torch.no_grad()
def test_what_no_convolution_can_do_is_left_to_a_pad(name):
    net = LEFT[name]
    image = isinstance(net.conv, nn.Conv2d)
    x = torch.randn(IMAGE if image else VOLUME, generator=torch.Generator().manual_seed(0))
    found = scene(net, x)
    assert len(found.layers) > 1
    layer = convolved(found)
    assert tuple(layer.spec.padding) == tuple(net.conv.padding)
    assert not layer.spec.held
    assert layer.spec.behind is None
    last = Format.CHANNELS_LAST
    choice = {}
    for one in found.layers:
        ours = [each for each in found.implementations[one.node] if each.ours]
        choice[one.node] = Timed(ours[0] if ours else found.called(one, last, last), 0.0)
    result = bind(found, choice)(x)
    torch.testing.assert_close(result, net(x), rtol=1e-4, atol=1e-5)


class Summed(nn.Module):
    """A padded value that a convolution reads, and adds to what it computes."""

    def __init__(self):
        super().__init__()
        self.pad, self.conv = nn.ZeroPad2d(1), Fused(nn.Conv2d(8, 8, 3, padding=1), None)

    def forward(self, x):
        padded = self.pad(x)
        return self.conv(padded, padded)


IN_PART = {
    "zeros before what is held": Padded(
        lambda net, x: F.pad(F.pad(x, (0, 0, 0, 0, 1, 0)), (0, 0, 0, 0, 2, 0), mode="replicate"),
        nn.Conv3d(8, 8, 3),
    ),
    "zeros behind, beside what is held": Padded(
        nn.ReplicationPad3d((0, 0, 0, 0, 1, 0)), nn.Conv3d(8, 8, (2, 1, 1), padding="same")
    ),
    "what the convolution also adds": Summed(),
}


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", IN_PART)
@torch.no_grad()
def test_a_pad_stays_where_the_convolution_cannot_have_it_too(name):
    net = IN_PART[name]
    shape = IMAGE if isinstance(net, Summed) else VOLUME
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    graph = fx.GraphModule(net, _Tracer().trace(net.eval()))
    found = scene_of(graph, [x])
    assert len(found.layers) == 2
    last = Format.CHANNELS_LAST
    choice = {one.node: Timed(found.offered(one)[0], 0.0) for one in found.layers[1:]}
    choice[found.layers[0].node] = Timed(found.called(found.layers[0], last, last), 0.0)
    torch.testing.assert_close(bind(found, choice)(x), net(x), rtol=1e-4, atol=1e-5)
