"""Names that generated code cannot say, or that would be code in it."""

import copy
import pickle

import pytest
import torch
from torch import nn

import nhwc
from nhwc import fuse

from ..fusing import Block, fuse_checked, outputs, random_

X = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))

NAMES = [
    *("class", "in", "None", "True", "lambda", "print", "self", "torch", "input", "output"),
    *("0a", "9", "__x", "_", "a b", "a-b", 'a"b', "a'b", "a\\b", "a\nb", "\x00", "é", "日本"),
    *("\ufb01", "\U0001d431", "a\u2028b", "\ud800", "{x}", "a#b", "_tensor_constant0", "model"),
    *("graph", "code", "meta", "report", "recompile", "layer", "portable"),
]
INJECTED = '0"); raise SystemExit(3); ("'


def block():
    return nn.Sequential(nn.Conv2d(3, 3, 1, bias=False), nn.BatchNorm2d(3))


class Boxes(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name, self.parts = name, nn.ModuleDict({name: block(), "box": block()})

    def forward(self, x):
        return self.parts[self.name](x) + self.parts["box"](x)


class Direct(nn.Module):
    """The name is one of the model itself, where a GraphModule has names of its own."""

    def __init__(self, name):
        super().__init__()
        self.name = name
        self.add_module(name, block())

    def forward(self, x):
        return self._modules[self.name](x)


class Weights(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.name, self.conv = name, nn.Conv2d(3, 3, 1)
        self.register_parameter(name, nn.Parameter(torch.rand(3, 3, 1, 1)))
        self.register_buffer(f"{name}2", torch.rand(1, 3, 1, 1))

    def forward(self, x):
        weight, scale = self._parameters[self.name], self._buffers[f"{self.name}2"]
        return nn.functional.conv2d(self.conv(x), weight) * scale


class Branching(Boxes):
    def forward(self, x):
        y = super().forward(x)
        return y if y.sum() > -1e9 else y * 0


@pytest.mark.parametrize("kind", [Boxes, Direct, Weights, Branching])
@pytest.mark.parametrize("name", [*NAMES, INJECTED], ids=ascii)
def test_any_name_will_do(kind, name):
    model = random_(kind(name))
    fused = fuse_checked(model, X)
    for other in (copy.deepcopy(fused), fuse(fused)):
        torch.testing.assert_close(outputs(other, (X,)), outputs(fused, (X,)))
    if kind is not Branching:
        again = pickle.loads(pickle.dumps(fused))
        torch.testing.assert_close(outputs(again, (X,)), outputs(fused, (X,)))


@pytest.mark.parametrize("name", ["class", 'a"b', "graph"])
def test_they_can_be_saved(name, tmp_path):
    fused = fuse(random_(Direct(name)))
    nhwc.save(fused, tmp_path / "model.nhwc")
    loaded = nhwc.load(tmp_path / "model.nhwc")
    torch.testing.assert_close(outputs(loaded, (X,)), outputs(fused, (X,)))


def test_they_can_be_optimized():
    model = random_(Branching("class"))
    fast = nhwc.optimize(model, X)
    torch.testing.assert_close(outputs(fast, (X,)), outputs(model, (X,)), rtol=1e-4, atol=1e-4)


def test_reports_say_the_names_of_the_user():
    fused = fuse(random_(Boxes("class")))
    assert [site.where for site in fused.report.applied] == ["parts.class.1", "parts.box.1"]
    assert "parts.class_.0.weight" in fused.state_dict()
    assert "parts.box.0.weight" in fused.state_dict()


def test_names_that_are_taken_are_not_taken_twice():
    model = random_(Boxes("class"))
    model.parts["class_"] = block()
    model.forward = None
    del model.forward

    class Both(Boxes):
        def forward(self, x):
            return super().forward(x) + self.parts["class_"](x)

    model.__class__ = Both
    random_(model)
    torch.testing.assert_close(
        outputs(fuse(model), (X,)), outputs(model, (X,)), rtol=1e-4, atol=1e-4
    )


class Chain(nn.Module):
    """Parts and tensors whose names are alike once code can say them."""

    def __init__(self, names):
        super().__init__()
        self.chain = nn.Sequential()
        for place, name in enumerate(names):
            self.chain.add_module(name, block())
            self.add_module(f"{name}0", block())
            self.register_parameter(f"{name}1", nn.Parameter(torch.rand(3, 1, 1) + place))
            setattr(self, f"{name}2", torch.rand(3, 1, 1) + place)
        self.names = names

    def forward(self, x):
        x = self.chain(x)
        for name in self.names:
            x = self._modules[f"{name}0"](x) * self._parameters[f"{name}1"]
            x = x + getattr(self, f"{name}2")
        return x


@pytest.mark.parametrize(
    "names",
    [
        ('a"b', "a\nb", "a'b", "a\\b"),
        ("\u00b5", "\u2126"),
        ("class", "class_", "class__"),
        ("code",),
    ],
    ids=ascii,
)
def test_names_that_are_alike_stay_apart(names):
    model = random_(Chain(names))
    fused = fuse_checked(model, X)
    assert len(fused.report.applied) == 2 * len(names)
    again = fuse(fused)
    torch.testing.assert_close(outputs(again, (X,)), outputs(fused, (X,)))


ARGUMENTS = {
    "self": lambda this, self: this.conv(self),
    "torch": lambda this, torch: nn.functional.relu(this.conv(torch)).flatten(1),
    "getattr": lambda this, getattr: this.parts(getattr),
    "device": lambda this, device: this.conv(device).to(torch.device("cpu")),
    "input": lambda this, input: this.conv(input),
    "print": lambda this, print: this.conv(print),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_may_have_any_name(name):
    space = {"run": ARGUMENTS[name], "nn": nn}
    exec(f"class Named(nn.Module):\n  def forward(this, {name}): return run(this, {name})", space)
    model = space["Named"]()
    model.conv, model.parts = nn.Conv2d(3, 3, 1), block()
    fuse_checked(random_(model), X)


@pytest.mark.parametrize("name", ["a b", 'x"\n', "class", "x(nn.Module): pass\nraise SystemExit"])
def test_classes_may_have_any_name(name):
    kind = type(name, (Direct,), {})
    fused = fuse_checked(random_(kind("part")), X)
    torch.testing.assert_close(
        outputs(pickle.loads(pickle.dumps(fused)), (X,)), outputs(fused, (X,))
    )


class AnyNames(nn.Module):
    def forward(self, x, **named):
        return x * len(named) if x.sum() > -1e9 else x


def test_names_of_arguments_are_no_code():
    named = {"y=print('ran'), z": 1}
    model = Block(lambda self, x: self.part(self.c(x), **named), c=nn.Conv2d(3, 3, 1))
    model.part = AnyNames()
    fused = fuse_checked(model.eval(), X)
    assert "it passes an argument by the name" in fused.report.opaque[0].reason
