"""Code that would notice a graph in the place of one of its parts, or that watches them run.

Each net branches on data, so that its code stays, and tells more of its parts than calling them.
"""

import copy
import functools
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import nhwc
from nhwc import fuse
from nhwc.graph import capture_closed, graphs
from nhwc.graph.tracing.sized import capture_sized

from ..fusing import outputs, random_

X = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def decided(y):
    return y if y.sum() > -1e9 else y * 0


class Part(nn.Module):
    out_channels = 3

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3, padding=1, bias=False), nn.BatchNorm2d(3)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x)))

    def doubled(self, x):
        return self.norm(self.conv(x)) * 2


class Shell(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = Part()
        self.parts = nn.ModuleList([Part(), Part()])
        self.head = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))


class CountsByClass(Shell):
    def forward(self, x):
        return decided(self.part(x)) * sum(isinstance(m, Part) for m in self.modules())


class CountsByName(Shell):
    def forward(self, x):
        names = [type(m).__name__ for m in self.children()]
        return decided(self.part(x)) * names.count("Part")


class CountsTensors(Shell):
    def forward(self, x):
        return decided(self.part(x)) * len(list(self.parameters()))


class SumsBuffers(Shell):
    def forward(self, x):
        return decided(self.part(x)) * sum(b.sum() for b in self.buffers())


class ReadsAttribute(Shell):
    def forward(self, x):
        return decided(self.part(x)) * self.part.out_channels


class ReadsWeight(Shell):
    def forward(this, x):  # noqa: N805
        return decided(this.part(x)) * this.part.conv.weight.mean()


class ReadsByName(Shell):
    def forward(self, x):
        return decided(self.part(x)) * getattr(self.part, "out_channels", 7)


class ReadsByMadeUpName(Shell):
    def forward(self, x):
        return decided(self.part(x)) * getattr(self, "pa" + "rt").out_channels


class CountsByMadeUpName(Shell):
    def forward(self, x):
        return decided(self.part(x)) * getattr(self, "count" + "_all")()

    def count_all(self):
        return sum(isinstance(one, Part) for one in self.modules())


class CountsTensorsByMadeUpName(Shell):
    def forward(self, x):
        return decided(self.part(x)) * len(list(getattr(self, f"par{'ameters'}")()))


class ReadsPropertyByMadeUpName(Shell):
    @property
    def width(self):
        return next(one.out_channels for one in self.children())

    def forward(self, x):
        return decided(self.part(x)) * getattr(self, "wid%s" % "th")  # noqa: UP031


class ReadsByPath(Shell):
    def forward(self, x):
        return decided(self.part(x)) * self.get_submodule("part.norm").eps


class ReadsOtherName(Shell):
    def forward(self, x):
        part = self.part
        return decided(part(x)) * part.out_channels


class ReadsInLoop(Shell):
    def forward(self, x):
        for part in self.parts:
            x = part(x) * part.out_channels
        return decided(x)


class AsksInLoop(Shell):
    def forward(self, x):
        for part in self.parts:
            x = part.doubled(x) if hasattr(part, "doubled") else part(x)
        return decided(x)


class CallsMethod(Shell):
    def forward(self, x):
        return decided(self.part.doubled(x))


class CallsForward(Shell):
    def forward(self, x):
        return decided(self.part.forward(x))


class Checkpoints(Shell):
    def forward(self, x):
        return decided(checkpoint(self.part, x, use_reentrant=False))


class Compares(Shell):
    def __init__(self):
        super().__init__()
        self.same = [self.part]

    def forward(me, x):  # noqa: N805
        return decided(me.part(x)) * (2 if me.same[0] is me.part else 3)


class Chooses(Shell):
    def forward(self, x):
        return (self.part if x.sum() > -1e9 else self.head)(x)


class InProperty(Shell):
    @property
    def width(self):
        return self.part.out_channels

    def forward(self, x):
        return decided(self.part(x)) * self.width


class InLambda(Shell):
    forward = lambda s, x: decided(s.part(x)) * s.part.out_channels


class FallsThrough(Shell):
    """What it has not, its part has."""

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("part"), name)

    def forward(self, x):
        return decided(self.part(x)) * self.out_channels


class Hooks(Shell):
    def forward(self, x):
        seen = []
        handle = self.part.register_forward_hook(lambda m, i, o: seen.append(o))
        y = decided(self.part(x))
        handle.remove()
        return y + seen[0]


class Patches(Shell):
    def forward(self, x):
        seen, own = [], self.part.forward

        def noted(*args):
            seen.append(own(*args))
            return seen[-1]

        self.part.forward = noted
        y = decided(self.part(x))
        del self.part.forward
        return y, tuple(seen)


def recorded(forward):
    """What transformers does: the outputs of all layers of a kind, by hooks, while they run."""

    @functools.wraps(forward)
    def wrapper(self, *args, **kwargs):
        seen, handles = [], []
        for module in self.modules():
            if isinstance(module, Part):
                hook = lambda m, i, o: seen.append(o)
                handles.append(module.register_forward_hook(hook))
        result = forward(self, *args, **kwargs)
        for handle in handles:
            handle.remove()
        return result, tuple(seen)

    return wrapper


def recorded_by_star(forward):
    inner = recorded(forward)

    @functools.wraps(forward)
    def wrapper(*args):
        return inner(*args)

    return wrapper


class Recorded(Shell):
    @recorded
    def forward(self, x):
        return decided(self.parts[1](self.parts[0](self.part(x))))


class RecordedByStar(Shell):
    @recorded_by_star
    def forward(self, x):
        return decided(self.parts[1](self.parts[0](self.part(x))))


class RecordedStraight(Shell):
    """Without a branch: the trace itself would run the hooks that are set."""

    @recorded
    def forward(self, x):
        return self.part(Chooses.forward(self, x))


class RecordsOpaque(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Chooses()

    def forward(self, x):
        seen = []
        handles = [
            m.register_forward_hook(lambda m, i, o: seen.append(o))
            for m in self.modules()
            if isinstance(m, Part)
        ]
        y = self.inner(x)
        for handle in handles:
            handle.remove()
        return y, tuple(seen)


class HandsItself(Shell):
    """To an object whose code is not followed."""

    counter = types.SimpleNamespace(count=lambda model: len(list(model.modules())))

    def forward(self, x):
        return decided(self.part(x)) * self.counter.count(self)


class RecordsOnce(nn.Module):
    """Sets its hooks in the first call, for good, as newer transformers do."""

    def __init__(self):
        super().__init__()
        self.inner, self.seen = Chooses(), []

    def forward(self, x):
        self.seen.clear()
        if not self.inner.part._forward_hooks:
            for module in self.modules():
                if isinstance(module, Part):
                    module.register_forward_hook(self.note)
        return self.inner(x), len(self.seen)

    def note(self, module, args, result):
        self.seen.append(result)


class Inherits(Compares):
    def forward(self, x):
        return super().forward(x) * self.part.out_channels


def with_hidden(forward):
    """Adds an argument by its name, as the backbones of transformers have it."""

    @functools.wraps(forward)
    def wrapper(self, *args, **kwargs):
        kwargs["hidden"] = True
        return forward(self, *args, **kwargs)[0]

    return wrapper


class AddsArgument(Shell):
    @with_hidden
    def forward(self, x, scale=2.0, hidden=False):
        y = decided(self.part(x)) * scale
        return (y, x) if hidden else y


def by_setting(forward):
    """Gives what `config` has, unless the caller names it, and has the rest computed always."""

    @functools.wraps(forward)
    def wrapper(self, *args, **kwargs):
        wanted = kwargs.get("hidden", self.config["hidden"])
        kwargs["hidden"] = True
        result = forward(self, *args, **kwargs)
        return result if wanted else result[:1]

    return wrapper


# Decorators of that package are believed to say no more than how results are returned.
of_transformers = types.FunctionType(
    by_setting.__code__, {"functools": functools, "__name__": "transformers.backbone_utils"}
)


class AsSet(Shell):
    def __init__(self, hidden):
        super().__init__()
        self.config = {"hidden": hidden}

    @of_transformers
    def forward(self, x, hidden=None, scale=None):
        y = decided(self.part(x)) * (2.0 if scale is None else scale)
        return (y, x) if hidden else (y,)


class TakesTheRest(Shell):
    def forward(self, x, scale=2.0, *others):
        return decided(self.part(x)) * scale + len(others)


HABITS = [
    *(CountsByClass, CountsByName, CountsTensors, SumsBuffers, ReadsAttribute, ReadsWeight),
    *(ReadsByName, ReadsByMadeUpName, ReadsByPath, ReadsOtherName, ReadsInLoop, AsksInLoop),
    *(CountsByMadeUpName, CountsTensorsByMadeUpName, ReadsPropertyByMadeUpName),
    *(CallsMethod, CallsForward, Checkpoints, Compares, Chooses, InProperty, InLambda),
    *(FallsThrough, Hooks, Patches, Recorded, RecordedByStar, RecordedStraight, RecordsOpaque),
    *(HandsItself, RecordsOnce, Inherits, AddsArgument, TakesTheRest),
]


@pytest.mark.parametrize("kind", HABITS)
def test_nobody_notices_that_parts_became_graphs(kind):
    model = random_(kind())
    fused = fuse(model)
    assert fused.report.opaque
    torch.testing.assert_close(outputs(fused, (X,)), outputs(model, (X,)), rtol=1e-4, atol=1e-4)
    again = fuse(model)  # now that the model has run
    torch.testing.assert_close(outputs(again, (X,)), outputs(model, (X,)), rtol=1e-4, atol=1e-4)


def test_arguments_by_place_and_by_name_arrive():
    model, others = random_(AddsArgument()), random_(TakesTheRest())
    fused, rest = fuse(model), fuse(others)
    torch.testing.assert_close(fused(X, 3.0), model(X, 3.0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(fused(X, scale=3.0), model(X, scale=3.0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(rest(X, 3.0, 1, 2), others(X, 3.0, 1, 2), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("given", [{}, {"hidden": True}, {"hidden": False}, {"scale": 3.0}])
@pytest.mark.parametrize("hidden", [False, True])
def test_a_decorator_sees_what_is_given_by_name_and_nothing_else(hidden, given):
    model = random_(AsSet(hidden))
    wanted = outputs(functools.partial(model, **given), (X,))
    assert len(wanted) == 1 + given.get("hidden", hidden)
    for found in (fuse(model), nhwc.optimize(model, X, kwargs=given)):
        ours = outputs(functools.partial(found, **given), (X,))
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [Recorded, RecordsOnce, CallsMethod, AddsArgument])
def test_optimize_takes_them_too(kind):
    model = random_(kind())
    fast = nhwc.optimize(model, X)
    torch.testing.assert_close(outputs(fast, (X,)), outputs(model, (X,)), rtol=1e-4, atol=1e-4)


def test_the_report_says_why_parts_stay():
    [part] = fuse(CountsByClass().eval()).report.opaque
    assert "its parts stay as they are: it looks through its parts" in part.reason
    [part] = fuse(HandsItself().eval()).report.opaque
    assert "it hands itself to other code (test_habits.py:" in part.reason


class Typed(Shell):
    """Reads the type of its weights, which folding leaves as it is."""

    def forward(self, x):
        return decided(self.part(x.to(next(self.parameters()).dtype)))


class TypedByItsFloats(Shell):
    """Asks as models of transformers do."""

    @property
    def dtype(self):
        return next(p.dtype for p in self.parameters() if p.is_floating_point())

    def forward(self, x):
        return decided(self.part(x.to(self.dtype)))


class SumsItsFloats(TypedByItsFloats):
    def forward(self, x):
        return decided(self.part(x) + next(p.sum() for p in self.parameters() if p.dtype))


def test_the_numbers_of_parts_are_more_than_their_type():
    [part] = fuse(SumsItsFloats().eval()).report.opaque
    assert "its parts stay as they are: it looks through its parts" in part.reason


class CallsStatic(Shell):
    """Hands a value, not itself, to code of its own."""

    def forward(self, x):
        return decided(self.part(self.halved(x)))

    @staticmethod
    def halved(x):
        return torch.mul(x, 0.5)


class CallsByNumber(nn.Module):
    """Makes up the names of its parts, as U2-Net does."""

    def __init__(self):
        super().__init__()
        for number in range(4):
            self.add_module(f"stage{number}", Part())

    def forward(self, x):
        x = decided(getattr(self, "stage%d" % 0)(x))  # noqa: UP031
        x = getattr(self, "stage" + str(1))(getattr(self, "stage{}".format(2))(x))  # noqa: UP032
        return getattr(self, f"stage{x.ndim - 1}")(x)


def test_parts_that_are_called_by_made_up_names_get_graphs():
    found = {path for path, _ in graphs(fuse(CallsByNumber().eval()))}
    assert found == {"", "stage0", "stage1", "stage2", "stage3"}


@pytest.mark.parametrize("kind", [Typed, TypedByItsFloats, CallsStatic])
def test_what_only_calls_its_parts_gets_graphs(kind):
    found = {path for path, _ in graphs(fuse(kind().eval()))}
    assert found == {"", "part", "parts.0", "parts.1", "head"}


class Last(Part):
    last = None

    def forward(self, x):
        self.last = super().forward(x)
        return decided(self.last)


class Kept(Part):
    def __init__(self):
        super().__init__()
        self.found = []

    def forward(self, x):
        self.found.append(super().forward(x))
        return decided(self.found[-1])


class Fills(Part):
    def forward(self, x, into):
        into.append(super().forward(x))
        return decided(into[-1])


class ReadsLast(Shell):
    def __init__(self):
        super().__init__()
        self.part = Last()

    def forward(self, x):
        return self.part(x) + self.part.last


class ReadsKept(Shell):
    def __init__(self):
        super().__init__()
        self.part = Kept()

    def forward(self, x):
        return self.part(x) + self.part.found[-1]


class ReadsFilled(Shell):
    def __init__(self):
        super().__init__()
        self.part = Fills()

    def forward(self, x):
        into = []
        return self.part(x, into), tuple(into)


class ReadsHook(Shell):
    def __init__(self):
        super().__init__()
        self.seen = {}
        self.part.norm.register_forward_hook(self.note)

    def note(self, module, args, result):
        self.seen["norm"] = result

    def forward(self, x):
        return self.part(x) + self.seen["norm"]


@pytest.mark.parametrize("kind", [ReadsLast, ReadsKept, ReadsFilled, ReadsHook])
def test_what_an_opaque_part_writes_is_not_read_while_tracing(kind):
    model = random_(kind())
    outputs(model, (X * 3,))  # what it kept of this is nothing to answer with
    fused = fuse(model)
    torch.testing.assert_close(outputs(fused, (X,)), outputs(model, (X,)), rtol=1e-4, atol=1e-4)


class InDict(nn.Module):
    def __init__(self):
        super().__init__()
        self.part, self.kept = Part(), {}

    def forward(self, x):
        self.kept["x"] = self.part(x)
        return self.kept["x"] * 2


class OnPart(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = Part()

    def forward(self, x):
        self.part.kept = x
        return self.part(x)


@pytest.mark.parametrize("kind", [InDict, OnPart])
def test_what_code_keeps_in_containers_or_on_its_parts_is_kept(kind):
    model = random_(kind())
    fused = fuse(model)
    assert "its forward changes" in fused.report.opaque[0].reason
    torch.testing.assert_close(outputs(fused, (X,)), outputs(model, (X,)), rtol=1e-4, atol=1e-4)
    inside = fused.model.kept["x"] if kind is InDict else fused.model.part.kept
    assert type(inside) is torch.Tensor


def test_segformer_in_a_wrapper():
    transformers = pytest.importorskip("transformers")
    nhwc.models.vision.import_torchvision()
    config = transformers.SegformerConfig(
        depths=[1] * 4,
        hidden_sizes=[8] * 4,
        decoder_hidden_size=8,
        num_attention_heads=[1, 2, 2, 4],
    )

    class Logits(nn.Module):
        def __init__(self):
            super().__init__()
            self.m = transformers.SegformerForSemanticSegmentation(config)

        forward = lambda s, x: s.m(x).logits

    model, x = random_(Logits()), torch.randn(1, 3, 64, 64)
    for _ in range(2):
        torch.testing.assert_close(
            outputs(fuse(model), (x,)), outputs(model, (x,)), rtol=1e-4, atol=1e-4
        )


class Centers(nn.Module):
    """As models that restore images do, it keeps its mean in the type of what it is given."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 3), nn.BatchNorm2d(3)
        self.mean = torch.tensor([0.3, 0.4, 0.5]).view(1, 3, 1, 1)

    def forward(self, x):
        self.mean = self.mean.type_as(x)
        return self.norm(self.conv(x - self.mean)) + self.mean


class CentersLike(Centers):
    def forward(self, x):
        self.mean = self.mean.to(x)
        return self.norm(self.conv(x - self.mean)) + self.mean


class CentersTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = Centers()

    def forward(self, x):
        return self.part(self.part(x))


class Centered(Centers):
    """The next call would find another mean."""

    def forward(self, x):
        self.mean = (self.mean + 1).type_as(x)
        return self.norm(self.conv(x - self.mean))


@pytest.mark.parametrize("kind", [Centers, CentersTwice])
def test_a_tensor_that_is_kept_in_the_type_of_the_input_is_no_change(kind):
    model = random_(kind())
    fused = fuse(model)
    assert not fused.report.opaque
    for x in (X, X.double()):
        wide = copy.deepcopy(model).to(x.dtype)
        torch.testing.assert_close(fused.to(x.dtype)(x), wide(x), rtol=1e-4, atol=1e-4)
    assert type(getattr(model, "part", model).mean) is torch.Tensor


@pytest.mark.parametrize("kind", [Centers, CentersLike, CentersTwice])
def test_nor_is_it_one_where_sizes_are_known(kind):
    model = random_(kind())
    sized, opaque = capture_sized(capture_closed(model, "it is to be recorded").module, [X])
    assert not opaque
    torch.testing.assert_close(sized(X), model(X), rtol=1e-4, atol=1e-4)


def test_a_tensor_that_is_kept_with_other_numbers_is_one():
    model = random_(Centered())
    fused = fuse(model)
    assert fused.report.opaque
    for _ in range(2):
        torch.testing.assert_close(fused(X), model(X), rtol=1e-4, atol=1e-4)
