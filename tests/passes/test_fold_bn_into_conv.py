import copy
import operator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrize

from nhwc import fuse
from nhwc.models.vision import import_torchvision
from nhwc.passes._arithmetic import fold_after, fold_before, scale_and_shift

from ..fusing import Block, assert_same, fuse_checked, has_no_norm, norms, random_


def image(*shape):
    return torch.randn(*(shape or (2, 4, 9, 9)), generator=torch.Generator().manual_seed(1))


def conv():
    return nn.Conv2d(4, 6, 3)


def norm(features=6, **options):
    return nn.BatchNorm2d(features, **options)


class Scaled(nn.Conv2d):
    def forward(self, x):
        return super().forward(x) * 2


class Plain(nn.Conv2d):
    """A subclass that behaves as its parent."""


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 4, 3, 3))
        self.norm = nn.BatchNorm2d(6)

    def forward(self, x):
        n = self.norm
        y = F.conv2d(x, self.w, stride=2, padding=1)
        return F.batch_norm(y, n.running_mean, n.running_var, n.weight, n.bias, False, 0.1, n.eps)


class Standardized(nn.Conv2d):
    """A weight that is computed from a parameter, but from nothing else."""

    def forward(self, x):
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, weight, self.bias)


class Looped(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(3))

    def forward(self, x):
        for c, n in zip(self.convs, self.norms, strict=True):
            x = F.relu(n(c(x)), inplace=True)
        return x


def shared_head():
    """One convolution and one batch norm, both called on two inputs."""
    return Block(lambda self, x: self.n(self.c(x)) + self.n(self.c(x.flip(3))), c=conv(), n=norm())


def two_convs_one_norm():
    return Block(
        lambda self, x: self.n(self.c(x)) + self.n(self.d(x)), c=conv(), d=conv(), n=norm()
    )


def frozen():
    misc = import_torchvision().ops.misc
    model = nn.Sequential(conv(), misc.FrozenBatchNorm2d(6))
    for buffer in model[1].buffers():
        buffer.uniform_(0.6, 1.4)
    return model


def timm_norm():
    import_torchvision()  # timm imports it, and the two wheels may not match
    import timm.layers

    return nn.Sequential(conv(), timm.layers.BatchNormAct2d(6), nn.Dropout(0.5))


def without_bias():
    n = norm()
    n.bias = None
    return nn.Sequential(conv(), n)


def tied():
    model = nn.Sequential(nn.Conv2d(4, 4, 3), norm(4), nn.Conv2d(4, 4, 3))
    model[2].weight = model[0].weight
    return model


def mixed(layer, features, **options):
    kind = {3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[layer.weight.ndim]
    return nn.Sequential(layer, kind(features, **options))


MUST = {
    "before, its input overwritten": (
        lambda: Block(lambda self, x: _overwritten(self, x), n=norm(4), c=nn.Conv2d(4, 6, 3)),
        image(),
    ),
    "conv": (lambda: nn.Sequential(conv(), norm()), image()),
    "no bias in the conv": (lambda: mixed(nn.Conv2d(4, 6, 3, bias=False), 6), image()),
    "no affine": (lambda: nn.Sequential(conv(), norm(affine=False)), image()),
    "weight without bias": (without_bias, image()),
    "conv1d": (lambda: mixed(nn.Conv1d(4, 6, 3, groups=2), 6), image(2, 4, 9)),
    "conv3d": (lambda: mixed(nn.Conv3d(4, 6, 3), 6), image(2, 4, 5, 5, 5)),
    "groups": (lambda: mixed(nn.Conv2d(4, 8, 3, groups=4, padding=1), 8), image()),
    "transposed 1d": (lambda: mixed(nn.ConvTranspose1d(4, 6, 3, stride=2), 6), image(2, 4, 5)),
    "transposed": (lambda: mixed(nn.ConvTranspose2d(4, 6, 3, stride=2), 6), image()),
    "transposed groups": (lambda: mixed(nn.ConvTranspose2d(4, 6, 3, groups=2), 6), image()),
    "transposed 3d groups": (
        lambda: mixed(nn.ConvTranspose3d(4, 8, 2, groups=4, bias=False), 8),
        image(1, 4, 3, 3, 3),
    ),
    "padding mode": (
        lambda: mixed(nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), 6),
        image(),
    ),
    "sync": (
        lambda: nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(conv(), norm())),
        image(),
    ),
    "frozen": (frozen, image()),
    "timm's with activation": (timm_norm, image()),
    "functional": (Functional, image()),
    "subclass with the parent's forward": (lambda: nn.Sequential(Plain(4, 6, 3), norm()), image()),
    "subclass with its own weight": (lambda: nn.Sequential(Standardized(4, 6, 3), norm()), image()),
    "loop over a ModuleList": (Looped, image()),
    "dropout and identity between": (
        lambda: nn.Sequential(conv(), nn.Identity(), nn.Dropout2d(), norm()),
        image(),
    ),
    "its shape is read": (
        lambda: Block(lambda self, x: _with_shape(self.c(x), self.n), c=conv(), n=norm()),
        image(),
    ),
    "a constant is made of its bias": (
        lambda: Block(lambda self, x: self.n(self.c(x)) + self.c.bias.sum(), c=conv(), n=norm()),
        image(),
    ),
    "one norm after two convs": (two_convs_one_norm, image()),
    "both called twice": (shared_head, image()),
    "tied weights": (tied, image()),
    "norm before conv": (lambda: nn.Sequential(norm(4), conv()), image()),
    "norm before grouped conv": (
        lambda: nn.Sequential(norm(4), nn.Conv2d(4, 6, 3, groups=2, bias=False)),
        image(),
    ),
    "norm before a conv that pads by reflection": (
        lambda: nn.Sequential(norm(4), nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect")),
        image(),
    ),
}


def _overwritten(self, x):
    y = x * 1
    other = y.view(-1)
    normed = self.n(y)
    other.mul_(2)
    return self.c(normed) + y.sum()


def _with_shape(y, n):
    return n(y).reshape(y.shape[0], -1)


def test_a_forward_that_is_the_classs_own_is_none_set_from_outside():
    """As accelerate leaves it, when it takes its hooks off."""
    model = random_(nn.Sequential(nn.Sequential(conv(), norm()), nn.ReLU()))
    for part in model.modules():
        part.forward = part.forward
    model[0][0]._conv_forward = model[0][0]._conv_forward
    fused = fuse_checked(model, torch.randn(2, 4, 8, 8))
    assert has_no_norm(fused), fused.code
    assert not fused.report.opaque


@pytest.mark.parametrize("name", MUST)
def test_must_fold(name):
    build, x = MUST[name]
    torch.manual_seed(0)
    fused = fuse_checked(random_(build()), x)
    assert has_no_norm(fused), fused.code
    assert fused.report.applied
    assert not fused.report.skipped


def hooked(which):
    model = nn.Sequential(conv(), norm())
    model[which].register_forward_hook(lambda module, args, result: result * 2)
    return model


def spoiled(which):
    model = nn.Sequential(conv(), norm())
    old = model[which].forward
    model[which].forward = lambda x: old(x) * 2
    return model


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


def doubled(layer):
    parametrize.register_parametrization(layer, "weight", Doubled())
    return layer


def half_trained():
    model = random_(nn.Sequential(conv(), norm()))
    model[1].train()
    return model


def huge(*layers):
    model = nn.Sequential(*layers).half()
    with torch.no_grad():
        for layer in layers:
            layer.weight.fill_(100)
            if isinstance(layer, nn.BatchNorm2d):
                layer.running_var.fill_(1e-3)
    return model.eval()


def writing():
    def run(self, x):
        y = self.c(x)
        y.add_(1)
        return self.n(y)

    return Block(run, c=conv(), n=norm())


def setting():
    def run(self, x):
        y = self.c(x)
        y[:, :2] = 0
        return self.n(y)

    return Block(run, c=conv(), n=norm())


def two(forward, **parts):
    return lambda: Block(forward, **{name: part() for name, part in parts.items()})


MUST_NOT = {
    "another user of the conv": (
        two(lambda self, x: self.n(self.c(x)) + (x.mean() * self.c.bias).sum(), c=conv, n=norm),
        "also read",
    ),
    "the conv's output is used besides": (
        two(lambda self, x: _twice(self.c(x), self.n), c=conv, n=norm),
        "also used by",
    ),
    "conv called on a path without norm": (
        two(lambda self, x: self.n(self.c(x)) + self.c(x + 1), c=conv, n=norm),
        "called at 2 sites",
    ),
    "conv called before two norms": (
        two(lambda self, x: self.n(self.c(x)) + self.m(self.c(x + 1)), c=conv, n=norm, m=norm),
        "called at 2 sites",
    ),
    "conv called behind a norm and by itself": (
        two(lambda self, x: self.c(self.n(x)) + self.c(x + 1), c=conv, n=lambda: norm(4)),
        "called at 2 sites",
    ),
    "no running statistics": (
        lambda: nn.Sequential(conv(), norm(track_running_stats=False)),
        "running statistics",
    ),
    "hook on the conv": (lambda: hooked(0), "hooks"),
    "hook on the norm": (lambda: hooked(1), "hooks"),
    "parametrized by code of the user's": (
        lambda: nn.Sequential(doubled(conv()), norm()),
        "parametrization",
    ),
    "written in place between": (writing, "comes from add_()"),
    "assigned to between": (setting, "comes from slice_scatter()"),
    "user code between": (lambda: nn.Sequential(Scaled(4, 6, 3), norm()), "not from a conv"),
    "norm before zero padding": (
        lambda: nn.Sequential(norm(4), nn.Conv2d(4, 6, 3, padding=1)),
        "pads with zeros",
    ),
    "norm before zeros that keep the size": (
        lambda: nn.Sequential(norm(4), nn.Conv2d(4, 6, 3, padding="same")),
        "pads with zeros",
    ),
    "norm before a transposed conv": (
        lambda: nn.Sequential(norm(4), nn.ConvTranspose2d(4, 6, 3)),
        "transposed",
    ),
    "activation between": (lambda: nn.Sequential(conv(), nn.ReLU(), norm()), "not from a conv"),
}


def _twice(y, n):
    return n(y) + y


@pytest.mark.parametrize("name", MUST_NOT)
def test_must_not_fold(name):
    build, reason = MUST_NOT[name]
    torch.manual_seed(0)
    fused = fuse_checked(random_(build()), image())
    assert not fused.report.applied
    assert all(reason in site.reason for site in fused.report.skipped), fused.report.skipped
    assert fused.report.skipped
    assert norms(fused)


def test_a_forward_set_on_the_instance_is_kept():
    fused = fuse_checked(random_(spoiled(0)), image())
    assert not fused.report.applied
    assert fused.report.skipped


def test_a_batch_norm_that_is_called_by_a_forward_set_on_it_is_folded_and_the_rest_is_kept():
    fused = fuse_checked(random_(spoiled(1)), image())
    assert len(fused.report.applied) == 1
    assert any(node.target is operator.mul for node in fused.graph.nodes)


def test_training_mode_is_left_alone_with_the_reason():
    model = nn.Sequential(conv(), norm()).train()
    fused = fuse_checked(model, image())
    assert fused.training
    assert "training mode: call model.eval()" in fused.report.skipped[0].reason
    one, other = model(image()), fused(image())
    torch.testing.assert_close(one, other)
    torch.testing.assert_close(fused.state_dict()["1.running_mean"], model[1].running_mean)


def test_only_the_norm_in_training_mode():
    fused = fuse_checked(half_trained(), image())
    assert "training mode" in fused.report.skipped[0].reason


def tiny():
    model = huge(conv(), norm())
    with torch.no_grad():
        model[0].weight.normal_(0, 0.02, generator=torch.Generator().manual_seed(0))
        model[1].weight.fill_(1e-6)
    return model


@pytest.mark.parametrize(
    "build", [lambda: huge(conv(), norm()), lambda: huge(norm(4), conv()), tiny]
)
def test_folded_weights_that_lose_their_digits_are_not_taken(build):
    fused = fuse_checked(build(), image().half())
    assert "do not fit torch.float16" in fused.report.skipped[0].reason


@pytest.mark.parametrize(
    ("layers", "reason"),
    [
        ((conv(), norm(1)), "1 features do not fit 6 output channels"),
        ((norm(1), conv()), "1 features, 4 input channels"),
    ],
)
def test_what_torch_refuses_for_its_channels_is_folded_into_no_answer(layers, reason):
    fused = fuse(nn.Sequential(*layers).eval())
    assert reason in fused.report.skipped[0].reason
    with pytest.raises(RuntimeError, match="running_mean"):
        fused(image())


def test_a_convolution_whose_weight_is_computed_is_told_as_one():
    block = Block(lambda self, x: self.n(F.conv2d(x, self.c.weight * x.mean())), c=conv(), n=norm())
    fused = fuse_checked(block, image())
    assert fused.report.skipped[0].reason == (
        "a weight or an argument of conv2d() is computed while the model runs"
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_conv_keeps_its_dtype_beside_a_float32_norm(dtype):
    model = random_(nn.Sequential(nn.Conv2d(4, 6, 3, bias=False), norm()))
    model[0].to(dtype)
    assert {p.dtype for p in fuse(model).parameters()} == {dtype}
    whole = fuse(model.to(dtype))
    assert {p.dtype for p in whole.parameters()} == {dtype}
    exact = copy.deepcopy(model).double()(image().double())
    torch.testing.assert_close(whole(image().to(dtype)).double(), exact, rtol=0.02, atol=0.02)


def test_low_precision_folding_is_as_good_as_no_folding():
    """Folded in float64 and rounded once, bfloat16 weights lose no more than they had lost."""
    exact = random_(nn.Sequential(nn.Conv2d(16, 16, 3, bias=False), norm(16)))
    low = copy.deepcopy(exact).bfloat16()
    x = image(4, 16, 12, 12).bfloat16()
    fused = fuse(low)
    truth = copy.deepcopy(low).double()(x.double())
    error = (fused(x).double() - truth).norm()
    assert error <= 2 * (low(x).double() - truth).norm()


def test_channels_last_weights_stay_channels_last():
    model = random_(mixed(nn.ConvTranspose2d(4, 6, 3, groups=2), 6))
    model.to(memory_format=torch.channels_last)
    fused = fuse_checked(model, image())
    weight = next(fused.parameters())
    assert weight.is_contiguous(memory_format=torch.channels_last)


def test_folding_does_not_touch_the_tied_copy():
    model = random_(tied())
    fused = fuse_checked(model, image())
    assert "tied to 2" in fused.report.applied[0].reason
    assert torch.equal(fused.get_submodule("2").weight, model[2].weight)


def test_requires_grad_is_kept():
    model = random_(nn.Sequential(conv(), norm()))
    model.requires_grad_(False)
    assert not any(p.requires_grad for p in fuse_checked(model, image()).parameters())


counts = st.integers(1, 4)


@settings(max_examples=40, deadline=None)
@given(
    groups=counts,
    inner=counts,
    outer=counts,
    kernel=st.integers(1, 3),
    bias=st.booleans(),
    transposed=st.booleans(),
    affine=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_folding_after_is_exact(groups, inner, outer, kernel, bias, transposed, affine, seed):
    torch.manual_seed(seed)
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    layer = kind(groups * inner, groups * outer, kernel, groups=groups, bias=bias).double()
    after = random_(nn.BatchNorm2d(groups * outer, affine=affine), seed).double()
    x = torch.randn(2, groups * inner, 5, 6, dtype=torch.float64)
    folded = fold_after(layer, *scale_and_shift(after))
    torch.testing.assert_close(folded(x), after(layer(x)), rtol=1e-9, atol=1e-11)


@settings(max_examples=40, deadline=None)
@given(groups=counts, inner=counts, outer=counts, kernel=st.integers(1, 3), seed=counts)
def test_folding_before_is_exact_without_padding(groups, inner, outer, kernel, seed):
    torch.manual_seed(seed)
    layer = nn.Conv2d(groups * inner, groups * outer, kernel, groups=groups).double()
    before = random_(nn.BatchNorm2d(groups * inner), seed).double()
    x = torch.randn(2, groups * inner, 5, 6, dtype=torch.float64)
    folded = fold_before(layer, *scale_and_shift(before))
    torch.testing.assert_close(folded(x), layer(before(x)), rtol=1e-9, atol=1e-11)


def test_the_helper_that_compares_can_fail():
    model = random_(nn.Sequential(conv(), norm()))
    with pytest.raises(AssertionError):
        assert_same(model, model[0], image())
