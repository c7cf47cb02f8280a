"""Passes that keep channels last through sums, repeats, resizes and views of tokens."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nhwc import Format, audit, format_of, to_format
from nhwc.graph.modules.mended import Cat, CircularPad, FromTokens, Pixel
from nhwc.graph.modules.ordered import Reduced, Repeat, Softmax, order_in_memory
from nhwc.passes import PASSES
from nhwc.passes.mend_arithmetic import mend_arithmetic
from nhwc.passes.mend_cat_format import mend_cat_format
from nhwc.passes.mend_contiguous import mend_contiguous
from nhwc.passes.mend_interpolate import mend_interpolate
from nhwc.passes.mend_pad import mend_pad
from nhwc.passes.mend_reduction import mend_reduction
from nhwc.passes.mend_repeat import mend_repeat
from nhwc.passes.mend_softmax import mend_softmax
from nhwc.passes.mend_tokens import mend_tokens

from ..fusing import Block, outputs, rewrite, script
from ..optimizing import force


def images(count=1, channels=8):
    generator = torch.Generator().manual_seed(count)
    return to_format(torch.randn(count, channels, 6, 5, generator=generator), Format.CHANNELS_LAST)


def block(run):
    """Convolutions of channels-last weights around `run`, which is given (module, image)."""

    def build():
        def forward(self, x):
            return self.last(run(self, self.first(x)))

        model = Block(
            forward,
            first=nn.Conv2d(8, 8, 3, padding=1),
            last=nn.Conv2d(8, 4, 1),
            near=nn.Conv2d(8, 8, 1),
            framed=nn.Conv2d(8, 8, 1, padding=1),
            circular=nn.Conv2d(8, 8, 3, padding=(2, 1), padding_mode="circular", stride=2),
            pool=nn.AdaptiveAvgPool2d(1),
            wide=nn.Conv2d(16, 8, 1),
        )
        return model.to(memory_format=torch.channels_last).eval()

    return build


def branches(self, x):
    stacked = torch.stack((x, self.near(x)), dim=1)
    return torch.sum(stacked * stacked.sum(1, keepdim=True).mean((3, 4), keepdim=True), dim=1)


def coordinates(self, x):
    return x * self.near(x.mean(dim=3, keepdim=True)) * x.amax(2, True)


def places(self, x):
    maps = torch.cat((x.mean(1, keepdim=True), x.amax(dim=1, keepdim=True)), dim=1)
    return x * F.conv2d(maps, maps.new_ones(1, 2, 3, 3), padding=1).sigmoid()


def pooled(self, x):
    context = F.interpolate(F.relu(self.near(self.pool(x))), size=x.shape[-2:], mode="bilinear")
    return self.wide(torch.cat((x, context), dim=1))


def attended(self, x):
    n, c, h, w = x.shape
    rows = x.flatten(2)
    return (rows @ (rows.transpose(1, 2) @ rows).softmax(-1)).reshape(n, c, h, w)


def resized_tokens(self, x):
    n, c, h, w = x.shape
    tokens = F.layer_norm(x.flatten(2).transpose(1, 2), (8,))
    return F.adaptive_avg_pool2d(tokens.transpose(1, 2).reshape(n, c, h, w), 3)


def habit(self, x):
    left, right = x.split(4, dim=1)
    return torch.cat((left, (self.near(x) * 2).contiguous(), right), dim=1)[:, 4:12]


# pass, model, the layer that must appear in the rewritten graph (None: a node goes or is turned)
CASES = {
    "sums of branches": (mend_reduction, block(branches), Reduced),
    "a mean over one side": (mend_reduction, block(coordinates), Reduced),
    "maps of one channel": (mend_reduction, block(places), Reduced),
    "softmax over a row": (mend_softmax, block(lambda self, x: x.softmax(-1)), Softmax),
    "softmax over channels": (mend_softmax, block(lambda self, x: F.log_softmax(x, 1)), Softmax),
    "repeat": (mend_repeat, block(lambda self, x: x.repeat(2, 1, 1, 3)), Repeat),
    "a resized pixel": (mend_interpolate, block(pooled), Pixel),
    "cat with what was attended": (
        mend_cat_format,
        block(lambda self, x: self.wide(torch.cat((attended(self, x), x), 1))),
        Cat,
    ),
    "a sum that tokens begin": (
        mend_arithmetic,
        block(lambda self, x: attended(self, x) + self.near(x)),
        None,
    ),
    "a sum that tokens begin, of windows": (
        mend_arithmetic,
        block(lambda self, x: attended(self, x) + (x.permute(0, 2, 3, 1) * 2).permute(0, 3, 1, 2)),
        None,
    ),
    "images of tokens": (mend_tokens, block(resized_tokens), FromTokens),
    "contiguous by habit": (mend_contiguous, block(habit), None),
    "circular convolution": (mend_pad, block(lambda self, x: self.circular(x)), CircularPad),
}

UNCHANGED = {
    # What is left has one pixel, or one channel, and no format to lose.
    "a global mean": (mend_reduction, block(lambda self, x: x * x.mean((2, 3), keepdim=True))),
    "a sum of channels": (mend_reduction, block(lambda self, x: x * x.sum(1, keepdim=True))),
    # Three dimensions are no image.
    "a sum that drops a side": (
        mend_reduction,
        block(lambda self, x: x * x.sum(3).mean().reshape(1)),
    ),
    # Numbers of another type are no image that the next convolution takes.
    "a sum in another type": (
        mend_reduction,
        block(lambda self, x: torch.stack((x, x), 1).sum(1, dtype=torch.float64).float()),
    ),
    # It is of a matrix product: the scores of an attention are contiguous as they come.
    "softmax of scores": (mend_softmax, block(attended)),
    # Some other function of several pixels.
    "a resized image": (mend_interpolate, block(lambda self, x: F.interpolate(x, (9, 9)))),
    # Zeros stand around it by then.
    "a framed pixel": (
        mend_interpolate,
        block(lambda self, x: F.interpolate(self.framed(self.pool(x)), (9, 9))),
    ),
    # It adds weights of four pixels, which need not be one.
    "a bicubic pixel": (
        mend_interpolate,
        block(lambda self, x: F.interpolate(self.pool(x), (9, 9), mode="bicubic")),
    ),
    # Which dimensions go is counted while the model runs.
    "a pixel by the rank": (
        mend_interpolate,
        block(lambda self, x: F.interpolate(x.mean([x.dim() - 2, x.dim() - 1], True), (9, 9))),
    ),
    # A write into a view whose pixels are all one would write into all of them.
    "a resized pixel that is written into": (
        mend_interpolate,
        block(lambda self, x: F.interpolate(self.pool(x), (6, 5)).mul_(x)),
    ),
    # All inputs were made by convolutions, in one format.
    "cat of images": (
        mend_cat_format,
        block(lambda self, x: self.wide(torch.cat((x, self.near(x)), 1))),
    ),
    # a - b is not b - a.
    "a resized pixel that is written later": (
        mend_interpolate,
        block(lambda self, x: _resized_before_a_write(self, x)),
    ),
    "a difference": (mend_arithmetic, block(lambda self, x: attended(self, x) - self.near(x))),
    # It writes into its first operand.
    "a sum in place": (mend_arithmetic, block(lambda self, x: attended(self, x).add_(x))),
    # A view of the copy: channels-last memory has none such.
    "contiguous before a view": (
        mend_contiguous,
        block(lambda self, x: x.contiguous().view(1, -1).reshape(x.shape)),
    ),
    # The copy is of what was there before the write.
    "contiguous before a write": (
        mend_contiguous,
        block(lambda self, x: _copied_before_a_write(self, x)),
    ),
    # The write shows in what was copied if there is no copy.
    "contiguous before an activation in place": (
        mend_contiguous,
        block(lambda self, x: self.near(F.relu(x.contiguous(), inplace=True)) + x),
    ),
    "converted to another type, too": (
        mend_contiguous,
        block(
            lambda self, x: self.near(x.to(torch.float32, memory_format=torch.contiguous_format))
        ),
    ),
    "contiguous that names channels last": (
        mend_contiguous,
        block(lambda self, x: self.near(x.contiguous(memory_format=torch.channels_last))),
    ),
    # It pads with zeros, inside of the kernel.
    "zeros": (mend_pad, block(lambda self, x: self.near(x))),
}


def _resized_before_a_write(self, x):
    pixel = self.pool(x)
    image = F.interpolate(pixel, (6, 5))
    pixel.view(-1).mul_(2)
    return image + x + pixel


def _copied_before_a_write(self, x):
    before = x.contiguous()
    x.mul_(2)
    return self.near(before) + x


@pytest.mark.parametrize("name", CASES)
def test_keeps_the_format_and_the_values(name):
    rewriting, build, layer = CASES[name]
    model = build()
    assert audit(model, images()).lost
    changed, [report, *_] = rewrite(model, rewriting, mend_cat_format)
    assert report.applied
    assert layer is None or any(isinstance(module, layer) for module in changed.modules())
    assert not audit(changed, images()).lost
    exact = outputs(copy.deepcopy(model).double(), (images().double(),))
    for x in (images(), images().contiguous()):
        torch.testing.assert_close(outputs(changed, (x,)).double(), exact, rtol=1e-5, atol=1e-5)
    more = images(3)
    torch.testing.assert_close(outputs(changed, (more,)), outputs(model, (more,)))
    scripted = outputs(script(changed), (images(),))
    torch.testing.assert_close(scripted, outputs(changed, (images(),)))


@pytest.mark.parametrize("name", UNCHANGED)
def test_must_not_change(name):
    rewriting, build = UNCHANGED[name]
    model = build()
    changed, [report] = rewrite(model, rewriting)
    assert not report.applied
    x = images()
    torch.testing.assert_close(outputs(changed, (x,)), outputs(model, (x,)))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_circular_padding_is_torchs_in_any_type_and_format(count, rank, dtype):
    last = Format.CHANNELS_LAST if rank == 2 else Format.CHANNELS_LAST_3D
    x = to_format(torch.randn(count, 6, *[5] * rank).to(dtype), last)
    padding = (1, 2, 0, 3, 2, 1)[: 2 * rank]
    pad = CircularPad(padding)
    for given in (x, x[:, 1:4], x.contiguous(), x[:, :1]):
        expected = F.pad(given, padding, mode="circular")
        assert torch.equal(pad(given), expected)
    assert format_of(pad(x)) is last
    narrower = tuple(-end for end in padding)
    assert torch.equal(CircularPad(narrower)(x), F.pad(x, narrower, mode="circular"))


def test_a_convolution_that_reflects_becomes_one_that_kernels_know():
    conv = nn.Conv2d(8, 8, 3, padding="same", padding_mode="reflect")
    changed, [report] = rewrite(nn.Sequential(conv).eval(), mend_pad)
    assert [site.what for site in report.applied] == ["reflect padding"]
    assert [type(layer) for layer in changed.modules()][-1] is nn.ReflectionPad2d
    torch.testing.assert_close(outputs(changed, (images(),)), outputs(conv, (images(),)))


@pytest.mark.parametrize("mode", ["circular", "replicate"])
def test_a_convolution_of_volumes_that_pads_itself(mode):
    model = nn.Sequential(nn.Conv3d(2, 4, 3, padding=(1, 2, 0), padding_mode=mode)).eval()
    x = to_format(torch.randn(2, 2, 5, 6, 7), Format.CHANNELS_LAST_3D)
    changed, [report] = rewrite(model, mend_pad)
    assert [site.what for site in report.applied] == [f"{mode} padding"]
    torch.testing.assert_close(outputs(changed, (x,)), outputs(model, (x,)))


def test_a_circular_convolution_that_is_called_twice_keeps_its_weights():
    conv = nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular")
    model = Block(lambda self, x: self.conv(F.relu(self.conv(x))), conv=conv).eval()
    changed, [report] = rewrite(model, mend_pad)
    assert len(report.applied) == 2
    x = torch.randn(1, 4, 6, 6)
    torch.testing.assert_close(outputs(changed, (x,)), outputs(model, (x,)))


def test_a_circular_convolution_under_hooks_is_left():
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular")).eval()
    model[0].register_forward_hook(lambda module, args, result: result * 2)
    _, [report] = rewrite(model, mend_pad)
    assert not report.applied


def test_an_optimized_circular_convolution_loses_nothing():
    conv = nn.Conv2d(3, 8, 3, padding=1, padding_mode="circular")
    model = nn.Sequential(conv, nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1)).eval()
    x = torch.randn(1, 3, 16, 16)
    fast = force(model, x)
    assert not audit(fast.portable, to_format(x, Format.CHANNELS_LAST)).lost
    torch.testing.assert_close(outputs(fast, (x,)), outputs(model, (x,)), rtol=1e-4, atol=1e-5)


def test_mixed_heads_of_an_attention_lose_nothing():
    def forward(self, x):
        n, c, h, w = x.shape
        rows = self.first(x).flatten(2).reshape(n, 2, c // 2, h * w)
        scores = self.mix((rows.transpose(2, 3) @ rows).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return (rows @ scores.softmax(-1)).reshape(n, c, h, w)

    model = Block(forward, first=nn.Conv2d(8, 8, 1), mix=nn.Linear(2, 2)).eval()
    changed, _ = rewrite(model, *PASSES)
    assert not audit(changed, images()).lost
    torch.testing.assert_close(outputs(changed, (images(2),)), outputs(model, (images(2),)))


@pytest.mark.parametrize("kind", ["sum", "mean", "amax", "amin"])
def test_a_number_has_a_first_dimension_to_be_reduced_over(kind):
    block = Block(lambda self, x: x * getattr(self.scale, kind)(0)).eval()
    block.scale = nn.Parameter(torch.tensor(3.0))
    changed, [report] = rewrite(block, mend_reduction)
    assert not report.applied
    torch.testing.assert_close(outputs(changed, (images(),)), outputs(block, (images(),)))


def test_dimensions_of_size_one_come_first():
    assert order_in_memory(images(1)) == [0, 2, 3, 1]
    assert order_in_memory(torch.stack((images(1), images(1)), dim=1)) == [0, 3, 4, 1, 2]
    assert order_in_memory(images(2).contiguous()) == [0, 1, 2, 3]


def test_the_smaller_part_of_a_cat_takes_the_format_of_the_larger():
    x, other = images(2), images(2, channels=2).contiguous()
    assert format_of(Cat()([other, x])) is Format.CHANNELS_LAST
    assert format_of(Cat()([other, other, x[:, :2]])) is Format.CONTIGUOUS
    expected = torch.cat((other, x), 1)
    assert torch.equal(Cat()([other, x]), expected)


NCHW = torch.contiguous_format


@pytest.mark.parametrize(
    "run",
    [
        lambda self, x: self.near(x.contiguous().relu()),
        lambda self, x: self.near(x.clone(memory_format=NCHW)),
        lambda self, x: self.near(F.silu(self.near(x).to(memory_format=NCHW))),
        lambda self, x: self.near(x.contiguous().clone(memory_format=NCHW)),
    ],
    ids=["contiguous", "clone", "to", "both"],
)
def test_a_copy_to_nchw_goes_however_it_is_said(run):
    model = block(run)()
    changed, (report,) = rewrite(model, mend_contiguous)
    assert all(site.applied for site in report.sites)
    assert not {"contiguous", "clone", "to"} & {node.target for node in changed.graph.nodes}
    torch.testing.assert_close(outputs(changed, (images(),)), outputs(model, (images(),)))
