"""Tokens in a plan: transformers are one program of ours, and answer as torch does."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nhwc import fuse, kernels
from nhwc.graph.modules.layers import Fused
from nhwc.graph.modules.mended import SpelledAttention
from nhwc.graph.modules.ordered import Reduced, Repeat, Softmax
from nhwc.plan.assigning import cost
from nhwc.plan.implementation import Implementation
from nhwc.plan.native.values import Values
from nhwc.plan.scene import scene_of
from nhwc.plan.trials import _given

from .test_native import Net, chosen, images, lowered, responding

pytestmark = pytest.mark.skipif(
    not kernels.available(), reason=kernels.unavailable() or "the kernels are available"
)


class Transformer(Net):
    """A class token, positions, packed attention, and a head that reads the class token."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.patch, self.norm = nn.Conv2d(3, 24, 4, 4), nn.LayerNorm(24)
        self.token = nn.Parameter(torch.randn(1, 1, 24))
        self.places = nn.Parameter(torch.randn(1, 17, 24))
        self.qkv, self.out, self.head = nn.Linear(24, 72), nn.Linear(24, 24), nn.Linear(24, 10)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        n, count, c = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(n, count, 3, 4, 6).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, count, c)
        x = self.norm(x + self.out(mixed))
        return self.head(x[:, 0]), x[:, 1:].mean(1)


class Windows(Net):
    """Shifted windows of images whose channels are last, with a bias and a mask, as Swin's."""

    def __init__(self, side, shift):
        super().__init__()
        torch.manual_seed(0)
        self.side, self.shift = side, shift
        self.norm, self.qkv = nn.LayerNorm(16), nn.Linear(16, 48)
        self.out = Fused(nn.Linear(16, 16), nn.GELU())
        self.table = nn.Parameter(torch.randn(49, 2))
        self.register_buffer("index", torch.randint(0, 49, (16, 16)))
        self.mask = nn.Parameter(torch.randn((-(-side // 4)) ** 2, 16, 16))

    def forward(self, x):
        n, h, w, c = x.shape
        y = self.norm(x)
        if self.shift:
            y = torch.roll(y, (-self.shift, -self.shift), (1, 2))
        rest = -h % 4
        y = F.pad(y, (0, 0, 0, rest, 0, rest))
        many = (h + rest) // 4
        y = y.view(n, many, 4, many, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 16, c)
        q, k, v = self.qkv(y).reshape(-1, 16, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        bias = self.table[self.index.view(-1)].view(16, 16, 2).permute(2, 0, 1).unsqueeze(0)
        windows = self.mask.view(1, many * many, 1, 16, 16).expand(n, -1, 2, -1, -1)
        bias = bias + windows.reshape(-1, 2, 16, 16)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        y = self.out(y.transpose(1, 2).reshape(-1, 16, c))
        y = y.view(n, many, many, 4, 4, c).permute(0, 1, 3, 2, 4, 5).reshape(n, h + rest, -1, c)
        y = y[:, :h, :w].contiguous()
        if self.shift:
            y = torch.roll(y, (self.shift, self.shift), (1, 2))
        return (x + y).mean((1, 2))


class FewKeys(Net):
    """Keys and values of fewer tokens, which a convolution makes, as PVT's and SegFormer's."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.kv, self.out = nn.Linear(16, 16), nn.Linear(16, 32), nn.Linear(16, 16)
        self.fewer, self.norm = nn.Conv2d(16, 16, 2, 2), nn.LayerNorm(16)
        self.bias = nn.Parameter(torch.randn(4, 1, 12))
        self.attention = SpelledAttention(0.3)

    def forward(self, x):
        n, c, h, w = x.shape
        tokens = x.flatten(2).transpose(1, 2)
        q = self.q(tokens).reshape(n, h * w, 4, 4).permute(0, 2, 1, 3)
        fewer = self.fewer(tokens.permute(0, 2, 1).reshape(n, c, h, w))
        fewer = self.norm(fewer.reshape(n, c, -1).permute(0, 2, 1))
        k, v = self.kv(fewer).reshape(n, -1, 2, 4, 4).permute(2, 0, 3, 1, 4).unbind(0)
        y = self.attention(q, k.transpose(-2, -1), v, self.bias)
        y = self.out(y.transpose(1, 2).reshape(n, h * w, c)) + tokens
        return y.transpose(1, 2).reshape(n, c, h, w).relu()


class MaskedWindows(Net):
    """Four windows in each image, with masks of their own beside a bias, or alone."""

    def __init__(self, biased, sides):
        super().__init__()
        torch.manual_seed(0)
        self.sides = sides
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.bias = nn.Parameter(torch.randn(2, 9, 9)) if biased else None
        self.register_buffer("masks", (torch.rand(4, 9, 9) < 0.3).float() * -100.0)
        self.attention = SpelledAttention(0.3)

    def forward(self, x):
        n, count, c = x.shape
        q, k, v = self.qkv(x).reshape(n, count, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        masks, shape = self.masks.unsqueeze(1).unsqueeze(0), [*self.sides, 2, 9, 9]
        y = self.attention(q, k.transpose(-2, -1), v, self.bias, masks, shape)
        return self.out(y.transpose(1, 2).reshape(n, count, c)) + x


@pytest.mark.parametrize(
    ("net", "shape"),
    [
        (Transformer(), (2, 3, 16, 16)),
        (Windows(8, 0), (2, 8, 8, 16)),
        (Windows(8, 2), (2, 8, 8, 16)),
        (Windows(6, 1), (1, 6, 6, 16)),
        (FewKeys(), (2, 16, 8, 6)),
    ],
)
@torch.no_grad()
def test_a_transformer_is_one_program(net, shape):
    (x,) = images(shape)
    graph, program, chosen = lowered(net, x)
    assert all(kernel.startswith("nhwc") for kernel in chosen), chosen
    assert len({step.name.rpartition(" of ")[2] for step in program.steps}) == 2
    result, wanted = program(x), graph(x)
    torch.testing.assert_close(result, wanted, rtol=1e-4, atol=1e-5)


class Responding(Net):
    """The end of a block of ConvNeXt V2 whose channels are last from the start, as UVit's."""

    def __init__(self, order):
        super().__init__()
        self.order = order
        torch.manual_seed(0)
        self.wide, self.out, self.response = (
            nn.Linear(16, 32),
            nn.Linear(32, 16),
            responding(32, True),
        )

    def forward(self, x):
        x = x.permute(self.order)
        return self.out(self.response(F.gelu(self.wide(x)))) + x


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 3, 1), (0, 2, 1, 3)], ids=str)
@torch.no_grad()
def test_channels_that_are_last_are_normalized_by_their_response_as_they_lie(order):
    (x,) = images((2, 5, 6, 16))
    given = x.permute([order.index(dim) for dim in range(4)]).contiguous()
    graph, program, chosen = lowered(Responding(order), given)
    assert all(kernel.startswith("nhwc") for kernel in chosen), chosen
    assert sum(count(step, "response_squares") for step in program.steps) == 1
    torch.testing.assert_close(program(given), graph(given), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sides", [(2, 4), (-1, 4), (2, -1)], ids=str)
@pytest.mark.parametrize("biased", [True, False])
@torch.no_grad()
def test_masks_of_windows_are_part_of_the_attention(biased, sides):
    (x,) = images((8, 9, 16))
    graph, program, chosen = lowered(MaskedWindows(biased, sides), x)
    assert all(kernel.startswith("nhwc") for kernel in chosen), chosen
    [step] = program.steps
    assert count(step, "attention") == 1
    torch.testing.assert_close(program(x), graph(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_kernels_are_timed_on_the_masks_that_windows_have():
    """Torch takes ten times as long for what is left of a score from which 100 was taken."""
    net = MaskedWindows(True, (-1, 4))
    scene = scene_of(fuse(net), images((8, 9, 16)))
    (layer,) = (one for one in scene.layers if "SpelledAttention" in one.spec.key)
    queries, *_, masks = (_given(scene.record, node) for node in layer.inputs)
    assert torch.equal(masks.flatten(), net.masks.flatten())
    assert masks.data_ptr() != net.masks.data_ptr()
    assert not torch.equal(queries, _given(scene.record, layer.inputs[0]))


@torch.no_grad()
def test_channels_are_normalized_and_multiplied_where_they_lie():
    """Of attention between channels, only scores and the result are put in another order."""

    def channels(x, part):
        return (x * 2)[..., 16 * part :][..., :16].unflatten(-1, (4, 4)).permute(0, 2, 3, 1)

    def scores(x):
        q, k = F.normalize(channels(x, 0), dim=-1), F.normalize(channels(x, 1), dim=-1)
        return q @ k.transpose(-2, -1)

    def mixed(x):
        return scores(x).softmax(dim=-1) @ channels(x, 2)

    (x,) = images((2, 10, 48))
    for function, gathered in ((scores, []), (mixed, [2 * 4 * 4 * 4, 2 * 16 * 10])):
        graph, program, chosen = lowered(function, x)
        assert all(kernel.startswith("nhwc") for kernel in chosen), chosen
        torch.testing.assert_close(program(x), graph(x), rtol=1e-4, atol=1e-5)
        gathers = [one.given for step in program.steps for one in steps_of(step, "gather")]
        assert [one["pieces"] * one["floats"] for one in gathers] == gathered


@torch.no_grad()
def test_where_numbers_lie_is_known_while_somebody_reads_them(monkeypatch):
    """The tables of all scores of a video transformer would take ten times the memory of a call."""
    known, put = [], Values.put

    def counted(self, *given):
        put(self, *given)
        known.append(len(self._found))

    def chain(x):
        for _ in range(10):
            x = (x.transpose(1, 2) * 0.5).relu()
        return x

    monkeypatch.setattr(Values, "put", counted)
    (x,) = images(ROWS)
    graph, program, _ = lowered(chain, x)
    assert len(known) >= 30
    assert max(known) <= 3
    torch.testing.assert_close(program(x), graph(x))


@torch.no_grad()
def test_windows_are_read_where_they_lie():
    """Partition and roll, and their way back, gather nothing."""
    (x,) = images((2, 8, 8, 16))
    _, program, _ = lowered(Windows(8, 2), x)
    assert sum(count(step, "gather") for step in program.steps) == 0
    assert sum(count(step, "attention") for step in program.steps) == 1


def steps_of(step, kernel):
    held = [cell.cell_contents for cell in getattr(step.run, "__closure__", None) or ()]
    programs = [one for one in (step.run, *held) if isinstance(one, kernels.Program)]
    return [one for p in programs for one in p.schedule.steps if one.kernel.name == kernel]


def count(step, kernel):
    return len(steps_of(step, kernel))


@torch.no_grad()
def test_what_parameters_give_is_made_anew_with_the_plan():
    (x,) = images((2, 8, 8, 16))
    net = Windows(8, 2)
    lowered(net, x)
    net.table.mul_(-1)
    graph, program, _ = lowered(net, x)
    torch.testing.assert_close(program(x), graph(x), rtol=1e-4, atol=1e-5)


class Biased(Net):
    """Biases that a small network makes of positions, as those of Swin's second version."""

    def __init__(self, last):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Sequential(Fused(nn.Linear(2, 8), nn.ReLU()), nn.Linear(8, 4), last)
        self.register_buffer("places", torch.randn(9, 2))
        self.register_buffer("index", torch.randint(0, 9, (36,)))

    def forward(self, x):
        return (x * 2 + self.table(self.places)[self.index].t().reshape(1, 4, 6, 6)).relu()


@pytest.mark.parametrize("last", [nn.Sigmoid().eval(), nn.Softmax(1).eval(), Softmax(1)], ids=str)
@torch.no_grad()
def test_what_layers_make_of_parameters_is_made_with_the_plan(last):
    (x,) = images((2, 4, 6, 6))
    net = Biased(last)
    net.table[:2].eval()
    for _ in range(2):
        graph, program, chosen = lowered(net, x)
        assert chosen == ["nhwc"] * 3
        torch.testing.assert_close(program(x), graph(x))
        net.table[1].weight.neg_()


class Placed(Net):
    """Positions that are looked up by numbers in a buffer, as those of CLIP, and normed."""

    def __init__(self, max_norm=None):
        super().__init__()
        torch.manual_seed(0)
        self.places = nn.Embedding(12, 8, max_norm=max_norm)
        self.norm = nn.LayerNorm(8)
        self.register_buffer("numbers", torch.arange(12).flip(0)[None])

    def forward(self, x):
        return x * 2 + self.norm(self.places(self.numbers[:, :10]))


@torch.no_grad()
def test_places_that_a_buffer_numbers_are_looked_up_with_the_plan():
    (x,) = images((2, 10, 8))
    net = Placed().eval()
    for _ in range(2):
        graph, program, chosen = lowered(net, x)
        assert chosen == ["nhwc"] * 2
        torch.testing.assert_close(program(x), graph(x))
        net.places.weight.neg_()
        net.norm.bias.add_(1)


@torch.no_grad()
def test_a_table_that_its_own_look_up_changes_is_looked_up_in_every_call():
    (x,) = images((2, 10, 8))
    graph, program, chosen = lowered(Placed(max_norm=1.0).eval(), x)
    assert "torch" in chosen
    torch.testing.assert_close(program(x), graph(x))


class Averaged(Net):
    """A mean of a parameter, repeated for all images: modules that stand for functions of torch."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.linspace(-1, 1, 288).view(2, 4, 6, 6))
        self.mean, self.repeat = Reduced("mean", (0,), True), Repeat()

    def forward(self, x):
        return (x * 2 + self.repeat(self.mean(self.bias), [2, 1, 1, 1])).relu()


@torch.no_grad()
def test_a_mean_of_parameters_is_made_with_the_plan():
    (x,) = images((2, 4, 6, 6))
    graph, program, chosen = lowered(Averaged(), x)
    assert chosen == ["nhwc"] * 3
    torch.testing.assert_close(program(x), graph(x))


MOVED = {
    "flatten": lambda x: x.flatten(2).transpose(1, 2),
    "heads": lambda x: x.flatten(2).unflatten(1, (2, 4)).permute(0, 3, 1, 2).flatten(0, 1),
    "slices": lambda x: x[:, :, 1:5:2, None].squeeze(3)[..., -3:].contiguous(),
    "negative rolls": lambda x: torch.roll(x, (2, -1), (1, 3)).flip(2),
    "zeros around": lambda x: F.pad(x, (1, 2, 0, 1)).movedim(1, -1),
    "zeros cut": lambda x: F.pad(x.permute(0, 2, 3, 1), (0, 0, -1, 2)),
    "parts": lambda x: torch.cat(x.flatten(2).chunk(3, -1)[::-1], 1),
    "cat of tokens": lambda x: torch.cat([x.flatten(2), x.flatten(2)[..., :4]], -1),
    "repeated": lambda x: x.flatten(2).repeat(1, 2, 1).unsqueeze(1),
    "six dimensions": lambda x: x.view(2, 8, 3, 2, 3, 2).permute(0, 2, 4, 3, 5, 1).flatten(3),
    "softmax": lambda x: x.permute(0, 2, 3, 1).softmax(-1).mean((1, 2)),
    "means": lambda x: x.flatten(2).transpose(1, 2).mean(1, keepdim=True),
    "columns": lambda x: x.flatten(2).transpose(1, 2) * x.flatten(2).mean(-1)[0],
}


@pytest.mark.parametrize("name", MOVED)
@torch.no_grad()
def test_moved_tokens_are_torchs(name):
    """Between steps of ours, that read and write them."""
    (x,) = images((2, 8, 6, 6))
    function = MOVED[name]
    graph, program, _ = lowered(lambda x: function(x * 2).relu() + 1, x)
    for given in (x, x.to(memory_format=torch.channels_last)):
        result, wanted = program(given), graph(given)
        torch.testing.assert_close(result, wanted)


@torch.no_grad()
def test_views_follow_what_lies_otherwise_than_torch_has_it():
    """torch's transpose could be viewed; ours is contiguous where torch goes on."""
    (x,) = images((2, 8, 6, 6))
    graph, program, _ = lowered(lambda x: F.elu((x.flatten(2) * 2).transpose(1, 2)).relu(), x)
    torch.testing.assert_close(program(x), graph(x))
    rows = lambda x: F.elu(x.transpose(1, 2).relu()).transpose(1, 2).view(2, 8, 6, 6) + 1
    (tokens,) = images((2, 8, 36))
    graph, program, _ = lowered(rows, tokens)
    torch.testing.assert_close(program(tokens), graph(tokens))


class Halves(Net):
    """One half goes to an operator that we lack, the other on to ours."""

    def __init__(self):
        super().__init__()
        self.both, self.out = nn.Linear(24, 48), Fused(nn.Linear(24, 24), nn.ReLU())

    def forward(self, x):
        n, count, c = x.shape
        one, other = self.both(x).reshape(n, count, 2, c).unbind(2)
        return F.elu(one), self.out(other)


@torch.no_grad()
def test_a_program_returns_none_of_several_values_apart():
    (x,) = images((2, 40, 24))
    graph, program, _ = lowered(Halves(), x)
    for got, expected in zip(program(x), graph(x), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def _heads(x):
    """Queries, keys and values of four heads, side by side in the channels of `x`."""
    parts = x.chunk(3, -1)
    return [parts[number].unflatten(-1, (4, 4)).transpose(1, 2) for number in range(3)]


def _turned(x):
    return x.transpose(1, 2)


def _image_heads(x):
    return x.flatten(2).unflatten(1, (4, 4))


def _over_channels(x):
    """Attention between channels, as EdgeNeXt's and XCiT's."""
    q, k, v = (part.transpose(-2, -1) for part in _heads(x))
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    mixed = (q @ k.transpose(-2, -1)).softmax(dim=-1) @ v
    return mixed.permute(0, 3, 1, 2).flatten(2).mean(1)


def _linear_attention(x):
    """Attention without a softmax, as EfficientViT's."""
    q, k, v = _heads(x)
    q, k = q.relu(), k.relu()
    mixed = q @ (k.transpose(-2, -1) @ F.pad(v, (0, 1), value=0.0))
    divisor = mixed[..., -1:].abs() + q.mean(-1, keepdim=True).abs() + 1
    return (mixed[..., :-1] / divisor).transpose(1, 2).flatten(2)


def _selective(x, stack):
    """Images of a stack, weighed channel by channel, as selective kernels have it."""
    weights = stack.sum(1).mean((2, 3), keepdim=True)
    return (stack * torch.stack([weights, x.amax((2, 3), keepdim=True)], 1).softmax(1)).sum(1)


class LayerScale(Net):
    """A factor for each channel of images, without a dimension for the batch."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(-1, 1, IMAGE[1]))

    def forward(self, x):
        return x + x.relu() * self.scale.view(-1, 1, 1)


class Starred(Net):
    """An activation with one scale and one shift for all numbers, as MetaFormers have it."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.tensor([0.7])), nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.scale * x.relu() ** 2 + self.shift


class Gains(Net):
    """Factors, divisors and shifts that are single numbers, without any dimension."""

    def __init__(self):
        super().__init__()
        self.gain, self.rest = (nn.Parameter(torch.tensor(one)) for one in (0.7, -1.5))

    def forward(self, x):
        return (self.rest - (x * 2).mul_(self.gain) / self.rest) + self.gain


class NormWithoutShift(nn.LayerNorm):
    def __init__(self, c):
        super().__init__(c, bias=False)


def normed():
    norm = nn.BatchNorm1d(48).eval()
    for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
        nn.init.uniform_(tensor, 0.5, 2)
    return nn.Sequential(norm, nn.ReLU())


ROWS, IMAGE = (2, 10, 48), (2, 16, 6, 5)
PRODUCTS = {
    "attention over channels": (_over_channels, (ROWS,)),
    "heads of an image": (
        lambda x: _image_heads(x) @ _image_heads(x).transpose(-2, -1),
        (IMAGE,),
    ),
    "matrices for several batches": (lambda a, b: torch.matmul(a, b), ((2, 3, 7, 9), (9, 5))),
    "matrices turned": (
        lambda a, b: a.transpose(1, 2) @ b.transpose(1, 2),
        ((3, 9, 21), (3, 17, 9)),
    ),
    "single columns": (lambda a, b: torch.bmm(a, b), ((3, 5, 1), (3, 1, 4))),
    "a matrix for images of tokens": (lambda x, y: x @ y, ((2, 3, 7, 9), (9, 21))),
    "a vector for each row": (lambda x, y: x @ y, ((2, 3, 7, 9), (9,))),
    "a vector for batches": (lambda x, y: torch.matmul(x, y), ((9,), (2, 9, 5))),
    "a linear layer of computed weights": (
        lambda x, y: F.linear(x.softmax(-1), y * 2),
        ((2, 6, 33), (5, 33)),
    ),
    "a layer of one number": (lambda x, y: F.linear(x.softmax(-1), y), ((2, 6, 33), (33,))),
    "a number of each pixel": (lambda x, y: x * y.sigmoid(), (IMAGE, (2, 1, 6, 5))),
    "a number of each pixel for all images": (lambda x, y: y * x, (IMAGE, (1, 1, 6, 5))),
    "a divisor of each row": (lambda x, y: x / (y.sigmoid() + 1), ((2, 4, 7, 9), (2, 4, 7, 1))),
    "a divisor of each number": (lambda x, y: x / (y.sigmoid() + 1), (ROWS, ROWS)),
    "a shift of each channel": (lambda x: x + x.mean((2, 3), keepdim=True), (IMAGE,)),
    "a factor of each channel": (lambda x: x * x.mean(1, keepdim=True), (ROWS,)),
    "images one behind the other": (lambda x: torch.cat([x, x.relu()], 0), (IMAGE,)),
    "a shift of each row": (lambda x, y: x + y, (ROWS, (2, 10, 1))),
    "less a number of each row": (lambda x: x - x.amax(-1, keepdim=True), (ROWS,)),
    "less a number of each column": (lambda x: (x - x.amax(1, keepdim=True)).exp(), (ROWS,)),
    "a number less each row": (lambda x, y: x - y, ((2, 10, 1), ROWS)),
    "a scale for all": (Starred(), (IMAGE,)),
    "a scale for all tokens": (Starred(), (ROWS,)),
    "a layer on a single token": (nn.Sequential(nn.Linear(48, 24), nn.GELU()), ((1, 1, 48),)),
    "a row times a column": (lambda x, y: x * y.relu(), ((1, 16, 1, 1), (1, 1, 6, 5))),
    "a row and a column": (
        lambda x, y: (x - y) * (x + y.relu()) - y / (x.abs() + 1),
        ((2, 16, 1, 1), (2, 1, 6, 5)),
    ),
    "a row of tokens and a column": (
        lambda x, y: (x - y) * (x + y.relu()),
        ((2, 1, 48), (2, 10, 1)),
    ),
    "heads and a number for all of them": (
        lambda x, y: (x * y + y) / (y.abs() + 1) - y,
        ((12, 4, 32), (12, 1, 32)),
    ),
    "halves of heads, turned": (
        lambda x, y: x * y + torch.cat((-x[..., 16:], x[..., :16]), -1) * y.relu(),
        ((12, 4, 32), (12, 1, 32)),
    ),
    "heads side by side in a row": (
        lambda x, y: x.relu().view(12, 3, 4, 32).permute(1, 0, 2, 3).unbind(0)[1] * y,
        ((12, 384), (12, 1, 32)),
    ),
    "numbers without dimensions": (Gains(), (IMAGE,)),
    "tokens and numbers without dimensions": (Gains(), (ROWS,)),
    "images in a stack": (lambda x: _selective(x, torch.stack([x * 2, x.relu()], 1)), (IMAGE,)),
    "channels in a stack": (lambda x: _selective(x[:, :8], x.view(2, 2, 8, 6, 5)), (IMAGE,)),
    "images behind one another in a stack": (
        lambda x: torch.cat([x.permute(0, 2, 3, 1), x.relu().permute(0, 2, 3, 1)], 0).sum(0),
        (IMAGE,),
    ),
    "a difference that repeats": (lambda x, y: x - y / (y * y + 1), (ROWS, (2, 1, 48))),
    "a sum of a product": (lambda x, y, z: torch.addcmul(x, y, z), ((1, 1, 48), (48,), ROWS)),
    "as large as another": (lambda x, y: -x.expand_as(y) * y, ((2, 1, 48), ROWS)),
    "turned pairs": (lambda x: torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(2), (ROWS,)),
    "a sum of branches": (lambda x: x.relu().unflatten(1, (3, 4)).sum(1), ((2, 12, 5, 3),)),
    "a sum of half the batch": (lambda x: x.relu().unflatten(0, (2, 2)).sum(0), ((4, 4, 5, 3),)),
    "a sum of each row": (lambda x: x.sum(-1, keepdim=True) + x.sum((0, 2))[:, None], (ROWS,)),
    "a mean of the middle": (lambda x: x.mean((1, 3)) + x.sum((0, 1, 3)), ((2, 3, 4, 5, 6),)),
    "the largest of each": (lambda x: x.amax(1) * x.amax(-1).amax(1)[:, None], (ROWS,)),
    "the largest pixels": (lambda x: x.amax((2, 3), keepdim=True) + x.amax(1)[:, None], (IMAGE,)),
    "softmax of any dimension": (lambda x: x.softmax(1).softmax(0) + x.softmax(2), (IMAGE,)),
    "lengths of any dimension": (lambda x: F.normalize(x, dim=1) + F.normalize(x, dim=3), (IMAGE,)),
    "windows side by side": (lambda x: F.unfold(x * 2, 3, 2, 1).relu(), (IMAGE,)),
    "windows as views": (lambda x: x.unfold(2, 3, 2).unfold(3, 2, 1).flatten(4) * 2, (IMAGE,)),
    "pixels from channels": (lambda x: F.pixel_shuffle(x, 2) + 1, (IMAGE,)),
    "channels from pixels": (nn.Sequential(nn.PixelUnshuffle(2), nn.ReLU()), ((1, 3, 6, 4),)),
    "keys of one head": (
        lambda q, k: F.scaled_dot_product_attention(q, k, k * 2),
        ((2, 4, 7, 16), (2, 1, 5, 16)),
    ),
    "tokens without a batch": (
        lambda q, k, mask: F.scaled_dot_product_attention(q, k, k * 2, mask),
        ((7, 16), (5, 16), (7, 5)),
    ),
    "masks of a few tokens": (
        lambda q, k, mask: F.scaled_dot_product_attention(q, k, k * 2, mask),
        ((3, 7, 16), (3, 5, 16), (3, 7, 5)),
    ),
    "keys of few heads": (
        lambda q, k: F.scaled_dot_product_attention(q, k, k * 2, enable_gqa=True),
        ((2, 6, 7, 16), (2, 3, 5, 16)),
    ),
    "tokens that see no later ones": (
        lambda q, k: F.scaled_dot_product_attention(q, k, k * 2, is_causal=True),
        ((2, 4, 70, 16), (2, 4, 70, 16)),
    ),
    "fewer tokens that see no later ones": (
        lambda q, k: F.scaled_dot_product_attention(q, k, k * 2, is_causal=True, scale=0.5),
        ((2, 4, 5, 16), (2, 4, 9, 16)),
    ),
    "an einsum": (
        lambda q, r, s: torch.einsum("bhwc,hkc->bhwk", q, r) + torch.einsum("bhwc,wkc->bhwk", q, s),
        ((3, 4, 5, 16), (4, 7, 16), (5, 7, 16)),
    ),
    "an einsum turned": (
        lambda x, y: torch.einsum("nchw, nhwdo -> nodc", x, y),
        ((2, 3, 4, 5), (2, 4, 5, 6, 7)),
    ),
    "an einsum of batches": (
        lambda x, y: torch.einsum("...si,...id->...sd", x, y),
        ((2, 3, 7, 16), (2, 3, 16, 5)),
    ),
    "an einsum that names no result": (
        lambda x, y: torch.einsum("bji,kj", x, y),
        ((2, 5, 6), (7, 5)),
    ),
    "an einsum of fewer batches": (
        lambda x, y: torch.einsum("...i,io", x, y),
        ((2, 5, 6), (6, 7)),
    ),
    "activations with settings": (
        lambda x: F.gelu(F.leaky_relu(F.hardtanh(x, 0, 6) - 3, 0.2), approximate="tanh"),
        (IMAGE,),
    ),
    "an activation with a setting": (
        lambda x: F.leaky_relu(x, negative_slope=0.3),
        (ROWS,),
    ),
    "a one behind each row": (lambda x: F.pad(x * 2, (0, 1), value=1.0) + 1, (ROWS,)),
    "numbers before and behind": (lambda x: F.pad(x * 2, (0, 0, 2, 3), value=-0.5) * 3, (ROWS,)),
    "a factor of each channel of images": (LayerScale(), (IMAGE,)),
    "slices put in": (
        lambda x, y: torch.slice_scatter(torch.slice_scatter(x, y, 1, 2, 5), x * 2, 2) + x,
        (ROWS, (2, 3, 48)),
    ),
    "a softmax of torch's": (nn.Softmax(dim=-1), (ROWS,)),
    "a softmax as torch calls it": (lambda x: F.softmax(x, 1, _stacklevel=3, dtype=None), (ROWS,)),
    "a norm of a batch of rows": (normed(), ((3, 48),)),
    "a norm of a class of its own": (nn.Sequential(NormWithoutShift(48), nn.GELU()), (ROWS,)),
}


@pytest.mark.parametrize("name", PRODUCTS)
@torch.no_grad()
def test_products_and_numbers_of_rows(name):
    function, shapes = PRODUCTS[name]
    inputs = images(*shapes)
    graph, program, chosen = lowered(function, *inputs)
    assert all(kernel.startswith("nhwc") for kernel in chosen), chosen
    torch.testing.assert_close(program(*inputs), graph(*inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("stays", "rows"), [(True, (192, 5, 1, 1)), (False, (2, 16, 6, 5))])
@torch.no_grad()
def test_a_contiguous_image_is_taken_as_it_lies_by_those_who_take_any(stays, rows):
    """In a trial it was brought into channels last and back, which took ten times as long."""
    graph = fuse(nn.Sequential(nn.Softmax(3), nn.Softmax(2)))
    record = scene_of(graph, images(IMAGE)).record
    first, *_ = (node for node in graph.graph.nodes if node.op == "call_module")
    values = Values(record, kernels.Builder())
    values.take(first, contiguous=stays)
    anyhow = Implementation("nhwc", None, None, emit=print, moved=True)
    assert values.given(first, anyhow).buffer.shape == rows


@torch.no_grad()
def test_attention_of_a_vector_is_torchs():
    """Its planning ended in "not enough values to unpack"."""

    class Attended(Net):
        def __init__(self):
            super().__init__()
            self.attention = SpelledAttention()

        def forward(self, query, keys, value):
            return self.attention(query, keys, value)

    inputs = images((16,), (16, 5), (5, 8))
    graph, program, chosen = lowered(Attended(), *inputs)
    assert chosen == ["torch"]
    torch.testing.assert_close(program(*inputs), graph(*inputs))


class OfScales(nn.Module):
    """Linear attention over heads of an image's channels, with a sum beside the values."""

    def __init__(self, transposed):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out = nn.Conv2d(48, 48, 1), nn.Conv2d(16, 16, 1)
        self.transposed = transposed

    def forward(self, x):
        n, _, h, w = x.shape
        heads = self.qkv(x).reshape(n, -1, 24, h * w)
        if self.transposed:
            q, k, v = heads.chunk(3, dim=2)
            v = F.pad(v, (0, 0, 0, 1), value=1.0)
            y = (v @ k.relu().transpose(-1, -2)) @ q.relu()
            y = y[:, :, :-1] / (y[:, :, -1:] + 1e-5)
        else:
            q, k, v = heads.transpose(-1, -2).chunk(3, dim=-1)
            v = F.pad(v, (0, 1), mode="constant", value=1.0)
            y = q.relu() @ (k.relu().transpose(-1, -2) @ v)
            y = (y[..., :-1] / (y[..., -1:] + 1e-5)).transpose(-1, -2)
        return self.out(y.reshape(n, -1, h, w))


@pytest.mark.parametrize("transposed", [False, True])
@torch.no_grad()
def test_linear_attention_of_images_is_one_program(transposed):
    (x,) = images((2, 48, 5, 4))
    graph, program, chosen = lowered(OfScales(transposed).eval(), x)
    assert all(kernel.startswith("nhwc") for kernel in chosen), chosen
    assert len([step for step in program.steps if step.name.startswith("qkv to ")]) == 1
    torch.testing.assert_close(program(x), graph(x), rtol=1e-4, atol=1e-5)


def _split_heads(x):
    heads = x.view(2, 10, 2, -1).split([6, 6, 12], dim=3)
    q, k, v = (heads[number].permute(0, 2, 1, 3) for number in range(3))
    return (q @ k.transpose(-2, -1)).softmax(-1) @ v


@torch.no_grad()
def test_parts_of_heads_are_handed_on_without_a_copy():
    """Each was to be brought into channels last, which no tuple can be: a second forbade it."""
    (x,) = images(ROWS)
    graph, program, kernels_of = lowered(_split_heads, x)
    assert all(kernel.startswith("nhwc") for kernel in kernels_of), kernels_of
    scene = scene_of(graph, (x,))
    assert cost(scene, chosen(scene), lambda seen: 0.0) == 0.0
    torch.testing.assert_close(program(x), graph(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_linear_attention_answers_as_torch_does():
    (x,) = images(ROWS)
    graph, program, _ = lowered(_linear_attention, x)
    torch.testing.assert_close(program(x), graph(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_positions_that_follow_from_sizes_are_made_with_the_plan():
    """As EdgeNeXt's and XCiT's: places are counted, and their sines are taken."""

    def positioned(x):
        places = (~torch.zeros((x.shape[0], *IMAGE[2:])).bool()).cumsum(1, dtype=torch.float32)
        waves = places.unsqueeze(1) / torch.arange(1, x.shape[1] + 1).view(1, 16, 1, 1)
        return x.relu() + waves.sin()

    (x,) = images(IMAGE)
    graph, program, chosen = lowered(positioned, x)
    assert chosen == ["nhwc", "nhwc"]
    torch.testing.assert_close(program(x), graph(x))


class Refolded(Net):
    """Windows of an image as tokens, changed and put back."""

    def __init__(self, size, *window):
        super().__init__()
        self.apart, self.back = nn.Unfold(*window), nn.Fold(size, *window)

    def forward(self, x):
        return self.back(self.apart(x).transpose(1, 2).relu().transpose(1, 2)) * 2


@pytest.mark.parametrize(
    ("window", "sums"),
    [
        (((2, 3), 1, 0, (2, 3)), 0),  # Patches, which do not overlap, cost nothing.
        ((3, 1, 1, 2), 3),
        (((2, 3), (2, 1), 0, 1), 5),
        (((3, 2), 2, (2, 1), (1, 3)), 2),
    ],
)
@torch.no_grad()
def test_windows_go_back_to_where_they_came_from(window, sums):
    (x,) = images((2, 8, 8, 6))
    graph, program, chosen = lowered(Refolded((8, 6), *window), x)
    assert all(kernel.startswith("nhwc") for kernel in chosen), chosen
    assert sum(count(step, "sum") for step in program.steps) == sums + 1
    torch.testing.assert_close(program(x), graph(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_windows_go_back_to_a_size_that_is_asked_for():
    (x,) = images((2, 8, 8, 6))

    def patched(x):
        windows = F.unfold(x, 2, stride=2).relu()
        return F.fold(windows, output_size=x.shape[2:], kernel_size=(2, 2), stride=(2, 2)) * 2

    graph, program, chosen = lowered(patched, x)
    assert all(kernel.startswith("nhwc") for kernel in chosen), chosen
    torch.testing.assert_close(program(x), graph(x))


class Boxes(Net):
    """Corners from distances, as detectors have them: the first half of a whole, and anchors."""

    def __init__(self):
        super().__init__()
        self.register_buffer("anchors", torch.randn(2, 100))

    def forward(self, x):
        left, right = x.chunk(2, 1)
        begin, end = self.anchors.unsqueeze(0) - left, self.anchors.unsqueeze(0) + right
        return torch.cat(((begin + end) / 2, end - begin), 1)


@torch.no_grad()
def test_the_first_half_of_a_whole_is_no_whole():
    """Its numbers lie where those of a buffer of its own would, before others."""
    (x,) = images((1, 4, 100))
    graph, program, chosen = lowered(Boxes().eval(), x)
    assert set(chosen) == {"nhwc"}
    torch.testing.assert_close(program(x), graph(x))
