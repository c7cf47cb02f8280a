"""Odd but legal models: each is right, or is refused in a line."""

import collections
import functools
import re
import threading
import types
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import nhwc
from nhwc import InputError, fuse, optimize

from ..fusing import assert_same, fuse_checked, has_no_norm, outputs, random_

X = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))
THREE = torch.tensor(3.0)
Pair = collections.namedtuple("Pair", "first second")


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 3, 3, bias=False), nn.BatchNorm2d(3), nn.ReLU())
        self.set_up()

    def set_up(self):
        pass

    def forward(self, x):
        return self.body(x)


def odd(forward, set_up=lambda self: None, **more):
    return type("Odd", (Base,), {"forward": forward, "set_up": set_up, **more})


class Slotted(Base):
    __slots__ = ("factor",)

    def set_up(self):
        self.factor = 2

    def forward(self, x):
        return self.body(x) * self.factor


class CopiesTrain(Base):
    """Its copies train, as those of torchvision's feature extractors."""

    def __deepcopy__(self, memo):
        again = CopiesTrain()
        again.load_state_dict(self.state_dict())
        return again


class OwnCall(Base):
    def __call__(self, x):
        return super().__call__(x) * 3


class Branching(nn.Module):
    def forward(self, x):
        return x + 1 if x.sum() > -1e9 else x


class OwnForward(Base):
    def set_up(self):
        self.forward = lambda x: self.body(x) * 2


class HookOnItself(Base):
    """Its hook is a function that encloses the model."""

    def set_up(self):
        self.seen = []
        self.body.register_forward_hook(lambda m, i, o: self.seen.append(o))

    def forward(self, x):
        self.seen.clear()
        return self.body(x) + len(self.seen)


def in_place(self, x):
    x.mul_(2)
    return self.body(x)


def anchored(self, x):
    y = self.body(x)
    if self.shape != y.shape:
        self.shape, self.anchors = y.shape, torch.arange(y.shape[-1]).float()
    return y + self.anchors


def remembered(self, x):
    self.mean.copy_(x.mean((0, 2, 3)))
    return self.body(x) * self.mean.sum() - self.mean.clone().view(1, -1, 1, 1)


def trained_for_a_while(self, x):
    self.norm.train()
    y = self.norm(self.body(x))
    self.norm.eval()
    return y


def doubled(forward):
    @functools.wraps(forward)
    def call(self, *args, **kwargs):
        return forward(self, *args, **kwargs) * 2

    return call


MODELS = {
    "any number": odd(lambda self, *xs: self.body(xs[0]) + len(xs)),
    "any names": odd(lambda self, *xs, **more: self.body(xs[0]) + len(more)),
    "keyword": odd(lambda self, x, *, scale=2.0: self.body(x) * scale),
    "default tensor": odd(lambda self, x, m=THREE: self.body(x) * m),
    "first is None": odd(lambda self, x=None, y=None: self.body(x) if y is None else y),
    "returns None": odd(lambda self, x: None),
    "returns a number": odd(lambda self, x: 3),
    "returns its input": odd(lambda self, x: (x, self.body(x), x)),
    "returns a named tuple": odd(lambda self, x: Pair(self.body(x), None)),
    "twice": odd(
        lambda self, x: self.body(x) + self.again(x), lambda self: setattr(self, "again", self.body)
    ),
    "knows itself": odd(
        lambda self, x: self.me[0].body(x), lambda self: setattr(self, "me", [self])
    ),
    "weakly": odd(
        lambda self, x: self.to_body()(x),
        lambda self: setattr(self, "to_body", weakref.ref(self.body)),
    ),
    "numpy": odd(
        lambda self, x: self.body(x) * torch.from_numpy(self.n),
        lambda self: setattr(self, "n", np.full(4, 2, dtype=np.float32)),
    ),
    "partial": odd(
        lambda self, x: self.f(self.body(x)),
        lambda self: setattr(self, "f", functools.partial(F.interpolate, scale_factor=2)),
    ),
    "bound forward": odd(
        None,
        lambda self: setattr(self, "forward", types.MethodType(lambda me, x: me.body(x) * 2, self)),
    ),
    "inference mode": odd(torch.inference_mode()(lambda self, x: self.body(x))),
    "no grad": odd(torch.no_grad()(lambda self, x: self.body(x))),
    "random": odd(lambda self, x: self.body(x) + 0 * torch.rand(1)),
    "anchors": odd(anchored, lambda self: self.__dict__.update(shape=None, anchors=None)),
    "writes into its input": odd(in_place),
    "writes into a buffer and reads it": odd(
        remembered, lambda self: self.register_buffer("mean", torch.ones(3))
    ),
    "sets a mode": odd(trained_for_a_while, lambda self: setattr(self, "norm", nn.BatchNorm2d(3))),
    "decorated keyword": odd(doubled(lambda self, x, *, scale=2.0: self.body(x) * scale)),
    "slots": Slotted,
    "own call": OwnCall,
    "own forward": OwnForward,
    "hook on itself": HookOnItself,
}


@pytest.mark.parametrize("name", MODELS)
def test_odd_models(name):
    model = random_(MODELS[name]())
    fused = fuse(model)
    ours, theirs = outputs(fused, (X,)), outputs(model, (X,))
    assert type(ours) is type(theirs)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def with_own_call(kind, *args, hook=False, **kwargs):
    """A layer whose class has a `__call__`, in a model whose code can be traced."""

    def call(self, *given):
        return 2 * super(type(self), self).__call__(*given)

    def set_up(self):
        self.layer = type("Own", (kind,), {"__call__": call})(*args, **kwargs)
        if hook:
            self.layer.register_forward_hook(lambda module, given, result: result + 1)

    return odd(lambda self, x: self.body(self.layer(x)), set_up)


OWN_CALLS = {
    "convolution": with_own_call(nn.Conv2d, 3, 3, 1),
    "batch norm": with_own_call(nn.BatchNorm2d, 3),
    "activation": with_own_call(nn.ReLU),
    "identity": with_own_call(nn.Identity),
    "linear": with_own_call(nn.Linear, X.shape[-1], X.shape[-1]),
    "group norm": with_own_call(nn.GroupNorm, 3, 3),
    "layer norm": with_own_call(nn.LayerNorm, X.shape[-1]),
    "softmax": with_own_call(nn.Softmax, 1),
    "hooked": with_own_call(nn.Sequential, nn.Conv2d(3, 3, 1), hook=True),
    "branching": with_own_call(Branching),
}


@pytest.mark.parametrize("name", OWN_CALLS)
def test_a_call_of_its_own_runs_once(name):
    model = random_(OWN_CALLS[name]())
    assert_same(model, fuse(model), X)
    assert_same(model, optimize(model, X), X)


def test_a_copied_forward_runs_with_the_weights_of_the_copy():
    model = random_(OwnForward())
    fused, before = fuse(model), outputs(model, (X,))
    nn.init.zeros_(model.body[0].weight)
    torch.testing.assert_close(outputs(fused, (X,)), before, rtol=1e-4, atol=1e-4)


class Scaled(Base):
    """A call of it takes more than its forward does."""

    def __call__(self, x, *, by, plus=0.0):
        return super().__call__(x) * by + plus


class ScaledInOrder(Scaled):
    def __call__(self, x, by, plus=0.0):
        return super().__call__(x, by=by, plus=plus)


def test_a_call_that_takes_more_than_forward():
    model = random_(Scaled())
    torch.testing.assert_close(fuse(model)(X, by=2.0, plus=1), model(X, by=2.0, plus=1))
    model = random_(ScaledInOrder())
    for more in ((2.0,), (2.0, 1.0), (torch.tensor(3.0),)):
        assert_same(model, fuse(model), X, *more)
        assert_same(model, optimize(model, X, *more), X, *more)


class NotCopied(Base):
    def __deepcopy__(self, memo):
        return self


class Locked(Base):
    def set_up(self):
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    ("kind", "says"), [(NotCopied, "returns the module itself"), (Locked, "cannot copy the Locked")]
)
def test_what_cannot_be_copied_is_refused(kind, says):
    model = random_(kind())
    for verb in (fuse, lambda model: optimize(model, X)):
        with pytest.raises(InputError, match=re.escape(says)):
            verb(model)
    assert model.body[0].weight.dtype == torch.float32


class Overruled(Base):
    """Its author has another way for tracers, and it is broken."""

    def forward(self, x):
        return x @ self.body(x) if isinstance(x, torch.fx.Proxy) else self.body(x)


def test_a_graph_that_cannot_run_is_not_used():
    model = random_(Overruled())
    fast = optimize(model, X)
    assert "a graph of it fails where it does not" in fast.report.opaque[0].reason
    assert_same(model, fast, X)


@pytest.mark.parametrize("run", [False, True])
def test_models_made_in_inference_mode(run):
    with torch.inference_mode():
        model = random_(Base())
        if run:
            model(X)
    assert has_no_norm(fuse_checked(model, X))
    assert_same(model, optimize(model, X), X)
    with torch.inference_mode():
        assert_same(model, fuse(model), X)
        assert_same(model, optimize(model, X), X)


class Several(Base):
    def forward(self, x, *, scale=2):
        return {"a": self.body(x) * scale, "b": [x, None]}


@pytest.mark.filterwarnings("ignore:`isinstance.treespec")
@pytest.mark.parametrize("kind", [Base, Several])
def test_exported_programs_are_folded(kind):
    model = random_(kind())
    exported = torch.export.export(model, (X,)).module()
    fused = fuse(exported)
    assert [site.applied for site in fused.report.sites] == [True]
    assert "batch_norm" not in fused.code
    assert_same(model, fused, X)
    assert_same(model, nhwc.optimize(exported, X), X)


def test_a_copy_that_trains_of_a_model_that_does_not():
    model = random_(CopiesTrain()).eval()
    fused = fuse(model)
    assert not any(part.training for part in fused.modules())
    assert has_no_norm(fused)
    for result in (fused, optimize(model, X)):
        torch.testing.assert_close(result(X), model(X), rtol=1e-4, atol=1e-5)
    nhwc.audit(model, X)


class HoldsAList(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.layers = nn.BatchNorm2d(3), [nn.Conv2d(3, 4, 1)]

    def forward(self, x):
        return self.layers[0](self.norm(x))


def test_a_part_that_is_not_registered_is_said_to_be_none():
    (opaque,) = nhwc.fuse(HoldsAList().eval()).report.opaque
    assert opaque.reason.startswith("it calls a module that is no registered part of it")
