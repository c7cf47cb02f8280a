"""What two parts hand on in an object or a class that both know, however their code names it."""

import copy
import operator
from collections import deque

import numpy
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

    @classmethod
    def share(cls, value):
        cls.shared_1 = value


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


def to_class_above(self, value):
    type(self).__mro__[0].shared_1 = value


def by_method_of_class(self, value):
    self.share(value)


CLASS_WRITERS = [to_own_class, to_own_class_by_name, to_own_class_of_a_field]
CLASS_WRITERS += [to_class_above, by_method_of_class]


@pytest.mark.parametrize("write", CLASS_WRITERS, ids=lambda one: one.__name__)
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


def assert_right(net):
    x = torch.rand(2, 3, 4, 4)
    fused = nhwc.fuse(net.eval())
    # Both runs go on with what lies in classes; each copy has its own containers.
    for scale in (1, 2, 3):
        torch.testing.assert_close(fused(x * scale), net(x * scale))


def base(self, value):
    type(self).__base__.shared_1 = value


def bases(self, value):
    type(self).__bases__[0].shared_1 = value


def order(self, value):
    type(self).__mro__[1].shared_1 = value


@pytest.mark.parametrize("write", [base, bases, order], ids=lambda one: one.__name__)
def test_what_a_part_writes_in_a_class_above_its_own_another_reads(write):
    above = type("Above", (Reads,), {"read": lambda self: self.shared_1})
    below = type("Below", (above,), {"forward": Writes.forward, "write": write})
    assert_right(nn.Sequential(below(None), above(None)))


def in_a_method_of_a_class(self, value):
    Store.put(value)


def in_a_static_method(self, value):
    Store.put_plainly(value)


def in_a_method_of_an_object_s_class(self, value):
    self.memo.put(value)


class Store:
    kept = 1.0

    @classmethod
    def put(cls, value):
        cls.kept = value

    @staticmethod
    def put_plainly(value):
        Store.kept = value


@pytest.mark.parametrize(
    "write",
    [in_a_method_of_a_class, in_a_static_method, in_a_method_of_an_object_s_class],
    ids=lambda one: one.__name__,
)
def test_what_a_class_keeps_of_what_a_part_gives_it_another_reads(write):
    assert_handed_on(Store(), write, lambda self: Store.kept)
    assert_handed_on(Store(), write, lambda self: self.memo.kept)
    assert isinstance(Store.kept, torch.Tensor), "a traced value is dead afterwards"


class ByNumber(Holds):
    def forward(self, x):
        y = self.conv(x)
        for place, part in enumerate(self.memos):
            y = y * getattr(part, f"level_{place}")
        return y


class Leveled(Holds):
    level_0 = 1.0

    def forward(self, x):
        y = self.conv(x)
        self.level_0 = y.mean()
        return y


def test_what_parts_in_a_list_keep_is_read_by_names_that_code_computes():
    leveled = Leveled(None)
    assert_right(nn.Sequential(leveled, ByNumber(leveled)))


class Kind(type):
    level = 1.0


class OfKind(metaclass=Kind):
    pass


def test_what_a_part_writes_in_the_class_of_a_class_another_reads():
    def write(self, value):
        Kind.level = value

    assert_handed_on(None, write, lambda self: OfKind.level)


CHANGES = {
    "items of an array": (numpy.ones(1), lambda self: self.memo.__setitem__(0, self.memo[0] + 1)),
    "an array filled": (numpy.ones(1), lambda self: self.memo.fill(self.memo[0] + 1)),
    "bytes": (bytearray(b"12"), lambda self: self.memo.reverse()),
    "a list turned": ([1, 2], lambda self: self.memo.reverse()),
    "a queue turned": (deque([1, 2, 3]), lambda self: self.memo.rotate(1)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_part_changes_in_place_another_reads(name):
    memo, change = CHANGES[name]

    def write(self, value):
        change(self)

    kinds = type("Writer", (Writes,), {"write": write}), type("Reader", (Reads,), {"read": first})
    assert_right(nn.Sequential(*(kind(memo) for kind in kinds)))


def test_an_array_that_a_part_adds_to_another_reads():
    class Adds(Holds):
        def forward(self, x):
            self.memo += 1
            return self.conv(x)

    memo = numpy.ones(1)
    reads = type("Reader", (Reads,), {"read": first})
    assert_right(nn.Sequential(Adds(memo), reads(memo)))


def first(self):
    return float(self.memo[0])
