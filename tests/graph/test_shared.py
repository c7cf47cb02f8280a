"""What two parts hand on in an object or a class that both know, however their code names it."""

import copy
import operator

import pytest
import torch
from torch import nn

import nhwc

PLACE = 1


class Memo:
    level = 1.0


class ForeignMemo:
    __module__ = "of_another_package"
    level_1 = 1.0


class Holds(nn.Module):
    shared_1 = 1.0

    def __init__(self, memo):
        super().__init__()
        self.conv, self.memo, self.memos = nn.Conv2d(3, 3, 1), memo, [memo]


class Writes(Holds):
    def forward(self, x):
        y = self.conv(x)
        self.write(y.mean())
        return y


class Reads(Holds):
    def forward(self, x):
        return self.conv(x) * self.read()


def put(memo, value):
    memo.level_1 = value


def put_by_name(memo, value):
    setattr(memo, f"level_{PLACE}", value)


def take(memo):
    return memo.level_1


def take_by_name(memo):
    return getattr(memo, f"level_{PLACE}")


def to_field(self, value):
    self.memo.level_1 = value


def to_name(self, value):
    setattr(self.memo, f"level_{PLACE}", value)


def to_key(self, value):
    self.memo.__dict__["level_" + str(PLACE)] = value


def to_vars(self, value):
    vars(self.memo)["level_1"] = value


def to_dict(self, value):
    self.memo.__dict__.update(level_1=value)


def to_object(self, value):
    object.__setattr__(self.memo, "level_1", value)


def by_function(self, value):
    put(self.memo, value)


def by_function_to_name(self, value):
    put_by_name(self.memo, value)


def to_item(self, value):
    self.memos[0].level_1 = value


def by_function_to_item(self, value):
    put(self.memos[0], value)


WRITERS = [to_field, to_name, to_key, to_vars, to_dict, to_object]
WRITERS += [by_function, by_function_to_name, to_item, by_function_to_item]

READERS = {
    "field": lambda self: self.memo.level_1,
    "name": lambda self: getattr(self.memo, f"level_{PLACE}"),
    "key": lambda self: self.memo.__dict__["level_1"],
    "vars": lambda self: vars(self.memo)["level_1"],
    "all": lambda self: sum(vars(self.memo).values()),
    "getter": lambda self: operator.attrgetter("level_1")(self.memo),
    "function": lambda self: take(self.memo),
    "function of a name": lambda self: take_by_name(self.memo),
    "item": lambda self: self.memos[0].level_1,
}


def assert_handed_on(memo, write, read):
    kinds = type("Writer", (Writes,), {"write": write}), type("Reader", (Reads,), {"read": read})
    net, x = nn.Sequential(*(kind(memo) for kind in kinds)).eval(), torch.rand(2, 3, 4, 4)
    fused = nhwc.fuse(copy.deepcopy(net))
    for scale in (1, 2, 3):
        torch.testing.assert_close(fused(x * scale), net(x * scale))
    return fused


@pytest.mark.parametrize("write", WRITERS, ids=lambda one: one.__name__)
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_what_a_part_writes_in_an_object_another_reads(write, read):
    memo = Memo()
    memo.level_1 = torch.tensor(1.0)
    assert_handed_on(memo, write, read)


@pytest.mark.parametrize("write", WRITERS, ids=lambda one: one.__name__)
def test_what_a_part_writes_in_an_object_of_another_package_is_seen(write):
    fused = assert_handed_on(ForeignMemo(), write, take_of_memo)
    assert "class is of another package" in fused.report.opaque[0].reason


def take_of_memo(self):
    return self.memo.level_1


def to_own_class(self, value):
    type(self).shared_1 = value


def to_own_class_by_name(self, value):
    setattr(type(self), f"shared_{PLACE}", value)


def to_own_class_of_a_field(self, value):
    setattr(self.__class__, f"shared_{PLACE}", value)


CLASS_READERS = {
    "self": lambda self: self.shared_1,
    "class": lambda self: type(self).shared_1,
    "name": lambda self: getattr(type(self), f"shared_{PLACE}"),
}


@pytest.mark.parametrize(
    "write", [to_own_class, to_own_class_by_name, to_own_class_of_a_field], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("read", CLASS_READERS.values(), ids=CLASS_READERS)
def test_what_a_part_writes_in_its_class_another_of_the_class_reads(write, read):
    def forward(self, x):
        y = self.conv(x)
        if self.memo:
            self.write(y.mean())
            return y
        return y * self.read()

    kind = type("Both", (Holds,), {"forward": forward, "write": write, "read": read})
    net, x = nn.Sequential(kind(True), kind(False)).eval(), torch.rand(2, 3, 4, 4)
    fused = nhwc.fuse(net)
    for scale in (1, 2, 3):
        torch.testing.assert_close(fused(x * scale), net(x * scale))


class Numbered(Holds):
    def forward(self, x):
        return getattr(self, f"co{'nv'}")(x) * getattr(self.memo, f"level_{PLACE}", 2.0)


def test_names_that_code_computes_close_no_part_where_nothing_is_written():
    memo = Memo()
    assert nhwc.fuse(nn.Sequential(Numbered(memo), Numbered(memo)).eval()).report.opaque == ()


def test_what_a_function_writes_in_an_object_is_not_written_in_the_part():
    fused = assert_handed_on(Memo(), by_function, lambda self: 1.0)
    assert [part.path for part in fused.report.opaque] == ["0"]
