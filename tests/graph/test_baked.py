"""Tensors that torch's own code computes at each call are computed once."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import nhwc
from nhwc.graph.tracing.baked import bake_weights

from ..optimizing import won_by


def by_hooks(wrap):
    def wrapped(layer):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return wrap(layer)

    return wrapped


KINDS = {
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "two of them": lambda layer: parametrizations.weight_norm(
        parametrizations.spectral_norm(layer), "bias", dim=None
    ),
    "weight norm by hooks": by_hooks(torch.nn.utils.weight_norm),
    "spectral norm by hooks": by_hooks(torch.nn.utils.spectral_norm),
    "pruned": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "pruned twice": lambda layer: prune.random_unstructured(
        prune.l1_unstructured(layer, "weight", 0.5), "bias", 0.5
    ),
    "pruned further": lambda layer: prune.random_unstructured(
        prune.l1_unstructured(layer, "weight", 0.2), "weight", 0.5
    ),
}

X = torch.rand(2, 3, 8, 8)


class Net(nn.Module):
    @torch.no_grad()
    def __init__(self, wrap):
        super().__init__()
        self.a, self.bn, self.b = wrap(nn.Conv2d(3, 4, 3)), nn.BatchNorm2d(4), wrap(nn.Linear(4, 4))
        self.bn.running_mean.uniform_()
        self.bn.running_var.uniform_(0.5, 2)
        self(X)  # Spectral norms get their vectors.
        self.eval()

    def forward(self, x):
        return self.b(self.bn(self.a(x)).mean((2, 3)))


def state_of(model):
    """The classes, names and values of all parts, and what they answer."""
    kinds = [(name, type(part), [*part._forward_pre_hooks]) for name, part in model.named_modules()]
    return kinds, {name: value.clone() for name, value in model.state_dict().items()}, model(X)


def assert_untouched(model, before):
    kinds, state, answer = state_of(model)
    assert kinds == before[0]
    torch.testing.assert_close(state, before[1], rtol=0, atol=0)
    assert torch.equal(answer, before[2])


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_of_a_computed_weight_is_folded(kind):
    model = Net(KINDS[kind])
    before = state_of(model)
    fused = nhwc.fuse(model)
    assert not fused.report.opaque
    assert [site.what for site in fused.report.applied] == ["a + bn"]
    assert {site.where for site in fused.report.passes[0].applied} == {"a", "b"}
    torch.testing.assert_close(fused(X), before[2])
    assert {name for name, _ in fused.named_parameters()} == {
        *("a.weight", "a.bias", "b.weight", "b.bias")
    }
    assert all(parameter.requires_grad for parameter in fused.parameters())
    assert_untouched(model, before)


@pytest.mark.parametrize("kind", ["weight norm", "spectral norm by hooks", "pruned"])
def test_a_model_of_computed_weights_is_saved(kind, tmp_path):
    model = Net(KINDS[kind])
    before = state_of(model)
    fast = nhwc.optimize(model, X)
    assert fast.report.passes[0].name == "bake_weights"
    nhwc.save(fast, tmp_path / "net.nhwc")
    torch.testing.assert_close(nhwc.load(tmp_path / "net.nhwc")(X), before[2])
    assert_untouched(model, before)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_returned_takes_its_own_state(kind):
    model = Net(KINDS[kind])
    before, other = state_of(model), nhwc.fuse(Net(KINDS[kind]))
    for made in (nhwc.fuse(model), won_by("graph", model, X).portable):
        made.load_state_dict(made.state_dict())
        torch.testing.assert_close(made(X), before[2])
    made.load_state_dict(other.state_dict())
    torch.testing.assert_close(made(X), other(X))
    model.load_state_dict(before[1])
    assert_untouched(model, before)


@pytest.mark.parametrize("kind", KINDS)
def test_the_weight_is_to_the_bit_what_the_layer_computes(kind):
    model = Net(KINDS[kind])
    baked = copy.deepcopy(model)
    with torch.no_grad():
        assert bake_weights(baked).applied
    assert torch.equal(baked(X), model(X))


def test_frozen_weights_stay_frozen():
    for kind in ("weight norm", "weight norm by hooks", "pruned"):
        model = Net(KINDS[kind]).requires_grad_(False)
        assert not any(p.requires_grad for p in nhwc.fuse(model).parameters())


def test_a_parametrized_buffer_becomes_a_buffer():
    part = nn.BatchNorm2d(2).eval()
    part.running_mean.fill_(3)
    parametrize.register_parametrization(
        part, "running_mean", parametrizations._WeightNorm(0), unsafe=True
    )
    part.parametrizations.eval()
    expected = part.running_mean.clone()
    assert bake_weights(part).applied
    assert torch.equal(dict(part.named_buffers())["running_mean"], expected)


class Doubled(nn.Module):
    def forward(self, weight):
        return weight * 2


def own_code(layer):
    parametrize.register_parametrization(layer, "weight", Doubled())
    return layer


def watched(layer):
    layer = KINDS["weight norm by hooks"](layer)
    layer.register_forward_pre_hook(lambda layer, args: print(layer.weight_g.shape))
    return layer


def pruned_when_normed(layer):
    layer = KINDS["spectral norm by hooks"](layer)
    layer.register_forward_pre_hook(next(iter(layer._forward_pre_hooks.values())))
    return layer


@pytest.mark.parametrize("wrap", [own_code, watched, pruned_when_normed])
def test_what_others_compute_stays(wrap):
    with torch.no_grad():
        model = Net(wrap)
        expected = model(X)
        fused = nhwc.fuse(model)
        torch.testing.assert_close(fused(X), expected)
    assert fused.report.passes[0].name != "bake_weights"


def test_a_layer_that_trains_stays():
    model = Net(KINDS["spectral norm"])
    model.a.train()
    [site] = nhwc.fuse(model).report.passes[0].sites
    assert site.where == "b"


class Reads(Net):
    def forward(self, x):
        return super().forward(x) + self.a.weight_g.sum()


class Asks(Net):
    def forward(self, x):
        y = super().forward(x)
        return y * 2 if parametrize.is_parametrized(self.a) else y


class Counts(Net):
    def forward(self, x):
        return super().forward(x) * len(list(self.parameters()))


@pytest.mark.parametrize(
    ("model", "kind", "why"),
    [
        (Reads, "weight norm by hooks", "it reads weight_g"),
        (Asks, "weight norm", "it reads is_parametrized"),
        (Counts, "weight norm", "it looks through its parts"),
    ],
)
def test_code_that_reads_what_a_weight_is_made_of_keeps_it(model, kind, why):
    net = model(KINDS[kind])
    with torch.no_grad():
        expected = net(X)
        fused = nhwc.fuse(net)
        torch.testing.assert_close(fused(X), expected)
        torch.testing.assert_close(nhwc.optimize(net, X)(X), expected)
    sites = fused.report.passes[0].sites
    assert not any(site.applied for site in sites)
    assert all(why in site.reason for site in sites)
