"""`x[key] = value` while a model is traced: a new value, or a part that keeps its code."""

import pytest
import torch
from torch import nn

import nhwc
from nhwc.graph import capture
from nhwc.graph.tracing.sized import capture_sized

from ..fusing import script


class Net(nn.Module):
    """A convolution, and `code` of what it makes and of the input."""

    def __init__(self, code, last=None):
        super().__init__()
        self.conv, self.code = nn.Conv2d(3, 4, 1), code
        self.last = last or nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU())

    def forward(self, x):
        return self.code(self.last(self.conv(x)), x)


def channel(y, x):
    y[:, 0] = 0
    return y


def corner(y, x):
    y[..., 1:3, -1] = x[:, :1, 1:3, 0]
    return y


def masked(y, x):
    y[y > 0] = 1.5
    return y


def by_numbers(y, x):
    y[torch.tensor([1])] = x.new_ones(1, 4, 1, 1)
    return y


def scaled(y, x):
    y[:, 1:3] *= 2
    y[:, :, ::2] += x.mean()
    return y


def by_sizes(y, x):
    half = y.shape[2] // 2
    y[:, :, half:] = y[:, :, :half].flip(2)
    y[:, :, half] = half
    return y


def within(y, x):
    y[0, 1] = y[1, 2] = x[1, 0]
    return y


def all_of_it(y, x):
    y[:] = x.sum()
    return y


def one_more_dimension(y, x):
    y[0] = x[:1, :1]
    return y


def other_name(y, x):
    z = y
    z[0] = x[0, :1]
    return y


def filled(y, x):
    both = x.new_zeros(2, 7, 6, 6)
    both[:, :3], both[:, 3:] = x, y
    return both


def other_type(y, x):
    y[:, 0] = x[:, 0].double()
    return y


ASSIGNED = [channel, corner, masked, by_numbers, scaled, by_sizes, within, all_of_it]
ASSIGNED += [one_more_dimension, other_name, filled, other_type]


def slice_seen_later(y, x):
    before = y[:, 0]
    y[:, 0] = 1
    return y + before.sum()


def input_written(y, x):
    x[:, 0] = 1
    return y + x.sum()


def stored_and_changed(y, x):
    part = y[:, 0]
    part *= 2
    y[:, 0] = part
    part += 1
    return y


def view_written(y, x):
    y.view(-1)[0:5] = 3
    return y


def axis_added(y, x):
    y[None] = 1
    return y


def picked(y, x):
    y[:, torch.tensor([0, 2])] = 1
    return y


def all_of_a_slice(y, x):
    part = y[:, :2]
    part[:] = y[:, 2:] * 2
    return y


def all_of_a_view(y, x):
    turned = y.permute(0, 2, 3, 1)
    turned[...] = turned.flip(1)
    return y


def all_of_the_input(y, x):
    x[:] = x * 2
    return y + x.sum()


def all_of_a_part_that_is_seen_later(y, x):
    before = y.flatten(1)
    y[:] = y * 2
    return y.flatten(1) + before


def put_elsewhere(y, x):
    part = y[:, :2]
    part *= 2
    y[:, 2:] = part
    return y


def put_into_itself(y, x):
    y[:, 0] = 0
    before = y[:, ::2]
    y -= 1
    y[...] = y
    return y[:, ::2] + before


def assigned_and_then_written(y, x):
    """The one is not the other, whatever is written into it."""
    z = x.repeat(1, 2, 1, 1)[:, :4]
    y[:] = z
    y += 1
    return y * z


ASSIGNED += [assigned_and_then_written]


def spectrum_seen_later(y, x):
    """The conjugate shares its memory."""
    found = torch.fft.rfft2(y)
    other = found.conj()
    found[:, 1] = 3
    return other


SEEN = [
    spectrum_seen_later,
    slice_seen_later,
    input_written,
    stored_and_changed,
    view_written,
    axis_added,
    picked,
]
SEEN += [
    put_elsewhere,
    put_into_itself,
    all_of_a_slice,
    all_of_a_view,
    all_of_the_input,
    all_of_a_part_that_is_seen_later,
]


def image():
    return torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def check(net):
    captured = capture(net)
    x, same = image(), image()
    with torch.no_grad():
        torch.testing.assert_close(captured.module(x), net(same))
    torch.testing.assert_close(x, same)
    return captured


def made_of_sizes(y, x):
    made = torch.zeros(y.shape)
    for channel in range(4):
        made[:, channel] = y[:, 3 - channel]
    made[:, 1:3].copy_(y[:, :2])
    return made.relu()


def made_whole(y, x):
    made = torch.empty(y.shape)
    made[...] = y
    kept = made * 2
    made[:, 0] = x[:, 0]
    return made + kept


def made_and_seen_through_a_view(y, x):
    made = torch.zeros(y.shape)
    part = made[:, :2]
    part[:] = y[:, 2:]
    return made + y


@pytest.mark.parametrize("code", [made_of_sizes, made_whole, made_and_seen_through_a_view])
def test_a_tensor_that_code_makes_and_fills(code):
    """Where sizes are known it is a constant, which each call fills anew."""
    net, x = Net(code).eval(), image()
    graph = capture(net).module
    opened = code is not made_and_seen_through_a_view
    if opened:
        sized, opaque = capture_sized(graph, (x,))
        assert not opaque
        graph = sized
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(graph(x), net(x))


@pytest.mark.parametrize("code", ASSIGNED)
def test_it_is_recorded(code):
    captured = check(Net(code))
    assert not captured.opaque
    script(captured.module)


@pytest.mark.parametrize("code", SEEN)
def test_what_something_else_would_see_keeps_its_code(code):
    [part] = check(Net(code)).opaque
    assert "again" in part.reason or "assigns to elements" in part.reason


class Returns(nn.Module):
    """Code of one's own, which may return what it was given."""

    def forward(self, x):
        return x if x.sum() > -1e9 else x + 1


class Shares(nn.Module):
    """What the layer is given is read after what it returns was written to."""

    def __init__(self, layer):
        super().__init__()
        self.conv, self.layer = nn.Conv2d(3, 4, 1), layer

    def forward(self, x):
        before = self.conv(x)
        after = self.layer(before)
        after[:, 0] = 0
        return after.flatten(1) + before.flatten(1)


LAYERS = [nn.ReLU(inplace=True), nn.Identity(), nn.Dropout2d(), nn.Flatten(2), Returns()]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: type(layer).__name__)
def test_layers_that_return_their_input(layer):
    captured = check(Shares(layer).eval())
    assert any("again" in part.reason for part in captured.opaque)


def test_a_layer_that_makes_its_result():
    assert not check(Shares(nn.ReLU())).opaque


class Writes(nn.Module):
    def forward(self, x):
        x[:, 0] = 0
        return x * 2 if x.sum() > 0 else x


def test_a_part_that_cannot_be_traced_after_all_writes_itself():
    net = nn.Sequential(nn.Conv2d(3, 4, 1), Writes(), nn.Conv2d(4, 2, 1))
    [part] = check(net).opaque
    assert "branches" in part.reason


class Detect(nn.Module):
    """The head of a detector of the YOLO family: boxes decoded in place, level by level."""

    def __init__(self, channels, strides):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(c, 3 * 7, 1) for c in channels)
        self.strides = strides

    def forward(self, levels):
        found = []
        for conv, stride, x in zip(self.convs, self.strides, levels, strict=True):
            y = conv(x)
            n, _, h, w = y.shape
            y = y.view(n, 3, 7, h, w).permute(0, 1, 3, 4, 2).contiguous().sigmoid()
            rows, columns = (torch.arange(size, device=x.device) for size in (h, w))
            grid = torch.stack(torch.meshgrid(columns, rows, indexing="xy"), -1).float()
            y[..., 0:2] = (y[..., 0:2] * 2 - 0.5 + grid) * stride
            y[..., 2:4] = (y[..., 2:4] * 2) ** 2 * 4 * stride
            found.append(y.view(n, -1, 7))
        return torch.cat(found, 1)


class Yolo(nn.Module):
    def __init__(self):
        super().__init__()
        block = lambda a, b: nn.Sequential(
            nn.Conv2d(a, b, 3, 2, 1, bias=False), nn.BatchNorm2d(b), nn.SiLU()
        )
        self.first, self.second, self.third = block(3, 8), block(8, 16), block(16, 16)
        self.detect = Detect((16, 16), (4, 8))

    def forward(self, x):
        level = self.second(self.first(x))
        return self.detect([level, self.third(level)])


@torch.no_grad()
def test_a_detector_is_one_graph_for_all_shapes(tmp_path):
    net, x = Yolo().eval(), torch.rand(1, 3, 32, 48)
    fast = nhwc.optimize(net, x)
    assert not fast.report.opaque
    nhwc.save(fast, tmp_path / "yolo.nhwc")
    for model in (fast, nhwc.load(tmp_path / "yolo.nhwc"), script(nhwc.fuse(net))):
        for one in (x, torch.rand(2, 3, 64, 32)):
            torch.testing.assert_close(model(one), net(one), rtol=1e-4, atol=1e-4)


def low_frequencies(y, x):
    """As a Fourier neural operator keeps them."""
    found = torch.fft.rfft2(y)
    b, c, h, w = y.shape
    kept = torch.zeros(b, c, h, w // 2 + 1, dtype=torch.cfloat)
    kept[:, :, :2, :3] = found[:, :, :2, :3] * 1j
    kept[:, 1, -2:, :3] = found[:, 1, -2:, :3].conj()
    found[..., 0] = found[..., 1] * 2
    return torch.fft.irfft2(kept + found, s=(h, w))


def shifted_frequencies(y, x):
    found = torch.fft.fftshift(torch.fft.rfft2(y), (-2,))
    kept = found.new_zeros(found.shape)
    kept[:, :, 2:-2] = torch.einsum("nchw,oc->nohw", found[:, :, 2:-2], torch.ones(4, 4) * 1j)
    turned = torch.complex(y, -y) * 2
    turned[:, 0] = turned[:, 1] * 2j
    return torch.fft.irfft2(kept) + turned.real


@pytest.mark.parametrize("code", [low_frequencies, shifted_frequencies])
@pytest.mark.parametrize("sized", [False, True])
def test_gradients_flow_through_complex_parts(sized, code):
    net, x = Net(code).eval(), image()
    graph = capture(net).module
    if sized:
        graph, opaque = capture_sized(graph, (x,))
        assert not opaque
    x.requires_grad_()
    truth, found = net(x), graph(x)
    torch.testing.assert_close(found, truth)
    wanted, given = (torch.autograd.grad(y.square().sum(), x) for y in (truth, found))
    torch.testing.assert_close(given, wanted, rtol=1e-4, atol=1e-4)


class Pyramid(nn.Module):
    """Decides by data, and returns a list."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x):
        y = self.conv(x)
        return [y, y * 2, y - 1] if y.mean() > 0 else [y, y + 1, y * 3]


def all_but_the_first(x, found, last):
    found = found[1:]
    for place in range(2):
        found[place] = last(found[place])
    return torch.cat(found, 1)


def behind_the_image(x, found, last):
    found = ([x] + found)[2:]
    for place in range(2):
        found[place] = last(found[place])
    return torch.cat(found, 1)


def put_at_the_end(x, found, last):
    found = found + [found[0]]
    found[1:] = [last(found[-1])]
    return torch.cat(found, 1)


class Decoder(nn.Module):
    def __init__(self, code):
        super().__init__()
        self.pyramid, self.last, self.code = Pyramid(), nn.Conv2d(4, 4, 1), code

    def forward(self, x):
        return self.code(x, self.pyramid(x), self.last)


@pytest.mark.parametrize("code", [all_but_the_first, behind_the_image, put_at_the_end])
@torch.no_grad()
def test_what_may_be_a_list_is_assigned_to_by_the_code_itself(code):
    model, x = Decoder(code).eval(), torch.randn(2, 3, 6, 6)
    fused = nhwc.fuse(model)
    torch.testing.assert_close(fused(x), model(x))
    assert any("what may be a list" in part.reason for part in fused.report.opaque)


@torch.no_grad()
def test_a_part_that_may_be_a_list_is_a_tensor_where_a_list_takes_no_such_key():
    def code(x, found, last):
        found = found[0] * 2
        found[:, 0] = 0
        return last(found)

    model, x = Decoder(code).eval(), torch.randn(2, 3, 6, 6)
    fused = nhwc.fuse(model)
    torch.testing.assert_close(fused(x), model(x))
    assert [part.path for part in fused.report.opaque] == ["pyramid"]
