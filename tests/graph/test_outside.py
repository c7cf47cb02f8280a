"""What a forward writes outside of its modules: no graph would do it, and no trace may leave it."""

from collections import deque

import pytest
import torch
from torch import nn

import nhwc

KEPT: dict[str, torch.Tensor] = {}
LAST: deque[torch.Tensor] = deque(maxlen=2)
SIZES = {"scale": 2.0}


class Registry(dict):
    """Answers in a way of its own, as those of transformers do."""

    def get(self, key):
        return self[key]

    def copy(self, deep):
        raise NotImplementedError


KNOWN = Registry(scale=2.0)
MEAN = None


class Net(nn.Module):
    grid, cache, calls = None, {}, 1

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)


class KeepsInItsClass(Net):
    def forward(self, x):
        if KeepsInItsClass.grid is None:
            KeepsInItsClass.grid = torch.arange(6.0, device=x.device)
        return self.conv(x) + KeepsInItsClass.grid


class FillsADictOfItsClass(Net):
    def forward(self, x):
        if "grid" not in self.cache:
            self.cache["grid"] = torch.arange(6.0, device=x.device)
        return self.conv(x) + self.cache["grid"]


class SetsAGlobal(Net):
    def forward(self, x):
        global MEAN
        if MEAN is None:
            MEAN = torch.arange(6.0, device=x.device)
        return self.conv(x) + MEAN


class FillsAGlobalDict(Net):
    def forward(self, x):
        y = self.conv(x)
        KEPT["y"] = y
        return y + 1


class FillsAGlobalDeque(Net):
    def forward(self, x):
        y = self.conv(x)
        LAST.append(y)
        return y + 1


class FillsADefault(Net):
    def forward(self, x, *, kept=[]):  # noqa: B006
        y = self.conv(x)
        kept.append(y)
        return y + 1


def enclosing():
    kept = []

    class FillsWhatItEncloses(Net):
        def forward(self, x):
            y = self.conv(x)
            kept.append(y)
            return y + 1

    FillsWhatItEncloses.kept = kept
    return FillsWhatItEncloses


WRITING = [
    KeepsInItsClass,
    FillsADictOfItsClass,
    SetsAGlobal,
    FillsAGlobalDict,
    FillsAGlobalDeque,
    FillsADefault,
    enclosing(),
]


def outside():
    default = FillsADefault.forward.__kwdefaults__["kept"]
    return KeepsInItsClass.grid, Net.cache, MEAN, KEPT, LAST, default, WRITING[-1].kept


@pytest.fixture(autouse=True)
def nothing_kept():
    yield
    global MEAN
    KeepsInItsClass.grid = MEAN = None
    for held in outside():
        if held is not None:
            held.clear()


@pytest.mark.parametrize("kind", WRITING, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("inside", [False, True], ids=["whole", "part"])
def test_what_is_written_outside_is_left_as_it_was_and_its_writer_called(kind, inside):
    net = kind().eval()
    net = nn.Sequential(net, nn.ReLU()) if inside else net
    fused = nhwc.fuse(net)
    assert [held or None for held in outside()] == [None] * 7
    (opaque,) = fused.report.opaque
    assert "lies outside of it" in opaque.reason or "cannot have its argument" in opaque.reason
    x = torch.rand(1, 3, 8, 8)
    torch.testing.assert_close(fused(x), net(x))
    assert any(held is not None and len(held) for held in outside())


class FillsItsOwnDeque(Net):
    def __init__(self):
        super().__init__()
        self.window = deque(maxlen=2)

    def forward(self, x):
        self.window.append(self.conv(x))
        return self.window[-1] + 1


def test_a_deque_of_its_own_is_filled_by_each_call():
    fused = nhwc.fuse(FillsItsOwnDeque().eval())
    assert "changes self.window" in fused.report.opaque[0].reason
    for _ in range(3):
        fused(torch.rand(1, 3, 8, 8))
    assert len(fused.model.window) == 2


class Reads(Net):
    def forward(self, x):
        return self.conv(x) * SIZES["scale"] + self.calls


class ReadsARegistry(Net):
    def forward(self, x):
        return self.conv(x) * KNOWN.get("scale")


class HoldsARegistry(Net):
    def __init__(self):
        super().__init__()
        self.known = Registry(scale=2.0)

    def forward(self, x):
        return self.conv(x) * self.known.get("scale")


class WritesWhatIsThere(Net):
    def forward(self, x):
        global MEAN
        MEAN = None
        Net.calls = 1
        SIZES["scale"] = 2.0
        return self.conv(x)


@pytest.mark.parametrize("kind", [Reads, ReadsARegistry, HoldsARegistry, WritesWhatIsThere])
def test_what_changes_nothing_outside_is_traced(kind):
    assert nhwc.fuse(kind().eval()).report.opaque == ()


def test_what_the_first_run_kept_is_a_constant_of_a_plan():
    x = torch.rand(1, 3, 8, 8)
    net = KeepsInItsClass().eval()
    optimized = nhwc.optimize(net, x)
    assert optimized.report.opaque == ()
    torch.testing.assert_close(optimized(x), net(x))


BY_TYPE: dict[type, str] = {}


class NotesTypes(Net):
    """Looks up once for each type what to do with it, as einops does."""

    def forward(self, x):
        if type(x) not in BY_TYPE:
            BY_TYPE[type(x)] = "relu"
        return getattr(self.conv(x), BY_TYPE[type(x)])()


class NotesTypesAndCounts(NotesTypes):
    def forward(self, x):
        Net.calls += 1
        return super().forward(x)


def test_what_only_tensors_without_values_leave_outside_closes_no_plan():
    x = torch.rand(1, 3, 8, 8)
    net = NotesTypes().eval()
    (plan,) = nhwc.optimize(net, x).report.plans
    assert [part.path for part in plan.opened] == [""]
    assert list(BY_TYPE) == [torch.Tensor]


def test_what_each_call_leaves_outside_is_left_by_a_call(monkeypatch):
    monkeypatch.setattr(Net, "calls", 1)
    x = torch.rand(1, 3, 8, 8)
    optimized = nhwc.optimize(NotesTypesAndCounts().eval(), x)
    assert all(plan.opened == () for plan in optimized.report.plans)
    before = Net.calls
    optimized(x)
    assert Net.calls == before + 1
