"""The passes that mend operators which lose channels last: what changes, and what must not."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nhwc import Format, audit, format_of, fuse, optimize, to_format
from nhwc.formats import CHANNELS_LAST_OF
from nhwc.graph.modules.layers import BatchNorm
from nhwc.graph.modules.mended import (
    Cat,
    ChannelShuffle,
    CircularPad,
    GridSample,
    GroupNorm,
    InstanceNorm,
    Interleave,
)
from nhwc.passes import MENDING, PASSES
from nhwc.passes.lift_functional import lift_functional
from nhwc.passes.mend_cat_format import mend_cat_format
from nhwc.passes.mend_channel_shuffle import mend_channel_shuffle
from nhwc.passes.mend_grid_sample import mend_grid_sample
from nhwc.passes.mend_group_norm import mend_group_norm
from nhwc.passes.mend_instance_norm import mend_instance_norm
from nhwc.passes.mend_pad import mend_pad

from ..fusing import Block, outputs, random_, rewrite, script

GRID = torch.rand(2, 5, 7, 2, generator=torch.Generator().manual_seed(2)) * 2.4 - 1.2


def images(channels=8):
    x = torch.randn(2, channels, 6, 5, generator=torch.Generator().manual_seed(1))
    return to_format(x, Format.CHANNELS_LAST)


class OneGroup(nn.GroupNorm):
    """As PoolFormer has it."""

    def __init__(self, channels):
        super().__init__(1, channels)


def call(function):
    return lambda: Block(lambda self, x: function(x))


def shuffle(x, groups=2, copied=True):
    n, c, h, w = x.size()
    y = torch.transpose(x.view(n, groups, c // groups, h, w), 1, 2)
    return (y.contiguous() if copied else y).reshape(n, c, h, w)


def shuffle_by_permute(x):
    n, c, h, w = x.shape
    y = x.reshape(n, 4, c // 4, h, w).permute(0, 2, 1, 3, 4)
    return y.contiguous().view(n, -1, h, w)


def unshuffled(x):
    """The same steps on another axis: nothing of the kind."""
    n, c, h, w = x.shape
    return x.reshape(n, 2, c // 2, w, h).transpose(1, 2).reshape(n, c, w, h)


def split_unit(x):
    left, right = x.chunk(2, dim=1)
    return shuffle(torch.cat((left, right * 2), dim=1))


def _joined_into(x):
    y = F.pad(x, (0, 0, 0, 0, 0, 4))
    torch.cat((x[:, :4], x), 1, out=y)
    return y


def three_parts(x):
    a, b = x[:, :4], x[:, 4:]
    return shuffle(torch.cat((a, b, a), dim=1), groups=3)


# pass, model, the layer that must appear in the rewritten graph (None: must not change)
CASES = {
    "shuffle": (mend_channel_shuffle, call(shuffle), ChannelShuffle),
    "shuffle without a copy": (
        mend_channel_shuffle,
        call(lambda x: shuffle(x, copied=False)),
        ChannelShuffle,
    ),
    "shuffle by permute": (mend_channel_shuffle, call(shuffle_by_permute), ChannelShuffle),
    "cat and shuffle": (mend_channel_shuffle, call(split_unit), Interleave),
    "three parts": (mend_channel_shuffle, call(three_parts), Interleave),
    "cat of a chunk": (
        mend_cat_format,
        call(lambda x: torch.cat((x.chunk(2, 1)[0], F.relu(x)), 1)),
        Cat,
    ),
    "cat of a slice": (mend_cat_format, call(lambda x: torch.cat([x[:, 2:5], x], dim=1)), Cat),
    "cat of a split": (
        mend_cat_format,
        call(lambda x: torch.cat([torch.split(x, 4, dim=1)[1], x], dim=-3)),
        Cat,
    ),
    "circular pad": (
        mend_pad,
        call(lambda x: F.pad(x, (1, 2, 3, 0), mode="circular")),
        CircularPad,
    ),
    "circular pad module": (
        mend_pad,
        lambda: nn.Sequential(nn.CircularPad2d((1, 2, 0, 3))),
        CircularPad,
    ),
    "instance norm": (
        mend_instance_norm,
        lambda: nn.Sequential(nn.InstanceNorm2d(8, affine=True)),
        InstanceNorm,
    ),
    "plain instance norm": (
        mend_instance_norm,
        lambda: nn.Sequential(nn.InstanceNorm2d(8)),
        InstanceNorm,
    ),
    "instance norm with statistics": (
        mend_instance_norm,
        lambda: nn.Sequential(nn.InstanceNorm2d(8, affine=True, track_running_stats=True)),
        BatchNorm,
    ),
    "group norm": (
        mend_group_norm,
        lambda: nn.Sequential(nn.GroupNorm(2, 8)),
        GroupNorm,
    ),
    "group norm of a subclass": (
        mend_group_norm,
        lambda: nn.Sequential(OneGroup(8)),
        GroupNorm,
    ),
    "plain group norm": (
        mend_group_norm,
        lambda: nn.Sequential(nn.GroupNorm(8, 8, affine=False)),
        GroupNorm,
    ),
    "grid sample": (
        mend_grid_sample,
        call(lambda x: F.grid_sample(x, GRID, align_corners=False)),
        GridSample,
    ),
    "grid sample, corners, border": (
        mend_grid_sample,
        call(lambda x: F.grid_sample(x, GRID, padding_mode="border", align_corners=True)),
        GridSample,
    ),
}

# A single image of the module's is a batch of the function's.
FUNCTIONS = {
    "images": (lambda x: F.instance_norm(x, eps=1e-3), images()),
    "clips": (F.instance_norm, torch.rand(2, 8, 3, 5, 4)),
    "six dimensions": (F.instance_norm, torch.rand(2, 3, 5, 4, 2, 8).movedim(-1, 1)),
    "torch's own": (
        lambda x: torch.instance_norm(x, None, None, None, None, True, 0.1, 1e-3, False),
        images(),
    ),
    "rows": (F.instance_norm, torch.rand(3, 8, 5)),
    "exported": (nn.InstanceNorm2d(8, affine=True), images()),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_instance_norm_as_a_function_keeps_the_format_too(name):
    function, x = FUNCTIONS[name]
    model = Block(lambda self, x: function(x)).eval()
    if name == "exported":
        model = torch.export.export(function.eval(), (x,)).module()
    changed, [_, report] = rewrite(model, lift_functional, mend_instance_norm)
    assert report.applied
    assert any(isinstance(module, InstanceNorm) for module in changed.modules())
    result = outputs(changed, (x,))
    assert format_of(result) is format_of(x)
    torch.testing.assert_close(result, outputs(model, (x,)), rtol=1e-4, atol=1e-5)


UNCHANGED = {
    # The sizes are not those of the channels' groups.
    "a view that is no shuffle": (mend_channel_shuffle, call(unshuffled)),
    # These keep the format by themselves.
    "native shuffle": (mend_channel_shuffle, call(lambda x: F.channel_shuffle(x, 2))),
    "cat of whole tensors": (mend_cat_format, call(lambda x: torch.cat((x, x[:, :3]), 1))),
    "reflecting pad": (mend_pad, call(lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"))),
    # Joins rows of images, not channels.
    "cat along the height": (
        mend_cat_format,
        call(lambda x: torch.cat((x[:, :4], x[:, 4:]), dim=2)),
    ),
    # Whoever gave the tensor reads it.
    "cat into a given tensor": (mend_cat_format, call(_joined_into)),
    # Has no form as one weighted sum of rows.
    "nearest grid sample": (
        mend_grid_sample,
        call(lambda x: F.grid_sample(x, GRID, mode="nearest", align_corners=False)),
    ),
    "reflected grid sample": (
        mend_grid_sample,
        call(lambda x: F.grid_sample(x, GRID, padding_mode="reflection", align_corners=False)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_keeps_the_format_and_the_values(name):
    rewriting, build, layer = CASES[name]
    model = build().eval()
    if "statistics" in name:
        model[0].running_var.uniform_(0.5, 2)
    changed, [report] = rewrite(model, rewriting)
    assert report.applied
    assert any(isinstance(module, layer) for module in changed.modules())
    x = images()
    result = outputs(changed, (x,))
    assert format_of(result) is Format.CHANNELS_LAST
    torch.testing.assert_close(result, outputs(model, (x,)), rtol=1e-4, atol=1e-5)
    plain = outputs(changed, (x.contiguous(),))
    torch.testing.assert_close(plain, outputs(model, (x,)), rtol=1e-4, atol=1e-5)
    assert format_of(plain) is Format.CONTIGUOUS


@pytest.mark.parametrize("name", [name for name in CASES if "norm" in name])
def test_an_audit_of_a_mended_norm_finds_nothing(name):
    rewriting, build, _ = CASES[name]
    changed, _ = rewrite(build().eval(), rewriting)
    assert audit(nn.Sequential(nn.Conv2d(8, 8, 1), changed), images()).clean


@pytest.mark.parametrize("name", CASES)
def test_no_other_pass_takes_what_one_can_mend(name):
    _, build, layer = CASES[name]
    changed, _ = rewrite(build().eval(), *MENDING)
    assert any(isinstance(module, layer) for module in changed.modules())


# torch itself refuses these where there is no image.
REFUSED = {"shuffle by permute", "instance norm", "instance norm with statistics"}


@pytest.mark.parametrize("name", [n for n in CASES if "grid" not in n and n not in REFUSED])
def test_no_image_is_answered_as_torch_answers_it(name):
    rewriting, build, _ = CASES[name]
    model, x = build().eval(), images()[:0]
    changed, _ = rewrite(model, rewriting)
    assert outputs(changed, (x,)).shape == outputs(model, (x,)).shape


@pytest.mark.parametrize("name", [name for name in CASES if "statistics" not in name])
def test_a_mended_graph_scripts_and_copies(name):
    rewriting, build, _ = CASES[name]
    changed, _ = rewrite(build().eval(), rewriting)
    expected = outputs(changed, (images(),))
    for other in (script(changed), copy.deepcopy(changed)):
        assert torch.equal(outputs(other, (images(),)), expected)


@pytest.mark.parametrize("name", UNCHANGED)
def test_must_not_change(name):
    rewriting, build = UNCHANGED[name]
    model = build().eval()
    changed, [report] = rewrite(model, rewriting)
    assert not report.applied
    assert torch.equal(outputs(changed, (images(),)), outputs(model, (images(),)))


def test_a_cat_with_another_reader_stays_beside_the_shuffle():
    def run(x):
        joined = torch.cat((x[:, :4], x[:, 4:]), dim=1)
        return shuffle(joined) + joined

    changed, _ = rewrite(Block(lambda self, x: run(x)), mend_channel_shuffle)
    assert not any(isinstance(module, Interleave) for module in changed.modules())
    torch.testing.assert_close(outputs(changed, (images(),)), run(images()))


@pytest.mark.parametrize("joined", [False, True])
def test_what_was_shuffled_may_be_written_into_before_it_is_read(joined):
    def run(x):
        value = x * 1
        before = torch.cat((value[:, :4], value[:, 4:]), dim=1) if joined else value
        n, c, h, w = before.shape
        if joined:
            value.mul_(2)
        y = before.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous()
        value.mul_(3)
        return y.view(n, c, h, w) + value

    changed, [report] = rewrite(Block(lambda self, x: run(x)), mend_channel_shuffle)
    assert len(report.applied) == 1 + joined
    torch.testing.assert_close(outputs(changed, (images(),)), run(images().contiguous()))


def test_parts_of_different_widths_are_shuffled_right():
    def run(x):
        return shuffle(torch.cat((x[:, :2], x[:, 2:]), dim=1))

    changed, [report] = rewrite(Block(lambda self, x: run(x)), mend_channel_shuffle)
    assert len(report.applied) == 2
    assert torch.equal(outputs(changed, (images(),)), run(images().contiguous()))


def test_shufflenet_keeps_the_format_at_every_cat_and_shuffle():
    from nhwc import load_model

    model = random_(load_model("shufflenet_v2_x0_5"))
    changed, reports = rewrite(model, mend_channel_shuffle, mend_cat_format)
    assert len(reports[0].applied) == 32
    assert "torch.cat" not in changed.code
    seen = []
    for module in changed.modules():
        if isinstance(module, Interleave):
            module.register_forward_hook(lambda m, args, result: seen.append(format_of(result)))
    x = to_format(torch.randn(1, 3, 64, 64), Format.CHANNELS_LAST)
    torch.testing.assert_close(outputs(changed, (x,)), outputs(model, (x,)), rtol=1e-4, atol=1e-5)
    assert seen == [Format.CHANNELS_LAST] * 16


@pytest.mark.parametrize("norm", [nn.GroupNorm(2, 8), nn.InstanceNorm2d(8)])
def test_a_norm_with_a_forward_of_its_own_that_no_trace_takes_is_left(norm):
    def doubled(x):
        return type(norm).forward(norm, x) * (2 if x.isfinite().all() else 1)

    norm.forward = doubled
    model = nn.Sequential(norm).eval()
    changed, [*reports] = rewrite(model, mend_group_norm, mend_instance_norm)
    [site] = [site for report in reports for site in report.sites]
    assert (site.applied, site.reason) == (False, "it has hooks or a forward of its own")
    torch.testing.assert_close(outputs(changed, (images(),)), outputs(model, (images(),)))


def test_an_instance_norm_in_training_mode_with_statistics_is_left():
    model = nn.Sequential(nn.InstanceNorm2d(8, track_running_stats=True)).train()
    _, [report] = rewrite(model, mend_instance_norm)
    assert "training mode" in report.skipped[0].reason


@pytest.mark.parametrize("kind", [torch.float64, torch.float16, torch.bfloat16])
def test_an_instance_norm_with_statistics_alone_takes_other_types_as_torch_does(kind):
    norm = nn.InstanceNorm2d(8, affine=False, track_running_stats=True)
    nn.init.uniform_(norm.running_mean)
    nn.init.uniform_(norm.running_var, 0.5, 2)
    model = nn.Sequential(norm).eval()
    changed, _ = rewrite(model, mend_instance_norm)
    for x in (images().to(kind), images()[0].to(kind)):
        torch.testing.assert_close(outputs(changed, (x,)), outputs(model, (x,)))


@pytest.mark.parametrize("shape", [(2, 8, 24, 25), (2, 8, 5, 6, 20)], ids=["image", "volume"])
@pytest.mark.parametrize("norm", [nn.GroupNorm(2, 8), nn.InstanceNorm2d(8, affine=True)])
def test_norms_keep_their_digits_where_the_mean_is_large(norm, shape):
    kind = nn.InstanceNorm3d if len(shape) == 5 else nn.InstanceNorm2d
    norm = kind(8, affine=True) if not isinstance(norm, nn.GroupNorm) else norm
    model = nn.Sequential(norm).eval()
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2)) + 100
    last = to_format(x, CHANNELS_LAST_OF[x.ndim])
    truth = outputs(copy.deepcopy(model).double(), (x.double(),))
    changed, _ = rewrite(model, mend_group_norm, mend_instance_norm)
    result = outputs(changed, (last,))
    assert (result - truth).abs().max() < 2e-4
    assert format_of(result) is CHANNELS_LAST_OF[x.ndim]


def test_instance_norm_in_three_dimensions():
    model = nn.Sequential(nn.InstanceNorm3d(4, affine=True)).eval()
    x = to_format(torch.randn(2, 4, 3, 4, 5), Format.CHANNELS_LAST_3D)
    changed, _ = rewrite(model, mend_instance_norm)
    result = outputs(changed, (x,))
    assert format_of(result) is Format.CHANNELS_LAST_3D
    torch.testing.assert_close(result, outputs(model, (x,)), rtol=1e-4, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["zeros", "border"]),
    st.booleans(),
    st.integers(2, 5),
    st.integers(1, 5),
    st.integers(1, 5),
    st.sampled_from([0.5, 1.0, 3.0, 1e9, float("nan")]),
    st.integers(0, 99),
)
def test_grid_sample_agrees_with_torch(padding, corners, c, h, w, reach, seed):
    generator = torch.Generator().manual_seed(seed)
    x = to_format(torch.randn(2, c, h, w, generator=generator), Format.CHANNELS_LAST)
    grid = (torch.rand(2, 4, 3, 2, generator=generator) * 2 - 1) * (
        1 if math.isnan(reach) else reach
    )
    if math.isnan(reach):
        grid[0, 0, 0, 0] = reach
    expected = F.grid_sample(x, grid, "bilinear", padding, corners)
    ours = GridSample(padding, corners)(x, grid)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("padding", ["zeros", "border"])
@pytest.mark.parametrize("corners", [True, False])
def test_the_gradients_of_a_grid_on_the_border_are_torchs(padding, corners):
    x = images().to(memory_format=torch.channels_last)
    theta = torch.eye(2, 3).expand(2, 2, 3)
    grids = [F.affine_grid(theta, x.shape, corners).requires_grad_() for _ in range(2)]
    sampled = (
        F.grid_sample(x, grids[0], "bilinear", padding, corners),
        GridSample(padding, corners)(x, grids[1]),
    )
    torch.testing.assert_close(sampled[1], sampled[0], rtol=1e-4, atol=1e-5)
    edges = [
        torch.autograd.grad(y.sum(), grid)[0][:, 0, 0]
        for y, grid in zip(sampled, grids, strict=True)
    ]
    torch.testing.assert_close(edges[1], edges[0], rtol=1e-4, atol=1e-5)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.booleans(), st.integers(1, 3))
def test_shuffles_agree_with_torch(groups, inner, last, size):
    x = torch.randn(2, groups * inner, size, size)
    x = to_format(x, Format.CHANNELS_LAST) if last else x
    expected = F.channel_shuffle(x.contiguous(), groups)
    assert torch.equal(ChannelShuffle(groups)(x), expected)
    parts = list(x.chunk(groups, 1))
    assert torch.equal(Interleave()(parts), expected)
    assert torch.equal(Cat()(parts), x)
    # The views of a shuffle take images that end in sides of 1, as images without them.
    ended = x[..., None]
    assert torch.equal(ChannelShuffle(groups)(ended), expected)
    assert torch.equal(Interleave()(list(ended.chunk(groups, 1))), expected)


class _JoinsSlices(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, a, b):
        return torch.cat([a.narrow(1, 0, 2), b.narrow(1, 0, 2)], self.dim)


@pytest.mark.parametrize("dim", [1, -3])
@pytest.mark.parametrize("shape", [(4, 6, 6), (2, 4, 6, 6), (2, 4, 3, 6, 6)])
def test_a_cat_counted_from_the_end_joins_what_it_did(shape, dim):
    model, inputs = _JoinsSlices(dim).eval(), (torch.randn(shape), torch.randn(shape))
    for mended in (fuse(model, passes=PASSES), optimize(model, *inputs)):
        assert torch.equal(mended(*inputs), model(*inputs))
