"""Which nodes write into what was there before them."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from nhwc import fuse, optimize
from nhwc.graph import follow_writes, puts_back, written_into


class Calls(nn.Module):
    def __init__(self, does):
        super().__init__()
        self.does, self.act, self.inplace = does, nn.ReLU(), nn.ReLU(inplace=True)

    def forward(self, x):
        return self.does(self, x.exp())


def written(does):
    gm = fx.symbolic_trace(Calls(does))
    return [(node.name, str(written_into(node))) for node in gm.graph.nodes if written_into(node)]


@pytest.mark.parametrize(
    ("does", "node"),
    [
        (lambda m, y: y.add_(1), "add_"),
        (lambda m, y: torch.relu_(y), "relu_"),
        (lambda m, y: F.relu(y, inplace=True), "relu"),
        (lambda m, y: F.relu(y, True), "relu"),
        (lambda m, y: F.hardtanh(y, 0, 1, True), "hardtanh"),
        (lambda m, y: torch.add(y.cos(), 1, out=y), "add"),
        (lambda m, y: m.inplace(y), "inplace"),
    ],
)
def test_writes(does, node):
    assert written(does) == [(node, "exp")]


@pytest.mark.parametrize("function", [operator.imul, operator.itruediv, operator.setitem])
def test_operators_that_write(function):
    graph = fx.Graph()
    value = graph.placeholder("x")
    assert written_into(graph.call_function(function, (value, 2))) is value


@pytest.mark.parametrize(
    "does",
    [
        lambda m, y: y.add(1),
        lambda m, y: m.act(y) + F.relu(y) + F.relu(y, False),
        lambda m, y: (y > 1) & (y < 2),
        lambda m, y: y.__add__(1),
        lambda m, y: torch.max(y, 1)[0],
    ],
)
def test_does_not_write(does):
    assert written(does) == []


class WritesAfter(nn.Module):
    """Reads what it computed again, after it wrote into what may be a view of that."""

    def __init__(self, view):
        super().__init__()
        self.conv, self.norm, self.view = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), view

    def forward(self, x):
        y = self.norm(self.conv(x))
        z = self.view(y)
        z += 1
        return y.sum() + z.sum()


@pytest.mark.parametrize(
    "view",
    [
        lambda y: +y,
        lambda y: y.cpu(),
        lambda y: y.conj(),
        lambda y: y.adjoint(),
        lambda y: y.as_strided((4,), (1,)),
        lambda y: torch.positive(y),
        lambda y: torch.moveaxis(y, 1, 2),
        lambda y: torch.hsplit(y, 2)[0],
        lambda y: torch.unsafe_chunk(y, 2, 1)[0],
        lambda y: torch.atleast_3d(y),
        lambda y: torch.dequantize(y),
        lambda y: torch.broadcast_tensors(y, y)[0],
        lambda y: torch.ops.aten.view.default(y, [-1]),
        lambda y: torch.ops.aten.add_.Tensor(y, 1),
    ],
)
def test_what_is_written_through_a_view_is_seen(view):
    torch.manual_seed(0)
    model, x = WritesAfter(view).eval(), torch.randn(2, 4, 4, 4)
    with torch.no_grad():
        torch.testing.assert_close(fuse(model)(x), model(x), rtol=1e-4, atol=1e-4)


def test_a_schema_tells_what_an_overload_writes_into():
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y_", default_value=3)
    aten = torch.ops.aten
    assert written_into(graph.call_function(aten.add_.Tensor, (x, 1))) is x
    assert written_into(graph.call_function(aten.max.dim_max, (x, 1), {"max": y})) is y
    assert written_into(graph.call_function(aten.add.Tensor, (x, 1))) is None
    assert written_into(graph.call_method("__imul__", (x, 2))) is x
    assert written_into(y) is None


def test_a_long_graph_is_searched_for_what_is_put_back_at_its_end():
    graph = fx.Graph()
    x = y = graph.placeholder("x")
    for _ in range(3000):
        y = graph.call_method("neg", (y,))
    back = graph.call_method("copy_", (x, y))
    graph.output(y)
    assert [node for node in graph.nodes if puts_back(node)] == [back]


@pytest.mark.parametrize(
    "does",
    [
        lambda m, y: m.inplace(y),
        lambda m, y: F.relu(y, inplace=True),
        lambda m, y: y.relu_(),
        lambda m, y: torch.relu_(y),
    ],
)
def test_a_value_that_was_written_into_stands_for_the_result(does):
    """As features that a model keeps, before the next layer writes into them."""

    def kept(m, y):
        written = does(m, y)
        return written * 2, y

    model = Calls(kept)
    x = torch.randn(2, 3)
    plain = fx.symbolic_trace(model)
    follow_writes(plain)
    plain.recompile()
    for gm in (fuse(model), plain):
        [output] = gm.graph.find_nodes(op="output")
        assert written_into(output.args[0][1]) is not None
        torch.testing.assert_close(gm(x), model(x), rtol=0, atol=0)


def double(x):
    x.mul_(2)


_LIBRARY = torch.library.Library("nhwc_writes_test", "DEF")
_LIBRARY.define("double(Tensor(a!) x) -> ()")
_LIBRARY.define("double_(Tensor(a!) x) -> Tensor")
_LIBRARY.impl("double", double, "CompositeExplicitAutograd")
_LIBRARY.impl("double_", lambda x: x.mul_(2) + 1, "CompositeExplicitAutograd")
_OURS = torch.ops.nhwc_writes_test


@pytest.mark.parametrize("write", [_OURS.double.default, _OURS.double_, _OURS.double_.default])
@pytest.mark.parametrize("into_input", [False, True])
@pytest.mark.parametrize("made", [lambda model, x: fuse(model), optimize], ids=["fuse", "optimize"])
@torch.no_grad()
def test_an_operator_of_others_may_return_anything(write, into_input, made):
    """The schema says that it does not return what it wrote into."""

    class Writes(nn.Module):
        def forward(self, x):
            y = x if into_input else x.exp()
            write(y)
            return y.relu()

    model, x = Writes().eval(), torch.randn(3, 3)
    found, expected = x.clone(), x.clone()
    torch.testing.assert_close(made(model, x.clone())(found), model(expected))
    torch.testing.assert_close(found, expected)


def test_what_returns_nothing_stands_for_nothing():
    graph = fx.Graph()
    y = graph.call_method("exp", (graph.placeholder("x"),))
    graph.call_function(operator.setitem, (y, 0, 3.0))
    graph.output(y)
    gm = fx.GraphModule(nn.Module(), graph)
    follow_writes(gm)
    gm.recompile()
    assert gm(torch.zeros(2)).tolist() == [3.0, 1.0]
