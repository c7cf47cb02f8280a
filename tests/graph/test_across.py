"""What one part of a model writes while it calls another that reads it: no graph may freeze it."""

import contextlib
import contextvars
import types

import pytest
import torch
from torch import nn

import nhwc

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
