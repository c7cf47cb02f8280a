"""What a forward keeps and no call reads is left out of a graph for known sizes; state never is."""

import copy

import pytest
import torch
from torch import nn

from nhwc import load, optimize, save


class Keeps(nn.Module):
    """A network with a part that keeps something; what a case changes is a method."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.seen = self.begin()

    def begin(self):
        return None

    def forward(self, x):
        return self.keep(self.conv(x).relu())

    def keep(self, y):
        self.seen = y
        return y


class InAList(Keeps):
    def begin(self):
        return [None, None]

    def keep(self, y):
        self.seen[1] = y
        return y


class Appended(Keeps):
    def begin(self):
        return []

    def keep(self, y):
        self.seen.append(y.mean())
        return y


class InADict(Keeps):
    def begin(self):
        return {}

    def keep(self, y):
        self.seen["y"] = y
        return y


class Inherited(Keeps):
    """The attribute has a default in the class, which is not to change."""

    seen = "nothing"

    def __init__(self):
        super().__init__()
        del self.seen


class ReadAgain(Keeps):
    def keep(self, y):
        self.seen, height = y, y.shape[2]
        return self.seen[:, :, :height] if height else y


class Listed(Keeps):
    def keep(self, y):
        self.seen = []
        for part in y.chunk(2, 1):
            self.seen.append(part)
        return torch.cat(self.seen, 1)


class Whole(nn.Module):
    def __init__(self, part):
        super().__init__()
        self.part = part
        self.last = nn.Conv2d(4, 4, 1)

    def forward(self, x):
        return self.last(self.part(x))


KEEPING = (Keeps, InAList, Appended, InADict, Inherited, ReadAgain, Listed)


@pytest.mark.parametrize("kind", KEEPING)
def test_what_no_call_reads_is_in_no_plan(kind, tmp_path):
    model, x = Whole(kind()).eval(), torch.randn(1, 4, 8, 8)
    before = repr(model.part.seen)
    fast = optimize(model, x)
    assert repr(model.part.seen) == before
    [plan] = fast.report.plans
    assert plan.planned
    assert not plan.part
    assert plan.unset == ("part.seen",)
    assert "does not set part.seen" in " ".join(str(fast.report).split())
    with torch.no_grad():
        for given in (x, -x, torch.randn(2, 4, 8, 8)):
            torch.testing.assert_close(fast(given), model(given), rtol=1e-4, atol=1e-5)
    save(fast, tmp_path / "kept.nhwc")
    with torch.no_grad():
        torch.testing.assert_close(load(tmp_path / "kept.nhwc")(x), model(x), rtol=1e-4, atol=1e-5)


class Counts(Keeps):
    def begin(self):
        return 0

    def keep(self, y):
        self.seen += 1
        return y


class Remembers(Keeps):
    def keep(self, y):
        before = y if self.seen is None else self.seen
        self.seen = y
        return y + before


class Asks(Keeps):
    def keep(self, y):
        before = getattr(self, "seen", None)
        self.seen = y
        return y + (y if before is None else before)


class Grows(Keeps):
    def begin(self):
        return []

    def keep(self, y):
        self.seen.append(y)
        return y * len(self.seen)


class Turns(Keeps):
    """Takes from one end of a list what an earlier call put at the other."""

    def begin(self):
        return [1.0, 2.0]

    def keep(self, y):
        self.seen.append(self.seen.pop(0))
        return y


class Looks(Keeps):
    def begin(self):
        return {}

    def keep(self, y):
        y = y + self.seen.get("y", 0)
        self.seen["y"] = y
        return y


class OfLargeImages(Keeps):
    """A call for small images reads what one for large images has kept."""

    def keep(self, y):
        if y.shape[-1] >= 8:
            self.seen = y.mean()
            return y
        return y * (1.0 if self.seen is None else self.seen)


class ByName(Keeps):
    def keep(self, y):
        before = getattr(self, "seen", None) if y.shape[-1] < 8 else None
        self.seen = y.mean()
        return y if before is None else y * before


class OfSmallOnes(Keeps):
    """What a call for small images reads; a case changes how it does."""

    def keep(self, y):
        if y.shape[-1] < 8:
            return self.read(y)
        self.seen = y.mean()
        return y


class AsksForNone(OfSmallOnes):
    def read(self, y):
        return y * 2 if self.seen is None else y


class Adds(OfSmallOnes):
    def begin(self):
        return 1.0

    def read(self, y):
        self.seen += 1
        return y


class ByNameInside(OfSmallOnes):
    def read(self, y):
        return y * sum(getattr(self, name) or 1.0 for name in ("seen",))


class PutInABranch(Keeps):
    def keep(self, y):
        if y.shape[-1] >= 8:
            self.seen = y.mean()
        return y if self.seen is None else y * self.seen


class PutAfterwards(Keeps):
    def keep(self, y):
        if y.shape[-1] < 8:
            y = y * self.seen
        self.seen = y.mean()
        return y + self.seen


class OfAnother(Keeps):
    """What is put there is put into another object by then."""

    def keep(self, y):
        before = self
        if y.shape[-1] < 8:
            self = Keeps()
        self.seen = y.mean()
        self = before
        return y if self.seen is None else y * self.seen


class OfALaterCall(Keeps):
    def keep(self, y):
        read = getattr(self.conv, "read", None)
        self.seen = y.mean()
        self.conv.read = lambda: self.seen
        return y if read is None or y.shape[-1] >= 8 else y * read()


SMALL = (
    PutInABranch,
    PutAfterwards,
    OfAnother,
    OfLargeImages,
    ByName,
    AsksForNone,
    Adds,
    ByNameInside,
)


@pytest.mark.parametrize(
    "kind", [Counts, Remembers, Asks, Grows, Turns, Looks, OfALaterCall, *SMALL]
)
def test_what_the_next_call_reads_is_never_left_out(kind):
    model, x = Whole(kind()).eval(), torch.randn(1, 4, 8, 8)
    fast, fresh = optimize(model, x), copy.deepcopy(model)
    assert not any(plan.unset for plan in fast.report.plans)
    assert fast.report.opaque
    with torch.no_grad():
        calls = [x, x * 2, x[..., :4] if kind in SMALL else x * 3, x * 4]
        ours, theirs = ([run(given) for given in calls] for run in (fast, fresh))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_classes_are_left_as_they_were():
    kinds = (*KEEPING, Counts, Remembers)
    before = [dict(vars(kind)) for kind in kinds]
    for kind in kinds:
        optimize(Whole(kind()).eval(), torch.randn(1, 4, 8, 8))
    assert [dict(vars(kind)) for kind in kinds] == before


class Supervised(nn.Module):
    """Parts that share a list, as MONAI's nnU-Net with deep supervision has it."""

    def __init__(self, depth=3):
        super().__init__()
        torch.manual_seed(0)
        self.heads = [torch.zeros(1)] * depth
        self.levels = nn.ModuleList(Level(number, self.heads) for number in range(depth))

    def forward(self, x):
        for level in self.levels:
            x = level(x)
        return torch.stack([x, *self.heads]) if self.training else x


class Level(nn.Module):
    def __init__(self, number, heads):
        super().__init__()
        self.number, self.heads = number, heads
        self.conv, self.head = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 2, 1)

    def forward(self, x):
        x = self.conv(x).relu()
        if self.heads is not None:
            self.heads[self.number] = self.head(x)
        return x


def test_heads_for_training_are_in_no_plan():
    model, x = Supervised().eval(), torch.randn(1, 4, 8, 8)
    fast = optimize(model, x)
    [plan] = fast.report.plans
    assert plan.planned
    assert {"heads", "levels.2.heads"} <= {*plan.unset}
    assert not any("head" in layer.name for layer in plan.layers)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
