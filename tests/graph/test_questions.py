"""What code asks of a traced value is answered as the real one would, or stops the trace."""

import builtins
import collections
import copy
import dataclasses
import enum
import functools
import inspect
import operator
import re
import weakref
from concurrent.futures import ThreadPoolExecutor
from operator import is_not

import pytest
import torch
from torch import Tensor, fx, nn

from nhwc import fuse, load, optimize, save
from nhwc.graph import capture
from nhwc.graph.code import reached
from nhwc.graph.tracing.sized import capture_sized
from nhwc.models.vision import mend_torchvision

from ..fusing import Block, outputs, random_, script
from .asserting import (
    as_made_for,
    branching,
    either,
    even,
    few,
    not_high,
    of_floats,
    of_values,
    raising,
    raising_and_counting,
    raising_at_times,
    raising_else,
    raising_in_a_loop,
    raising_its_own,
    raising_odd,
    says_an_argument,
)

X = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))


def try_attribute(y):
    try:
        return y.logits
    except AttributeError:
        return y + 1


def try_attribute_for_all(y):
    try:
        return y.logits
    except Exception:
        return y + 1


def try_key(y):
    try:
        return y["logits"]
    except (IndexError, TypeError):
        return y + 1


def try_to_loop(y):
    try:
        return sum(part for part in y) * 5
    except Exception:
        return y + 1


def try_size(y):
    try:
        return y * {6: 2}[y.shape[-1]]
    except KeyError:
        return y + 1


@functools.lru_cache
def doubled(number):
    return number * 2


@dataclasses.dataclass(frozen=True)
class Sides:
    height: int
    width: int


def matched(y):
    match y:
        case {"a": z}:
            return z
        case _:
            return y * 2


def matched_shape(y):
    match y.shape:
        case (2, *_):
            return y * 2
        case _:
            return y * 3


def matched_value(y):
    match y:
        case [first, *_]:
            return first
        case _:
            return y * 2


def marked(y):
    y.mark = 1
    return y * y.mark


kind_of = type

QUESTIONS = {
    "hasattr": lambda y: y.logits if hasattr(y, "logits") else y,
    "hasattr shape": lambda y: y * 2 if hasattr(y, "shape") else y,
    "hasattr keys": lambda y: y * 2 if hasattr(y, "keys") else y * 3,
    "hasattr node": lambda y: y * 2 if hasattr(y, "node") else y * 3,
    "hasattr call": lambda y: y * 2 if hasattr(y, "__call__") else y * 3,  # noqa: B004
    "hasattr len": lambda y: y * 2 if hasattr(y, "__len__") else y * 3,
    "hasattr of shape": lambda y: y * 2 if hasattr(y.shape, "foo") else y * 3,
    "getattr": lambda y: getattr(y, "logits", y),
    "try attribute": try_attribute,
    "try for all": try_attribute_for_all,
    "try key": try_key,
    "try to loop": try_to_loop,
    "match": matched,
    "match shape": matched_shape,
    "match value": matched_value,
    "isinstance": lambda y: y * 2 if isinstance(y, Tensor) else y * 3,
    "isinstance tuple": lambda y: y[0] if isinstance(y, tuple | list) else y * 3,
    "isinstance Mapping": lambda y: y["a"] if isinstance(y, collections.abc.Mapping) else y * 3,
    "isinstance Callable": lambda y: y * 2 if isinstance(y, collections.abc.Callable) else y * 3,
    "isinstance Iterable": lambda y: y * 2 if isinstance(y, collections.abc.Iterable) else y * 3,
    "callable": lambda y: y * 2 if callable(y) else y * 3,
    "type": lambda y: y * 2 if type(y) is Tensor else y * 3,
    "type name": lambda y: y * 2 if type(y).__name__ == "Tensor" else y * 3,
    "class": lambda y: y * 2 if y.__class__ is Tensor else y * 3,
    "issubclass": lambda y: y * 2 if issubclass(type(y), Tensor) else y * 3,
    "is_tensor": lambda y: y * 2 if torch.is_tensor(y) else y * 3,
    "is None": lambda y: y * 2 if y is None else y * 3,
    "== None": lambda y: y * 2 if y == None else y * 3,  # noqa: E711
    "dir": lambda y: y * 2 if "logits" in dir(y) else y * 3,
    "vars": lambda y: y * 2 if "node" in vars(y) else y * 3,
    "__dict__": lambda y: y * 2 if "node" in y.__dict__ else y * 3,
    "dataclass": lambda y: y * 2 if dataclasses.is_dataclass(y) else y * 3,
    "in": lambda y: y * 2 if 7.5 in y else y * 3,
    "dtype is": lambda y: y * 2 if y.dtype is torch.float32 else y * 3,
    "grad": lambda y: y * 2 if y.grad is None else y * 3,
    "same id": lambda y: y * 2 if id(y) == id(y.contiguous()) else y * 3,
    "same": lambda y: y * 2 if y is y.contiguous() else y * 3,
    "type by another name": lambda y: y * 2 if kind_of(y) is Tensor else y * 3,
    "type of builtins": lambda y: y * 2 if builtins.type(y) is Tensor else y * 3,
    "operator is": lambda y: y * 2 if operator.is_(y, y.contiguous()) else y * 3,
    "operator is not": lambda y: y * 2 if is_not(y, None) else y * 3,
    "text": lambda y: y * 2 if f"{y}".startswith("tensor") else y * 3,
    "bool": lambda y: y * 2 if y.numel() else y * 3,
    "len": lambda y: y * len(y),
    "mark": marked,
    "size as a key": lambda y: y * {6: 2, 7: 3}.get(y.shape[-1], 5),
    "rank as a key": lambda y: y * {4: 2, 5: 3}.get(y.ndim, 5),
    "number of dimensions as a key": lambda y: y * {4: 2, 5: 3}.setdefault(y.dim(), 5),
    "pair as a key": lambda y: y * {(3, 6): 2, (1, 6): 3}.get((y.size(1), y.size(2)), 5),
    "type as a key": lambda y: y * {torch.float32: 2}.get(y.dtype, 5),
    "device as a key": lambda y: y * {torch.device("cpu"): 2}.get(y.device, 5),
    "record as a key": lambda y: y * {Sides(6, 6): 2}.get(Sides(y.shape[2], y.shape[3]), 5),
    "try a key": try_size,
    "in a set": lambda y: y * 2 if y.ndim in {4, 5} else y * 3,
    "not in a dict": lambda y: y * 2 if y.shape[-1] not in {6: 1} else y * 3,
    "set of sizes": lambda y: y * len({y.shape[-1], y.shape[-2]}),
    "cached": lambda y: y * doubled(y.shape[-1]),
    "tensor as a key": lambda y: {y: y * 2}[y] if y in {y: 1} else y * 3,
    "weakref": lambda y: weakref.ref(y)() * 2,
    "copy": lambda y: copy.copy(y) * 2,
    "deepcopy": lambda y: copy.deepcopy(y) * 2,
}

SOURCES = {
    "layer": lambda self, x: self.body(x),
    "input": lambda self, x: x,
    "function": lambda self, x: torch.mul(x, 2),
    "element": lambda self, x: self.body(x).split(1, 1)[0],
}


class Asks(nn.Module):
    def __init__(self, source, question):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU())
        self.source, self.question = source, question

    def forward(self, x):
        return self.question(self.source(self, x))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_has_the_answer_of_the_real_value(question, source):
    model = random_(Asks(SOURCES[source], QUESTIONS[question]))
    fused = fuse(model)
    torch.testing.assert_close(outputs(fused, (X,)), outputs(model, (X,)), rtol=1e-4, atol=1e-4)


class Named(nn.Module):
    """Raises an error that holds what it looked for, if that is a traced value."""

    def forward(self, x):
        return x * {6: 2.0}[x.shape[-1]]


def test_an_error_that_holds_a_traced_value_is_told():
    model = nn.Sequential(nn.Conv2d(3, 3, 1), Named(), nn.Sequential(nn.ReLU())).eval()
    model[2].forward = lambda x: {}[x.shape]
    captured = capture(model)
    assert {one.path: one.reason.partition(" (")[0] for one in captured.opaque} == {
        "1": "it looks for a traced value in a dict or a set",
        "2": "it looks for a traced value in a dict or a set",
    }


class InStatic(nn.Module):
    """Its method that gets no module asks for the type of what it gets first."""

    def forward(self, x):
        return self.doubled(x + 1)

    @staticmethod
    def doubled(x):
        return x * 2 if type(x) is Tensor else x


def test_a_static_method_asks_about_values_not_about_the_module():
    model = InStatic().eval()
    torch.testing.assert_close(outputs(fuse(model), (X,)), outputs(model, (X,)))


def by_type(y):
    return y * 2 if type(y) is Tensor else y * 3


class Tool:
    """Not a module; its code is reached by a value alone."""

    def __call__(self, y):
        return by_type(y)

    def picked(self, y):
        return y * 2 if type(y) is Tensor else y * 3

    def __getitem__(self, y):
        return y * 2 if type(y) is Tensor else y * 3

    def is_plain(self, y):
        return type(y) is Tensor

    @staticmethod
    def is_same(y, z):
        return y is z

    def masked(self, y, mask):
        return y if mask is None else y * mask


TABLE = {"tool": by_type, "plain": lambda y: type(y) is Tensor}
TOOL = Tool()


def swallowed(self, y):
    try:
        return TABLE["tool"](y)
    finally:
        self.seen = True


CALLED = {
    "object": lambda self, y: TOOL(y),
    "method of an object": lambda self, y: TOOL.picked(y),
    "made in the call": lambda self, y: Tool().picked(y),
    "operator": lambda self, y: TOOL[y],
    "table": lambda self, y: TABLE["tool"](y),
    "partial": lambda self, y: functools.partial(TABLE["tool"])(y),
    "name that is put together": lambda self, y: getattr(self, "pick" + "ed")(y),
    "all arguments": lambda self, y: self.listed(y),
    "behind finally": swallowed,
}


ANSWERED = {
    "method": lambda self, y: y * 2 if TOOL.is_plain(y) else y * 3,
    "method of what it holds": lambda self, y: y * 2 if self.tool.is_plain(y) else y * 3,
    "method that is listed": lambda self, y: y * 2 if self.tools[0](y) else y * 3,
    "static method": lambda self, y: y * 2 if Tool.is_same(y, y.contiguous()) else y * 3,
    "made in the call": lambda self, y: y * 2 if Tool().is_plain(y) else y * 3,
    "table": lambda self, y: y * 2 if TABLE["plain"](y) else y * 3,
    "each": lambda self, y: y * 2 if all(map(TOOL.is_plain, [y])) else y * 3,
}


@pytest.mark.parametrize("way", ANSWERED)
def test_so_does_a_helper_that_only_answers(way):
    model = Calls(ANSWERED[way]).eval()
    fused = fuse(model)
    assert "it asks " in fused.report.opaque[0].reason
    torch.testing.assert_close(outputs(fused, (X,)), outputs(model, (X,)))


class Calls(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.conv, self.way = nn.Conv2d(3, 3, 1), way
        self.tool, self.tools = TOOL, [TOOL.is_plain]

    def forward(self, x):
        return self.way(self, self.conv(x))

    def picked(self, y):
        return y * 2 if type(y) is Tensor else y * 3

    def listed(*args):
        return args[1] * 2 if type(args[1]) is Tensor else args[1] * 3


@pytest.mark.parametrize("way", CALLED)
def test_code_asks_by_whatever_way_it_is_called(way):
    model = Calls(CALLED[way]).eval()
    fused = fuse(model)
    assert "it asks for the type of a value (test_questions.py:" in fused.report.opaque[0].reason
    torch.testing.assert_close(outputs(fused, (X,)), outputs(model, (X,)))


class ReadsVersions(nn.Module):
    """A convolution whose code may look for what a version and a class are called."""

    def __init__(self):
        super().__init__()
        self.conv, self.old = nn.Conv2d(3, 3, 1), False

    def forward(self, x):
        if self.old and re.match("1", torch.__version__):
            raise RuntimeError(inspect.getmodule(type(self)))
        return self.conv(x)


def test_what_python_asks_of_patterns_and_modules_is_asked_of_no_value():
    model = ReadsVersions()
    fused = fuse(model)
    assert not fused.report.opaque
    torch.testing.assert_close(fused(X), model(X))


def checking(forward):
    """A decorator that asks whether it stands outermost, about the module alone."""

    @functools.wraps(forward)
    def checked(self, *args, **kwargs):
        if type(self).forward is checked and self.training:
            raise RuntimeError("not for training")
        return forward(self, *args, **kwargs)

    return checked


def telling(forward):
    @functools.wraps(forward)
    def told(self, x):
        return forward(self, x) * (2 if type(x) is Tensor else 3)

    return told


def telling_of_all(forward):
    @functools.wraps(forward)
    def told(*args):
        factor = 2 if type(args[1]) is Tensor else 3
        return forward(*args) * factor

    return told


def decorated(decorator):
    class Decorated(Logits):
        def __init_subclass__(cls):
            cls.forward = decorator(cls.forward)

    class Own(Decorated):
        def forward(self, x):
            return self.net(x) * 2

    return random_(nn.Sequential(Own(), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)))


@pytest.mark.parametrize("decorator", [checking, telling, telling_of_all])
def test_a_decorator_asks_about_the_module_it_is_given_or_about_values(decorator):
    model = decorated(decorator)
    fused = fuse(model)
    assert bool(fused.report.opaque) is (decorator is not checking)
    torch.testing.assert_close(outputs(fused, (X,)), outputs(model, (X,)), rtol=1e-4, atol=1e-4)


class Logits(nn.Module):
    """A wrapper as many write it around models of others."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))

    def forward(self, x):
        y = self.net(x)
        return y.logits if hasattr(y, "logits") else y


def test_what_a_layer_returns_has_the_attributes_of_a_tensor():
    model = random_(Logits())
    fused = fuse(model)
    assert not fused.report.opaque
    assert len(fused.report.applied) == 1
    torch.testing.assert_close(outputs(fused, (X,)), outputs(model, (X,)), rtol=1e-4, atol=1e-4)


class Layer(nn.Module):
    """Its annotation says less than it takes, as that of torchvision's DenseNet does."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, input: Tensor) -> Tensor:
        parts = [input] if isinstance(input, Tensor) else input
        return self.conv(torch.cat(parts, 1)[:, :3])


class Listing(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = Layer(), Layer()

    def forward(self, x):
        if x.sum() > 1e9:
            return x
        return self.second([x, self.first([x])])


@pytest.mark.parametrize("method", ["reshape_as", "view_as"])
def test_what_takes_the_shape_of_another_is_a_tensor(method):
    class Shaped(Logits):
        def forward(self, x):
            y = getattr(self.net(x).flatten(0, 1), method)(x[:, :1].expand(-1, 4, -1, -1))
            return y.logits if hasattr(y, "logits") else y

    model = random_(Shaped())
    fused = fuse(model)
    assert not fused.report.opaque
    torch.testing.assert_close(outputs(fused, (X,)), outputs(model, (X,)), rtol=1e-4, atol=1e-4)


def test_annotations_of_a_part_are_not_believed():
    model = random_(Listing())
    fused = fuse(model)
    assert {one.path for one in fused.report.opaque} == {"", "first", "second"}
    torch.testing.assert_close(outputs(fused, (X,)), outputs(model, (X,)))
    assert not capture(Layer()).opaque


class Maybe(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 1e9 else None


class Optional(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.maybe = nn.Conv2d(3, 3, 1), Maybe()

    def forward(self, x):
        found = self.maybe(x)
        return self.conv(x) if found is None else found


class Passed(Optional):
    def forward(self, x):
        return self.either(self.maybe(x), x)

    def either(self, found, x):
        return self.conv(x) if found is None else found


class PassedUp(Passed):
    def forward(self, x):
        return super().either(self.maybe(x), x)

    def either(self, found, x):
        return found


class PassedToAnother(PassedUp):
    def forward(self, x):
        return Passed.either(self, self.maybe(x), x)


def exists(value):
    return value is not None


class PassedToStatic(Passed):
    def forward(self, x):
        return self.pick(self.maybe(x), self.conv(x))

    @staticmethod
    def pick(found, other):
        return other if found is None else found


class Helped(Optional):
    def forward(self, x):
        found = self.maybe(x)
        return found if exists(found) else self.conv(x)


@pytest.mark.parametrize(
    "kind", [Optional, Passed, PassedUp, PassedToAnother, PassedToStatic, Helped]
)
def test_what_an_opaque_part_returns_may_be_none(kind):
    model = kind().eval()
    fused = fuse(model)
    assert "None" in fused.report.opaque[0].reason
    torch.testing.assert_close(outputs(fused, (X,)), outputs(model, (X,)))


def test_what_the_caller_of_fuse_asks_for_is_not_asked_by_the_model():
    model = random_(nn.Sequential(Maybe(), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)))
    fused = fuse(model)
    report = fused.report if fused is not None else None
    assert [part.path for part in report.opaque] == ["0"]
    assert len(report.applied) == 1


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x, mask):
        x = self.conv(x)
        return x if mask is None else x * mask


class MaskedBehind(Masked):
    def forward(self, x, mask):
        return self.first(self.conv(x), (mask,))

    def first(self, x, masks):
        return self.second(x, masks[0])

    def second(self, x, mask):
        return x if mask is None else x * mask


class MaskedByAnotherName(Masked):
    def forward(self, x, mask):
        known = mask
        return self.conv(x) * 2 if known is None else self.conv(x)


def multiplied(x, mask):
    for _ in range(3):
        x = x * 1 + 0
    for _ in range(3):
        x = x + 1 - 1
    return x if mask is None else x * mask


class MaskedByHelper(Masked):
    def forward(self, x, mask):
        return multiplied(self.conv(x), mask)


class MaskedByObject(Masked):
    def forward(self, x, mask):
        return TOOL.masked(self.conv(x), mask)


class MaskedInItsPart(Masked):
    def __init__(self):
        super().__init__()
        self.part = MaskedBehind()

    def forward(self, x, mask):
        return self.part(self.conv(x), mask)


class Gated(nn.Module):
    """Gives a part what it was given itself, which may be None."""

    def __init__(self):
        super().__init__()
        self.part = Masked()

    def forward(self, x, mask):
        return self.part(x, mask)


def test_a_part_that_asks_its_argument_for_none_is_told_so():
    (part,) = fuse(Gated().eval()).report.opaque
    assert part.path == "part"
    assert part.reason == "it asks whether its argument mask is None or the like"


class Mode(enum.Enum):
    ONCE, TWICE = 1, 2


class Chosen(nn.Module):
    """Compares what it is given with an object that is not None."""

    chosen = Mode.TWICE

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x, mode):
        return self.conv(x) * (2 if mode is Mode.TWICE else 1)


class ChosenByItself(Chosen):
    def forward(self, x, mode):
        return self.conv(x) * (2 if mode is self.chosen else 1)


def is_twice(mode):
    return mode is Mode.TWICE


class ChosenByHelper(Chosen):
    def forward(self, x, mode):
        return self.conv(x) * (2 if is_twice(mode) else 1)


class ChosenByAnotherName(Chosen):
    def forward(self, x, mode):
        known = mode
        return self.conv(x) * (2 if known is Mode.TWICE else 1)


class ChosenInItsPart(Chosen):
    def __init__(self):
        super().__init__()
        self.part = Chosen()

    def forward(self, x, mode):
        return self.part(self.conv(x), mode)


class Flagged(Chosen):
    def forward(self, x, mode):
        return self.conv(x) * (2 if mode is True else 1)


class FlaggedInside(Chosen):
    def forward(self, x, mode):
        return self.conv(x) * (2 if mode["twice"] is True else 1)


CHOSEN = {
    **dict.fromkeys((Chosen, ChosenByItself, ChosenByHelper, ChosenByAnotherName), Mode.TWICE),
    ChosenInItsPart: Mode.TWICE,
    Flagged: True,
    FlaggedInside: {"twice": True},
}


@pytest.mark.parametrize("kind", CHOSEN)
def test_an_argument_may_be_a_certain_object(kind):
    model = kind().eval()
    fused = fuse(model)
    assert " is None or the like" in fused.report.opaque[0].reason
    torch.testing.assert_close(fused(X, CHOSEN[kind]), model(X, CHOSEN[kind]))


class Choosing(Chosen):
    """Asks of its own what is no traced value."""

    chosen = doubled = True

    def is_doubled(self):
        return self.doubled

    def forward(self, x):
        y = self.conv(x) if self.is_doubled() is True else x
        chosen = self.chosen
        return y * 2 if chosen is True else y


class ToldByTruth(Chosen):
    def forward(self, x):
        return self.conv(x) * (2 if torch.is_tensor(x) is True else 1)


class LaidOut(Chosen):
    def forward(self, x):
        return self.conv(x) * (2 if x.is_contiguous() is True else 1)


class Compared(Chosen):
    def forward(self, x):
        return self.conv(x) * (2 if (x.shape[-1] > 2) is True else 1)


@pytest.mark.parametrize("kind", [Choosing, ToldByTruth, LaidOut, Compared])
def test_what_is_computed_may_be_true(kind):
    model = kind().eval()
    fused = fuse(model)
    assert bool(fused.report.opaque) is (kind is not Choosing)
    torch.testing.assert_close(fused(X), model(X))


class Scaled(Masked):
    def forward(self, x, mask, scale=None):
        return self.conv(x) * mask if scale is None else self.conv(x) * scale


class Keyworded(Masked):
    def forward(self, x, scale=None, *others, **options):
        return self.conv(x) if scale is None else self.conv(x) * scale


@pytest.mark.parametrize("kind", [Scaled, Keyworded])
def test_what_is_not_asked_for_none_may_stand_beside_what_is(kind):
    model, given = kind().eval(), (X, torch.tensor(2.0))[: 2 if kind is Scaled else 1]
    fused = fuse(model)
    assert not fused.report.opaque
    torch.testing.assert_close(fused(*given), model(*given))


MASKED = [
    *(Masked, MaskedBehind, MaskedByAnotherName, MaskedByHelper, MaskedByObject, MaskedInItsPart),
]


@pytest.mark.parametrize("mask", [None, torch.tensor(2.0)], ids=["none", "mask"])
@pytest.mark.parametrize("kind", MASKED)
def test_an_argument_may_be_none(kind, mask):
    model = kind().eval()
    assert " is None" in fuse(model).report.opaque[0].reason
    torch.testing.assert_close(outputs(fuse(model), (X, mask)), outputs(model, (X, mask)))


def test_messages_of_assertions_may_name_sizes():
    def run(self, x):
        torch._assert(x.dim() == 4, f"of {x.ndim} dimensions")
        return self.c(x)

    assert not fuse(Block(run, c=nn.Conv2d(3, 3, 1)).eval()).report.opaque


@pytest.mark.parametrize("run", [even, as_made_for, few, not_high, of_floats])
def test_a_graph_asserts_what_the_code_does_of_sizes(run):
    model = Block(run, c=nn.Conv2d(3, 3, 1)).eval()
    fused, higher = fuse(model), torch.randn(1, 3, 7, 6)
    assert not fused.report.opaque
    torch.testing.assert_close(fused(X), model(X))
    torch.testing.assert_close(script(fused)(X), model(X))
    for net in (model, fused, optimize(model, X)):
        with pytest.raises(AssertionError):
            net(higher)


def test_a_failing_assertion_says_its_text_or_its_line():
    higher = torch.randn(1, 3, 7, 6)
    with pytest.raises(AssertionError, match=r"^an odd height$"):
        fuse(Block(even, c=nn.Conv2d(3, 3, 1)).eval())(higher)
    with pytest.raises(AssertionError, match=r"^assert h == 6 and .*asserting.py:\d+\)$"):
        fuse(Block(as_made_for, c=nn.Conv2d(3, 3, 1)).eval())(higher)
    with pytest.raises(AssertionError, match=r"^mask$"):
        fuse(Block(says_an_argument, c=nn.Conv2d(3, 3, 1)).eval())(higher)


@pytest.mark.parametrize("run", [raising, raising_odd, raising_else, raising_in_a_loop])
def test_a_graph_raises_the_error_that_the_code_does_for_sizes(run, tmp_path):
    model = Block(run, c=nn.Conv2d(3, 3, 1)).eval()
    fused, higher = fuse(model), torch.randn(1, 3, 7, 6)
    assert not fused.report.opaque
    torch.testing.assert_close(fused(X), model(X))
    torch.testing.assert_close(fuse(fused)(X), model(X))
    torch.testing.assert_close(script(fused)(X), model(X))
    save(optimize(model, X), tmp_path / "net")
    with pytest.raises(Exception) as own:
        model(higher)
    for net in (fused, fuse(fused), optimize(model, X), load(tmp_path / "net")):
        with pytest.raises(own.type) as raised:
            net(higher)
        assert raised.type is own.type


def unpacking_sizes(self, x):
    n, c, h, w = x.shape
    return x.view(n, c, -1).sum(-1) * h * w


def unpacking_two_sizes(self, x):
    h, w = x.shape[2:]
    return x * h + w


def unpacking_channels(self, x):
    red, green, blue = x.unbind(1)
    return red + green * 2 + blue * 3


def unpacking_chunks(self, x):
    one, two = torch.split(x, 2, dim=1)
    return one.mean() + two


UNPACKING = {
    unpacking_sizes: [X[0], X[..., None]],
    unpacking_two_sizes: [X[0], X[..., None]],
    unpacking_channels: [X[:, :2], torch.cat([X, X], 1)],
    unpacking_chunks: [X[:, :2], torch.cat([X, X], 1)],
}


@pytest.mark.parametrize("run", UNPACKING)
def test_a_graph_refuses_what_the_code_cannot_unpack(run, tmp_path):
    model = Block(run).eval()
    fused = fuse(model)
    assert not fused.report.opaque
    torch.testing.assert_close(fused(X), model(X))
    torch.testing.assert_close(script(fused)(X), model(X))
    save(optimize(model, X), tmp_path / "net")
    for net in (model, fused, fuse(fused), optimize(model, X), load(tmp_path / "net")):
        for other in UNPACKING[run]:
            with pytest.raises(ValueError, match="values to unpack"):
                net(other)


def test_torch_fx_traces_a_graph_that_counts_sizes():
    fused = fuse(Block(unpacking_sizes).eval())
    torch.testing.assert_close(fx.symbolic_trace(fused)(X), fused(X))


def test_what_a_part_raises_for_sizes_can_be_caught_around_it():
    class Caught(Careful):
        def forward(self, x):
            try:
                return self.part(x)
            except ValueError:
                return self.conv(x)

    model, higher = Caught().eval(), torch.randn(1, 3, 7, 6)
    model.part = Block(raising, c=nn.Conv2d(3, 3, 1)).eval()
    for net in (fuse(model), optimize(model, X)):
        for x in (X, higher):
            torch.testing.assert_close(net(x), model(x))


def caught_by_a_helper(self, x):
    return fitting(x, self.c)


def fitting(x, run):
    try:
        if x.shape[2] > 6:
            raise ValueError("too high")
        assert x.shape[3] == 6
        return run(x)
    except (ValueError, AssertionError):
        return run(x[:, :, :6, :6])


def test_what_a_helper_catches_is_no_assertion():
    model = Block(caught_by_a_helper, c=nn.Conv2d(3, 3, 1)).eval()
    for x in (X, torch.randn(1, 3, 7, 6), torch.randn(1, 3, 6, 8)):
        torch.testing.assert_close(fuse(model)(x), model(x))


def test_an_error_for_sizes_says_its_text_or_its_line():
    higher = torch.randn(1, 3, 7, 6)
    with pytest.raises(ValueError, match=r"^not as high$"):
        fuse(Block(raising, c=nn.Conv2d(3, 3, 1)).eval())(higher)
    with pytest.raises(RuntimeError, match=r"^if h % 2 or w % 2: \(asserting.py:\d+\)$"):
        fuse(Block(raising_odd, c=nn.Conv2d(3, 3, 1)).eval())(higher)


def test_what_einops_makes_of_an_image_is_known_not_to_be_none():
    einops = pytest.importorskip("einops")

    def run(self, x):
        y = einops.rearrange(self.c(x), "b c h w -> b h w c")
        return y if y is None else y * 2

    model = Block(run, c=nn.Conv2d(3, 3, 1)).eval()
    fused = fuse(model)
    assert not fused.report.opaque
    for x in (X, torch.randn(4, 3, 3, 5)):
        torch.testing.assert_close(fused(x), model(x))


def test_blocks_of_timms_swin_which_ask_for_a_mask_are_traced():
    mend_torchvision()  # timm needs it.
    swin = pytest.importorskip("timm.models.swin_transformer")
    model = swin.SwinTransformerBlock(8, (8, 8), num_heads=2, window_size=4, shift_size=2).eval()
    fused = fuse(model)
    assert not fused.report.opaque
    for batch in (1, 3):
        x = torch.randn(batch, 8, 8, 8)
        torch.testing.assert_close(fused(x), model(x))
    for net in (model, fused):
        with pytest.raises(RuntimeError):
            net(torch.randn(1, 12, 8, 8))


NOT_ASSERTING = [raising_its_own, raising_and_counting, raising_at_times]


@pytest.mark.parametrize("run", NOT_ASSERTING)
def test_a_branch_that_does_more_than_raise_is_not_traced(run):
    fused = fuse(Block(run, c=nn.Conv2d(3, 3, 1)).eval())
    assert "branches on a size" in fused.report.opaque[0].reason


@pytest.mark.parametrize(
    ("run", "what"), [(either, "a size"), (branching, "a size"), (of_values, "data")]
)
def test_what_more_than_an_assertion_depends_on_is_not_taken_for_one(run, what):
    model, higher = Block(run, c=nn.Conv2d(3, 3, 1)).eval(), torch.randn(1, 3, 7, 6)
    fused = fuse(model)
    assert f"branches on {what}" in fused.report.opaque[0].reason
    torch.testing.assert_close(fused(higher), model(higher))


class Careful(nn.Module):
    """Catches what its part raises."""

    def __init__(self):
        super().__init__()
        self.conv, self.part = nn.Conv2d(3, 3, 1), Raises()

    def forward(self, x):
        try:
            return self.part(x)
        except KeyError:
            return self.conv(x)


class Raises(nn.Module):
    def forward(self, x):
        raise KeyError("not here")


class InHalf(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.conv(x)


class InFull(InHalf):
    def forward(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.conv(x.float())


class ByClass(InHalf):
    def forward(self, x):
        return self.conv(x).type(torch.FloatTensor)


HIDDEN = {
    Careful: "it catches errors, which a graph would not",
    InHalf: "it runs parts in another precision, or with gradients",
    InFull: "it sets autocast while it runs",
    ByClass: "it names a type by a class of torch's, which generated code cannot say",
}


@pytest.mark.parametrize("kind", HIDDEN)
def test_what_no_graph_shows_stays_code(kind):
    model = kind().eval()
    fused = fuse(model)
    reasons = [part.reason.partition(" (test_questions.py:")[0] for part in fused.report.opaque]
    assert HIDDEN[kind] in reasons
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind is InFull):
        ours, theirs = outputs(fused, (X,)), outputs(model, (X,))
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs)


class Halved(nn.Module):
    """Is traced with sizes known alone."""

    def __init__(self):
        super().__init__()
        self.net = nn.Conv2d(3, 4, 1)

    def forward(self, x):
        y = self.net(x)
        y = y.logits if hasattr(y, "logits") else y
        return y / 2 if y.shape[-1] % 2 == 0 else y


def test_with_sizes_known_values_have_the_attributes_of_tensors_too():
    model = Halved().eval()
    graph, opaque = capture_sized(capture(model).module, [X])
    assert not opaque
    torch.testing.assert_close(outputs(graph, (X,)), outputs(model, (X,)))


class Calling(nn.Module):
    def forward(self, x):
        return self.first(x) + self.second(x) + self.third(x)

    def first(self, x):
        return x.abs()

    def second(self, x):
        return self.fourth(x)

    def third(self, x):
        return x.neg()

    def fourth(self, x):
        return x


def test_functions_are_found_in_one_order_whatever_the_hashes_of_their_names(monkeypatch):
    class Backwards(set):
        def __iter__(self):
            return reversed([*super().__iter__()])

    found = [*reached.functions_of(Calling())]
    names_in = reached.names_in
    monkeypatch.setattr(reached, "names_in", lambda code: Backwards(names_in(code)))
    assert [*reached.functions_of(Calling())] == found
    assert len(found) >= 5


def test_a_table_is_resized_to_the_size_of_an_input():
    def run(self, x):
        y = self.n(self.c(x))
        return y + nn.functional.interpolate(self.table, size=y.shape[2:], mode="bilinear")

    model = random_(Block(run, c=nn.Conv2d(3, 4, 1), n=nn.BatchNorm2d(4)))
    model.register_buffer("table", torch.rand(1, 4, 2, 2))
    fused = fuse(model)
    assert not fused.report.opaque
    assert fused.report.sites[0].applied
    for x in (X, torch.randn(1, 3, 7, 5)):
        torch.testing.assert_close(outputs(fused, (x,)), outputs(model, (x,)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "resize",
    [
        lambda y, z: nn.functional.interpolate(mode="bilinear", size=z.shape[2:], input=y),
        lambda y, z: nn.functional.interpolate(y, z.shape[2:], None, "bilinear", False),
    ],
    ids=["in any order", "by place"],
)
def test_a_resize_is_called_with_its_image_first_and_all_else_by_name(resize):
    model = random_(Block(lambda self, x: resize(self.c(x), x), c=nn.Conv2d(3, 4, 3, 2)))
    [call] = fuse(model).graph.find_nodes(op="call_function", target=nn.functional.interpolate)
    assert [str(one) for one in call.args] == ["c"]
    assert call.kwargs["mode"] == "bilinear"
    assert {"size", "antialias"} <= call.kwargs.keys()
    for one in (fuse(model), optimize(model, X)):
        torch.testing.assert_close(outputs(one, (X,)), outputs(model, (X,)), rtol=1e-4, atol=1e-4)


def test_code_in_threads_of_its_own_stays_a_call():
    class Threaded(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x):
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(self.conv, x).result()

    (opaque,) = fuse(Threaded()).report.opaque
    assert opaque.reason.startswith("it runs code in threads of its own")
