"""What a model returns inside of a dict, a dataclass or a named tuple is what it returns alone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, fx, nn

import nhwc
from nhwc.graph import capture
from nhwc.graph.nodes.results import contents_of, is_returned, opened, returned
from nhwc.graph.tracing.recorded import record_run
from nhwc.machine.environment import Environment
from nhwc.plan import make_plan
from nhwc.plan.ledger import Ledger

from ..optimizing import won_by

X = torch.randn(2, 3, 12, 10, generator=torch.Generator().manual_seed(1))


@dataclass
class Fields:
    image: Tensor
    view: Tensor
    made: Tensor


class Named(NamedTuple):
    image: Tensor
    view: Tensor
    made: Tensor


class Attributes(OrderedDict[str, Tensor]):
    """As transformers' outputs: a dict whose items are attributes, too."""

    def __init__(self, **items: Tensor) -> None:
        super().__init__(**items)
        self.__dict__.update(items)


def nested(**items: Tensor) -> Any:
    return [OrderedDict(rest=OrderedDict(items)), 1]


class Holds(nn.Module):
    """It returns an image that eager lays out anew, a part of its input, and a constant."""

    def __init__(self, kind: Callable[..., Any]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, padding_mode="circular")
        self.register_buffer("table", torch.arange(4.0))
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        return self.kind(image=self.conv(x), view=x[:, 1:], made=self.table * 2)


KINDS = [dict, OrderedDict, Attributes, Fields, Named, nested]


def parts(result: Any) -> list[Tensor]:
    if isinstance(result, list):
        result = result[0]["rest"]
    if isinstance(result, tuple):
        return list(result)
    return list((result if isinstance(result, dict) else vars(result)).values())


def inner(result: Any) -> type:
    return type(result[0]["rest"] if isinstance(result, list) else result)


@pytest.mark.parametrize("verb", ["fuse", "optimize"])
@pytest.mark.parametrize("kind", KINDS)
def test_inside_of_a_container(kind: Callable[..., Any], verb: str) -> None:
    model, x = Holds(kind).eval(), X.to(memory_format=torch.channels_last)
    ours = nhwc.fuse(model) if verb == "fuse" else nhwc.optimize(model, x)
    with torch.no_grad():
        expected, found = model(x), ours(x)
        assert inner(found) is inner(expected)
        for one, other in zip(parts(found), parts(expected), strict=True):
            assert one.stride() == other.stride()
            torch.testing.assert_close(one, other)
        assert parts(found)[1].data_ptr() == x[:, 1:].data_ptr()
        before = parts(found)[2].clone()
        parts(found)[2].fill_(7)
        torch.testing.assert_close(parts(ours(x))[2], before)


class Boxes(list[Tensor]):
    pass


class Pair(tuple[Tensor, ...]):
    pass


@dataclass
class Counted:
    image: Tensor
    count: int = 1

    def __post_init__(self) -> None:
        self.count += 1


@dataclass
class Asked:
    image: Tensor
    size: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.size = len(self.image.shape)


@dataclass
class Both(dict[str, Tensor]):
    image: Tensor

    def __hash__(self) -> int:
        return 0


class OfKind(nn.Module):
    def __init__(self, kind: Callable[..., Any], decides: bool) -> None:
        super().__init__()
        self.conv, self.kind, self.decides = nn.Conv2d(3, 8, 3), kind, decides

    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        if self.decides and x.shape[0] > 1:
            y = y * 2
        return self.kind(y)


@pytest.mark.parametrize("verb", ["fuse", "optimize"])
@pytest.mark.parametrize("decides", [False, True])
@pytest.mark.parametrize(
    "kind",
    [
        lambda y: Boxes([y]),
        lambda y: Pair((y, y * 2)),
        lambda y: [y, Pair((y,))],
        *(Counted, Asked, Both),
        lambda y: y.shape,
        lambda y: {"image": y, "sizes": [y.shape[1:]]},
    ],
    ids=["list", "tuple", "inside", "counted", "asked", "both", "size", "sizes"],
)
@torch.no_grad()
def test_what_a_graph_cannot_make_again_keeps_its_kind(
    kind: Callable[..., Any], decides: bool, verb: str
) -> None:
    model = OfKind(kind, decides).eval()
    ours = nhwc.fuse(model) if verb == "fuse" else won_by("plan", model, X)
    told(ours(X), model(X))


def told(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected)
    elif isinstance(expected, int | str):
        assert found == expected
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            told(one, other)
    else:
        attributes = [list(getattr(one, "__dict__", {}).items()) for one in (found, expected)]
        told(*attributes)
        if isinstance(expected, dict):
            told([*found.items()], [*expected.items()])


@pytest.mark.parametrize("verb", ["fuse", "optimize"])
def test_an_ordered_dict_comes_back_from_a_file(verb: str, tmp_path: Any) -> None:
    model = Holds(OrderedDict).eval()
    ours = nhwc.fuse(model) if verb == "fuse" else nhwc.optimize(model, X)
    nhwc.save(ours, tmp_path / "model.nhwc")
    found, expected = nhwc.load(tmp_path / "model.nhwc")(X), model(X)
    assert type(found) is OrderedDict
    assert list(found) == list(expected)
    torch.testing.assert_close(found["image"], expected["image"])


@pytest.mark.filterwarnings("ignore:The TorchScript type system")
def test_torchscript_takes_a_graph_with_one_whatever_forward_declares() -> None:
    model = Holds(OrderedDict).eval()
    found = torch.jit.script(nhwc.fuse(model))(X)
    torch.testing.assert_close(found["image"], model(X)["image"])


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_caller_gets(kind: Callable[..., Any]) -> None:
    graph = capture(Holds(kind).eval()).module.graph
    names = {node.name for node in returned(graph)}
    assert {"conv", "getitem", "clone"} == names
    alone = [node for node in graph.nodes if contents_of(node) is None]
    assert all(is_returned(node) == (node.name in names) for node in alone)
    assert parts(opened(graph.output_node().args[0]))[0].name == "conv"


@pytest.mark.parametrize("kind", KINDS)
def test_what_only_holds_results_is_no_layer(kind: Callable[..., Any]) -> None:
    model = Holds(kind).eval()
    with torch.no_grad():
        plan = make_plan(capture(model).module, (X,), Ledger.of(Environment.here()))
    assert {layer.name for layer in plan.layers} <= {"conv_pad", "conv", "getitem", "clone"}


def test_a_program_tells_its_values_apart_from_what_holds_them() -> None:
    """A graph on a GPU writes these values in each call, and returns copies of them."""
    model = Holds(Fields).eval()
    with torch.no_grad():
        program = make_plan(capture(model).module, (X,), Ledger.of(Environment.here())).program
        values = program.returned(X)
        found, again = program.result(values), program.result(values)
    assert type(found) is Fields
    assert found is not again
    assert {id(one) for one in parts(found)} == {*map(id, values.values())}


class Sizes(nn.Module):
    """It returns sizes that do not follow from its input, and those that do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.size = nn.Conv2d(3, 4, 3), torch.Size([4, 4])

    def forward(self, x: Tensor) -> Any:
        y = self.conv(x.reshape(torch.Size([2, 3, 12, 10])))
        both = torch.broadcast_shapes((2, 1), (1, 3))
        return y, self.size, {"both": [both], "fields": Named(x, y.shape, self.size)}, (1, 2)


@pytest.mark.parametrize("verb", ["fuse", "optimize", "file"])
def test_a_constant_size_stays_one(verb: str, tmp_path: Path) -> None:
    net = Sizes().eval()
    if verb == "file":
        nhwc.save(net, tmp_path / "model.nhwc")
        found = nhwc.load(tmp_path / "model.nhwc")
    else:
        found = nhwc.fuse(net) if verb == "fuse" else nhwc.optimize(net, X)
    with torch.no_grad():
        expected, given = net(X), found(X)
    assert given[1:2] == expected[1:2]
    held = (given[1], given[2]["both"][0], *given[2]["fields"][1:])
    assert [type(size) for size in held] == [torch.Size] * 4
    assert held[1:] == ((2, 3), (2, 4, 10, 8), (4, 4))
    assert type(given[3]) is tuple


class Laid(nn.Module):
    """It returns constants that share numbers, that leave gaps, and that do neither."""

    def forward(self, x: Tensor) -> Any:
        grid = torch.linspace(-1, 1, 4).expand(3, 4)
        gaps, turned = torch.arange(12.0)[1::3], torch.arange(6.0).view(2, 3).t()
        return x.relu(), grid, gaps, turned


@pytest.mark.parametrize("verb", ["fuse", "optimize", "load"])
def test_a_constant_is_laid_out_as_the_model_makes_it(verb: str, tmp_path: Any) -> None:
    net = Laid().eval()
    found = nhwc.fuse(net) if verb == "fuse" else nhwc.optimize(net, X)
    if verb == "load":
        nhwc.save(found, tmp_path / "laid.nhwc")
        found = nhwc.load(tmp_path / "laid.nhwc")
    expected = net(X)
    for _ in range(2):
        given = found(X)
        torch.testing.assert_close(given, expected, rtol=0, atol=0, check_stride=True)
        given[2].zero_()
        given[3].zero_()


class Holding(nn.Module):
    """It has such constants from the beginning, one of nothing among them."""

    def __init__(self) -> None:
        super().__init__()
        self.grid = torch.linspace(-1, 1, 4)[:, None].expand(4, 3)
        self.gaps = torch.arange(12.0)[1::3]
        self.nothing = self.gaps[:0]

    def forward(self, x: Tensor) -> Any:
        return x.relu(), self.grid, self.gaps, self.nothing


@pytest.mark.parametrize("verb", [nhwc.fuse, lambda net: nhwc.optimize(net, X)])
def test_a_file_keeps_how_constants_lie(verb: Any, tmp_path: Any) -> None:
    net = Holding().eval()
    nhwc.save(verb(net), tmp_path / "held.nhwc")
    given, expected = nhwc.load(tmp_path / "held.nhwc")(X), net(X)
    torch.testing.assert_close(given, expected, rtol=0, atol=0)
    assert [one.stride() for one in given[:3]] == [one.stride() for one in expected[:3]]


class Box:
    def __init__(self, value):
        self.value = value


class Boxed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Conv2d(3, 8, 1)

    def forward(self, x):
        return Box(self.body(x))


def test_what_no_graph_can_return_is_named():
    model = Boxed().eval()
    assert capture(model).opaque[0].reason == "it returns a Box"
    with pytest.raises(fx.proxy.TraceError, match=r"^it returns a Box$"):
        record_run(capture(model).module, [X])
