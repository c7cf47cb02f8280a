"""What a forward writes outside of its modules: no graph would do it, and no trace may leave it."""

import array
import contextvars
import copy
import dataclasses
import functools
import itertools
import linecache
import random
import threading
import types
from collections import deque

import numpy
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
    assert "lies outside of it" in opaque.reason or "default of its argument kept" in opaque.reason
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


class CountsInAnArray(Net):
    def __init__(self):
        super().__init__()
        self.counted = array.array("d", [0.0])

    def forward(self, x):
        self.counted[0] += 1
        return self.conv(x) * self.counted[0]


def counted():
    counted.calls = getattr(counted, "calls", 0) + 1
    return counted.calls


class CountsInAFunction(Net):
    def forward(self, x):
        return self.conv(x) * counted()


@pytest.mark.parametrize("kind", [CountsInAnArray, CountsInAFunction])
def test_a_count_in_an_array_or_a_function_goes_on(kind):
    vars(counted).clear()
    net, x = kind().eval(), torch.rand(1, 3, 8, 8)
    fused = nhwc.fuse(net)
    assert not vars(counted)
    for count in (1, 2, 3):
        torch.testing.assert_close(fused(x), net.conv(x) * count)


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
    assert not BY_TYPE


def test_what_each_call_leaves_outside_is_left_by_a_call(monkeypatch):
    monkeypatch.setattr(Net, "calls", 1)
    x = torch.rand(1, 3, 8, 8)
    optimized = nhwc.optimize(NotesTypesAndCounts().eval(), x)
    assert all(plan.opened == () for plan in optimized.report.plans)
    before = Net.calls
    optimized(x)
    assert Net.calls == before + 1


@dataclasses.dataclass
class Count:
    number: float = 1.0

    def next(self):
        self.number += 1
        return self.number


class Slotted:
    __slots__ = ("number", "unset")

    def __init__(self):
        self.number = 1.0


class Closed:
    """Lets nobody look at all that it has."""

    def __init__(self):
        self.number = 1.0

    def __getattribute__(self, name):
        if name == "__dict__":
            raise RuntimeError("it is closed")
        return object.__getattribute__(self, name)

    def __deepcopy__(self, memo):
        other = Closed()
        other.number = self.number
        return other


class Running:
    """Keeps a mean of what it has seen, as code around a video does."""

    def __init__(self):
        self.mean = torch.zeros(())

    def __call__(self, x):
        self.mean = self.mean + x.mean()
        return x - self.mean


def bump(numbers, x):
    numbers[0] += 1
    return x * numbers[0]


def _adds(self, y):
    self.held.number += 1
    return y * self.held.number


def _first(self, y):
    self.held[0] += 1
    return y * float(self.held[0])


def _in_a_list(self, y):
    self.held[0].add_(1)
    return y * self.held[0]


def _through_numpy(self, y):
    self.held.numpy()[...] *= 2
    return y * self.held


def _in_a_tuple(self, y):
    self.held[1].append(1)
    return y * len(self.held[1])


REMEMBERED = {
    "namespace": (lambda: types.SimpleNamespace(number=1.0), _adds),
    "dataclass": (Count, _adds),
    "slots": (Slotted, _adds),
    "own lookup": (Closed, _adds),
    "object": (Running, lambda self, y: self.held(y)),
    "method": (lambda: Count().next, lambda self, y: y * self.held()),
    "partial": (lambda: functools.partial(bump, [1.0]), lambda self, y: self.held(y)),
    "tuple": (lambda: (0, [1]), _in_a_tuple),
    "array": (lambda: numpy.ones(2), _first),
    "bytes": (lambda: bytearray(b"ab"), _first),
    "tensor": (lambda: torch.ones(3), _first),
    "tensor in a list": (lambda: [torch.ones(())], _in_a_list),
    "tensor by numpy": (lambda: torch.ones(()), _through_numpy),
    "Python's generator": (lambda: random.Random(0), lambda self, y: y * self.held.random()),
    "numpy's": (lambda: numpy.random.default_rng(0), lambda self, y: y * self.held.random()),
    "torch's": (
        lambda: torch.Generator().manual_seed(0),
        lambda self, y: y * torch.rand((), generator=self.held),
    ),
    "cycle": (lambda: itertools.cycle([1.0, 2.0, 3.0]), lambda self, y: y * next(self.held)),
    "count in a list": (lambda: [itertools.count(1)], lambda self, y: y * next(self.held[0])),
    "iterator in an object": (
        lambda: types.SimpleNamespace(steps=iter([1.0, 2.0, 3.0])),
        lambda self, y: y * next(self.held.steps),
    ),
}


class Remembers(Net):
    def __init__(self, name):
        super().__init__()
        make, self.way = REMEMBERED[name]
        self.held = make()

    def forward(self, x):
        return self.way(self, self.conv(x))


@pytest.mark.parametrize("name", REMEMBERED)
@pytest.mark.parametrize("inside", [False, True], ids=["whole", "part"])
def test_what_one_call_leaves_for_the_next_in_whatever_it_holds(name, inside):
    net = Remembers(name).eval()
    net = nn.Sequential(net, nn.ReLU()) if inside else net
    fused, other = nhwc.fuse(net), copy.deepcopy(net)
    assert [part.path for part in fused.report.opaque] == ["0" if inside else ""]
    for x in (torch.rand(1, 3, 8, 8), torch.rand(1, 3, 8, 8), torch.rand(2, 3, 4, 9)):
        torch.testing.assert_close(fused(x), other(x))


class HoldsWhatItReads(Net):
    def __init__(self):
        super().__init__()
        self.sizes, self.count = types.SimpleNamespace(scale=2.0, inner=[Count()]), Count()
        self.table, self.grid = numpy.ones(2), (torch.ones(8, 1, 1), [self.count])

    def forward(self, x):
        scale = self.sizes.scale * self.sizes.inner[0].number * float(self.table[0])
        return self.conv(x) * scale + self.grid[0] * self.grid[1][0].number


def test_what_is_only_read_of_whatever_it_holds_is_traced():
    net, x = HoldsWhatItReads().eval(), torch.rand(1, 3, 8, 8)
    fused = nhwc.fuse(net)
    assert fused.report.opaque == ()
    torch.testing.assert_close(fused(x), net(x))


COUNT, LOCAL, SUM = Count(), threading.local(), torch.zeros(())
LOCAL.number = 1.0
STEPS = itertools.count(1)
VARIABLE = contextvars.ContextVar("VARIABLE", default=0)


class CountsInAGlobal(Net):
    def forward(self, x):
        return self.conv(x) * COUNT.next()


class CountsInAThread(Net):
    def forward(self, x):
        LOCAL.number += 1
        return self.conv(x) * LOCAL.number


class AddsToAGlobal(Net):
    def forward(self, x):
        SUM.add_(1)
        return self.conv(x) * SUM


class StepsOn(Net):
    def forward(self, x):
        return self.conv(x) * next(STEPS)


class CallsWhatSteps(Net):
    calls = itertools.count(1).__next__

    def forward(self, x):
        return self.conv(x) * CallsWhatSteps.calls()


TURNS = itertools.repeat(2.0, 1_000)


class TakesTurns(Net):
    def forward(self, x):
        return self.conv(x) * next(TURNS)


class CountsInAContext(Net):
    def forward(self, x):
        VARIABLE.set(VARIABLE.get() + 1)
        return self.conv(x) * VARIABLE.get()


@pytest.mark.parametrize("kind", [StepsOn, CallsWhatSteps, CountsInAContext])
def test_an_iterator_or_a_variable_outside_moves_on_with_each_call(kind):
    net, x = kind().eval(), torch.rand(1, 3, 8, 8)
    fused = nhwc.fuse(net)
    (opaque,) = fused.report.opaque
    assert "lies outside of it" in opaque.reason
    conv = nn.functional.conv2d(x, net.conv.weight, net.conv.bias)
    first = (fused(x) / conv).mean().round()
    assert kind is CallsWhatSteps or first == 1
    torch.testing.assert_close(fused(x), conv * (first + 1))


@pytest.mark.parametrize("kind", [StepsOn, CallsWhatSteps, TakesTurns])
def test_iterators_that_python_does_not_copy_do_no_harm(kind, monkeypatch):
    """As since Python 3.14, where none of itertools' can be copied."""

    def refuse(value):
        if type(value).__module__ == "itertools":
            raise TypeError(f"cannot pickle {type(value).__name__!r} object")
        return copied(value)

    copied = copy.copy
    monkeypatch.setattr(copy, "copy", refuse)
    net, x = kind().eval(), torch.rand(1, 3, 8, 8)
    fused, conv = nhwc.fuse(net), nn.functional.conv2d(x, net.conv.weight, net.conv.bias)
    assert "lies outside of it" in fused.report.opaque[0].reason
    first = (fused(x) / conv).mean().round()
    torch.testing.assert_close(fused(x), conv * (first + (kind is not TakesTurns)))


@pytest.mark.parametrize("kind", [CountsInAGlobal, CountsInAThread, AddsToAGlobal])
def test_an_object_outside_is_left_as_it_was_and_its_writer_called(kind):
    net, x = kind().eval(), torch.rand(1, 3, 8, 8)
    fused = nhwc.fuse(net)
    assert "lies outside of it" in fused.report.opaque[0].reason
    assert (COUNT.number, LOCAL.number, SUM.item()) == (1, 1, 0)
    conv = nn.functional.conv2d(x, net.conv.weight, net.conv.bias)
    first, second = (1, 2) if kind is AddsToAGlobal else (2, 3)
    torch.testing.assert_close(fused(x), conv * first)
    torch.testing.assert_close(fused(x), conv * second)
    COUNT.number = LOCAL.number = 1.0
    SUM.zero_()


class Quotes(nn.Module):
    def forward(self, x):
        linecache.getlines(__file__)
        return x + 1


def test_what_pythons_own_functions_keep_is_no_state_of_a_model():
    linecache.clearcache()
    assert nhwc.fuse(Quotes().eval()).report.opaque == ()


RUNS = 0


class Counting(nn.Module):
    calls = 0

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3)

    def forward(self, x, kept={}):  # noqa: B006
        global RUNS
        RUNS += 1
        Counting.calls += 1
        kept[len(kept)] = x.shape
        return self.layer(x)


@pytest.mark.parametrize(
    "verb", [nhwc.optimize, nhwc.audit, functools.partial(nhwc.audit, compare=True)]
)
def test_the_runs_of_a_verb_leave_nothing_outside_of_the_model(verb):
    model, x = Counting().eval(), torch.rand(1, 3, 8, 8)
    verb(model, x)
    assert (RUNS, Counting.calls, Counting.forward.__defaults__) == (0, 0, ({},))
