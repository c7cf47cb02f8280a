"""What one part of a model writes while it calls another that reads it: no graph may freeze it."""

import contextlib
import contextvars
import functools
import operator
import os
import subprocess
import sys
import types

import pytest
import torch
from torch import nn

import nhwc
from nhwc.graph.effects.across import read_across

MODE = {"scale": 1.0}
NESTED = {"mode": {"scale": 1.0}}
FACTOR = 1.0
SETTINGS = types.SimpleNamespace(scale=1.0)
VARIABLE = contextvars.ContextVar("VARIABLE", default=1.0)


class Settings:
    scale = 1.0


class Part(nn.Module):
    def __init__(self, branches):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.branches, self.scale, self.shared = branches, 1.0, {"scale": 1.0}

    def forward(self, x):
        y = self.norm(self.conv(x)) * self.read()
        return y + 1 if self.branches and x.isnan().any() else y - 1

    def read(self):
        scale = MODE["scale"] * FACTOR * SETTINGS.scale * Settings.scale * VARIABLE.get()
        return scale * self.scale * self.shared["scale"] * NESTED["mode"]["scale"]


@contextlib.contextmanager
def scaled(scale):
    before, MODE["scale"] = MODE["scale"], scale
    try:
        yield
    finally:
        MODE["scale"] = before


class Around(nn.Module):
    def __init__(self, branches):
        super().__init__()
        self.part = Part(branches)


class SetsAnItem(Around):
    def forward(self, x):
        MODE["scale"] = 3.0
        y = self.part(x) * MODE["scale"]
        MODE["scale"] = 1.0
        return y


class SetsAnItemInAContext(Around):
    def forward(self, x):
        with scaled(3.0):
            return self.part(x)


class SetsAnItemOfAnItem(Around):
    def forward(self, x):
        NESTED["mode"]["scale"] = 3.0
        y = self.part(x)
        NESTED["mode"]["scale"] = 1.0
        return y


class SetsAGlobal(Around):
    def forward(self, x):
        global FACTOR
        FACTOR = 3.0
        y = self.part(x)
        FACTOR = 1.0
        return y


class SetsAField(Around):
    def forward(self, x):
        SETTINGS.scale = 3.0
        y = self.part(x)
        SETTINGS.scale = 1.0
        return y


class SetsAFieldOfAClass(Around):
    def forward(self, x):
        Settings.scale = 3.0
        y = self.part(x)
        Settings.scale = 1.0
        return y


class SetsAVariable(Around):
    def forward(self, x):
        token = VARIABLE.set(3.0)
        y = self.part(x)
        VARIABLE.reset(token)
        return y


class SetsAnAttribute(Around):
    def forward(self, x):
        self.part.scale = 3.0
        y = self.part(x)
        self.part.scale = 1.0
        return y


class SetsAnItemOfWhatBothHave(Around):
    def __init__(self, branches):
        super().__init__(branches)
        self.shared = self.part.shared

    def forward(self, x):
        self.shared["scale"] = 3.0
        y = self.part(x)
        self.shared["scale"] = 1.0
        return y


AROUND = Around.__subclasses__()


@pytest.mark.parametrize("kind", AROUND, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("branches", [False, True], ids=["traced", "opaque"])
def test_what_holds_while_a_part_is_called_is_read_by_its_calls(kind, branches):
    net, x = kind(branches).eval(), torch.rand(2, 3, 4, 4)
    within, expected = nn.Sequential(net, nn.ReLU()).eval(), net(x)
    torch.testing.assert_close(nhwc.fuse(net)(x), expected)
    torch.testing.assert_close(nhwc.fuse(within)(x), expected.relu())
    torch.testing.assert_close(nhwc.optimize(net, x)(x), expected)


class Counts(nn.Module):
    def forward(self, x):
        MODE["scale"] += 1
        return x


@pytest.mark.parametrize("order", [1, -1], ids=["before", "behind"])
def test_a_counter_of_one_part_is_read_by_another(order, monkeypatch):
    monkeypatch.setitem(MODE, "scale", 1.0)
    net, x = nn.Sequential(*[Counts(), Part(False)][::order]).eval(), torch.rand(2, 3, 4, 4)
    fused = nhwc.fuse(net)
    expected = [net(x) for _ in range(3)]
    MODE["scale"] = 1.0
    torch.testing.assert_close([fused(x) for _ in range(3)], expected)
    (opaque,) = [part for part in fused.report.opaque if part.kind == "Part"]
    assert opaque.reason == "it reads MODE, which other code of the model writes"


class ReadsAlone(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = Part(False)

    def forward(self, x):
        return self.part(x)


def test_what_no_part_writes_is_traced():
    assert nhwc.fuse(ReadsAlone().eval()).report.opaque == ()


class Numbers(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.calls = nn.Conv2d(3, 3, 1), 0

    def forward(self, x):
        self.calls += 1
        return self.conv(x)


class ReadsAPart(nn.Module):
    def __init__(self, other):
        super().__init__()
        self.conv, self.other, self.others = nn.Conv2d(3, 3, 1), other, [other]

    def forward(self, x):
        return self.conv(x) * self.other.calls


class ReadsAnItem(ReadsAPart):
    def forward(self, x):
        return self.conv(x) * self.others[0].calls


class Branches(nn.Sequential):
    def forward(self, x):
        y = super().forward(x)
        return y + 1 if y.isnan().any() else y


@pytest.mark.parametrize("reader", [ReadsAPart, ReadsAnItem])
@pytest.mark.parametrize("around", [nn.Sequential, Branches])
@pytest.mark.parametrize("order", [1, -1], ids=["behind", "before"])
def test_what_one_part_counts_another_reads(reader, around, order):
    counted = Numbers()
    net, x = around(*[counted, reader(counted)][::order]).eval(), torch.rand(2, 3, 4, 4)
    fused = nhwc.fuse(net)
    torch.testing.assert_close([fused(x) for _ in range(3)], [net(x) for _ in range(3)])


class ReadsWhatNobodyWrites(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([nn.Conv2d(3, 3, 1), Part(False)])
        self.table = {"scale": 2.0}

    def forward(self, x):
        shapes = {}
        shapes["x"] = x.shape
        x = self.parts[0](x) * self.parts[1].scale * self.table["scale"]
        return self.parts[1](x).reshape(shapes["x"])


def test_what_is_only_read_across_is_traced():
    net, x = ReadsWhatNobodyWrites().eval(), torch.rand(2, 3, 4, 4)
    fused = nhwc.fuse(net)
    assert fused.report.opaque == ()
    torch.testing.assert_close(fused(x), net(x))


class Tally:
    def __init__(self):
        self.calls = 0

    def count(self):
        self._add(1)

    def _add(self, more):
        self.calls += more

    def read(self):
        return self.calls


class CountsByAMethod(nn.Module):
    def __init__(self, tally):
        super().__init__()
        self.tally = tally

    def forward(self, x):
        self.tally.count()
        return x


class ReadsByAMethod(nn.Module):
    def __init__(self, tally):
        super().__init__()
        self.conv, self.known = nn.Conv2d(3, 3, 1), tally

    def forward(self, x):
        return self.conv(x) * self.known.read()


class ReadsAField(ReadsByAMethod):
    def forward(self, x):
        return self.conv(x) * self.known.calls


@pytest.mark.parametrize("reader", [ReadsByAMethod, ReadsAField])
@pytest.mark.parametrize("around", [nn.Sequential, Branches])
def test_what_methods_of_an_object_count_is_read_by_calls(reader, around):
    tally, x = Tally(), torch.rand(2, 3, 4, 4)
    net = around(CountsByAMethod(tally), reader(tally)).eval()
    fused = nhwc.fuse(net)
    torch.testing.assert_close([fused(x) for _ in range(3)], [net(x) for _ in range(3)])


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.scale = nn.Conv2d(3, 3, 1), 1.0

    def forward(self, x):
        return self.conv(x) * self.scale

    def grow(self):
        self.scale += 1.0


class Grows(nn.Module):
    """Writes into another part, to which it comes by some way."""

    def __init__(self, part):
        super().__init__()
        self.parts, self.held = nn.ModuleList([part]), [part]
        self.grow = part.grow

    def forward(self, x):
        for part in self.parts:
            part.scale = part.scale + 1.0
        return x


class GrowsAnother(Grows):
    def forward(self, x):
        self.held[0].scale += 1.0
        return x


class GrowsByAMethod(Grows):
    def forward(self, x):
        self.held[0].grow()
        return x


class GrowsByAHeldMethod(Grows):
    def forward(self, x):
        self.grow()
        return x


class GrowsByName(Grows):
    def forward(self, x):
        setattr(self.held[0], "scale", self.held[0].scale + 1.0)  # noqa: B010
        return x


class GrowsInAHook(Grows):
    def __init__(self, part):
        super().__init__(part)
        self.layer = nn.Identity()

        def hook(module, args, result):
            part.scale += 1.0

        self.layer.register_forward_hook(hook)

    def forward(self, x):
        return self.layer(x)


@pytest.mark.parametrize("kind", [Grows, *Grows.__subclasses__()], ids=lambda kind: kind.__name__)
def test_a_part_reads_what_another_has_written_into_it(kind):
    part, x = Scaled(), torch.rand(2, 3, 4, 4)
    net = nn.Sequential(kind(part), part).eval()
    fused = nhwc.fuse(net)
    torch.testing.assert_close([fused(x) for _ in range(3)], [net(x) for _ in range(3)])


class Asks(nn.Module):
    """Reads what another part counts, to which it comes by some way."""

    def __init__(self, other):
        super().__init__()
        self.conv, self.others, self.table = nn.Conv2d(3, 3, 1), nn.ModuleList([other]), {0: other}
        self.read, self.reads = other.read, [other.read]
        self.partial = functools.partial(type(other).read, other)


class AsksInALoop(Asks):
    def forward(self, x):
        for other in self.others:
            x = x * other.calls
        return self.conv(x)


class AsksInAList(Asks):
    def forward(self, x):
        return self.conv(x) * sum([other.calls for other in self.others])


class AsksAnItem(Asks):
    def forward(self, x):
        for _, other in self.table.items():
            x = x * other.read()
        return self.conv(x)


class AsksAMethod(Asks):
    def forward(self, x):
        return self.conv(x) * self.read()


class AsksAMethodInAList(Asks):
    def forward(self, x):
        return self.conv(x) * self.reads[0]()


class AsksAPartial(Asks):
    def forward(self, x):
        return self.conv(x) * self.partial()


class AsksByName(Asks):
    def forward(self, x):
        return self.conv(x) * getattr(self.table[0], "calls")  # noqa: B009


class Answers(Numbers):
    def read(self):
        return self.calls


@pytest.mark.parametrize("kind", Asks.__subclasses__(), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("order", [1, -1], ids=["behind", "before"])
def test_what_one_part_counts_another_reads_by_any_way(kind, order):
    other, x = Answers(), torch.rand(2, 3, 4, 4)
    net = nn.Sequential(*[other, kind(other)][::order]).eval()
    fused = nhwc.fuse(net)
    torch.testing.assert_close([fused(x) for _ in range(3)], [net(x) for _ in range(3)])


def counting_and_reading():
    counts, calls = {"calls": 1.0}, 1.0

    class Counting(nn.Module):
        def forward(self, x):
            nonlocal calls
            calls += 1.0
            counts["calls"] += 1.0
            return x

    class ReadsTheItem(nn.Module):
        def forward(self, x):
            return x * counts["calls"]

    class ReadsTheVariable(nn.Module):
        def forward(self, x):
            return x * calls

    return Counting(), ReadsTheItem(), ReadsTheVariable()


@pytest.mark.parametrize("reader", [1, 2], ids=["item", "variable"])
def test_what_the_code_of_two_parts_encloses_is_read_by_calls(reader):
    first, second = counting_and_reading(), counting_and_reading()
    net, like = (nn.Sequential(parts[0], parts[reader]).eval() for parts in (first, second))
    fused, x = nhwc.fuse(net), torch.rand(2, 3, 4, 4)
    torch.testing.assert_close([fused(x) for _ in range(3)], [like(x) for _ in range(3)])


class Leads(nn.Module):
    """The first of a row counts, the others read what it has counted."""

    def __init__(self, first=None):
        super().__init__()
        self.conv, self.first, self.calls = nn.Conv2d(3, 3, 1), first, 0

    def forward(self, x):
        if self.first is None:
            self.calls += 1
            return self.conv(x)
        return self.conv(x) * self.first.calls


def test_one_part_counts_and_another_of_its_class_reads():
    first, x = Leads(), torch.rand(2, 3, 4, 4)
    net = nn.Sequential(first, Leads(first)).eval()
    fused = nhwc.fuse(net)
    torch.testing.assert_close([fused(x) for _ in range(3)], [net(x) for _ in range(3)])


class SetsForACall(nn.Module):
    def __init__(self):
        super().__init__()
        self.part = Scaled()

    def forward(self, x):
        self.part.scale = 2.0
        y = self.part(x)
        self.part.scale = 1.0
        return y


def test_what_only_the_code_around_a_part_sets_for_its_call_is_traced():
    net, x = nn.Sequential(SetsForACall(), nn.ReLU()).eval(), torch.rand(2, 3, 4, 4)
    fused = nhwc.fuse(net)
    assert fused.report.opaque == ()
    torch.testing.assert_close(fused(x), net(x))


class CountsInASlot(nn.Module):
    __slots__ = ("calls",)

    def __init__(self):
        super().__init__()
        self.conv, self.calls = nn.Conv2d(3, 3, 1), 0

    def forward(self, x):
        self.calls += 1
        return self.conv(x) * self.calls


def test_what_a_part_counts_in_its_slots_is_counted_by_calls():
    net, x = CountsInASlot().eval(), torch.rand(2, 3, 4, 4)
    fused, fast = nhwc.fuse(net), nhwc.optimize(net, x)
    expected = [net(x) for _ in range(3)]
    torch.testing.assert_close([fused(x) for _ in range(3)], expected)
    torch.testing.assert_close([fast(x) for _ in range(3)], expected)


class ReadsThree(nn.Module):
    def forward(self, x):
        return x * self.one * self.two * self.three


class SetsThree(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.held = [part]

    def forward(self, x):
        part = self.held[0]
        part.one, part.two, part.three = x.mean(), x.amax(), x.amin()
        return x


def reasons():
    part = ReadsThree()
    part.one = part.two = part.three = 1.0
    return [
        str(one) for one in nhwc.fuse(nn.Sequential(SetsThree(part), part).eval()).report.opaque
    ]


def test_each_run_gives_the_same_reasons():
    """Sets of texts have another order in each process."""
    code = "from tests.graph.test_across import reasons; print(reasons())"
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": str(seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in range(4)
    }
    assert said == {f"{reasons()}\n"}


class Looks(nn.Module):
    """Code that looks into the fields of others, as that of diffusers does for their types."""

    def __init__(self, look):
        super().__init__()
        self.part, self.look = Part(branches=False), look

    def forward(self, x):
        self.look(self.part)
        return self.part(x)


LOOKING = [
    lambda part: [key for key, value in part.__dict__.items() if torch.is_tensor(value)],
    lambda part: [*vars(part).values()],
    lambda part: "scale" in part.__dict__,
    lambda part: part.__dict__["branches"],
]
CHANGING = [
    lambda part: part.__dict__.update(scale=3.0),
    lambda part: vars(part).update(scale=3.0),
    lambda part: operator.setitem(part.__dict__, "scale", 3.0).items(),
    lambda part: part.__dict__["_buffers"].update(scale=3.0),
]


@pytest.mark.parametrize("look", LOOKING)
def test_to_look_into_the_dict_of_a_part_writes_nothing(look):
    assert not read_across(Looks(look))


@pytest.mark.parametrize("change", CHANGING)
def test_to_change_the_dict_of_a_part_writes_its_fields(change):
    model = Looks(change)
    assert model.part in read_across(model)
