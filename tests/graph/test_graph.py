"""Capture: what a graph is made of, and what torchvision's and timm's whole models come to."""

import math
import pickle
import warnings
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from nhwc import fuse, load, load_model, optimize, save
from nhwc.graph import capture, graphs
from nhwc.graph.tracing.shells import open_shell
from nhwc.passes import PASSES

from ..fusing import Block, assert_same, fuse_checked, has_no_norm, outputs, random_, script

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclass
class Result:
    value: Tensor
    parts: list[Tensor]


RESULTS = {
    "tuple": lambda self, x: (self.c(x), x),
    "named tuple": lambda self, x: Pair(self.c(x), x),
    "dict": lambda self, x: {"a": self.c(x), "b": {"c": [x]}},
    "dataclass": lambda self, x: Result(self.c(x), [x]),
}


@pytest.mark.parametrize("name", RESULTS)
def test_kinds_of_results(name):
    model = Block(RESULTS[name], c=nn.Conv2d(3, 3, 1)).eval()
    captured = capture(model)
    assert not captured.opaque
    ours, theirs = outputs(captured.module, (X,)), outputs(model, (X,))
    assert type(ours) is type(theirs)
    if name == "dataclass":
        ours, theirs = vars(ours), vars(theirs)
    torch.testing.assert_close(ours, theirs)


PASSING = {
    "a sequence of its parts": lambda self, x: nn.Sequential(self.c, self.n, nn.ReLU())(x),
    "a part of a list": lambda self, x: nn.ModuleList([self.n, self.c])[1](x),
    "layers without weights": lambda self, x: nn.MaxPool2d(2)(nn.Sequential(nn.Softmax(1))(x)) * 2,
    "a sequence in a sequence": lambda self, x: nn.Sequential(nn.Sequential(self.c), self.n)(x),
}


@pytest.mark.parametrize("name", PASSING)
def test_modules_that_code_makes_for_a_call_are_traced_through(name):
    model = random_(Block(PASSING[name], c=nn.Conv2d(3, 3, 1), n=nn.BatchNorm2d(3)).eval())
    captured = capture(model)
    assert not captured.opaque
    assert_same(model, captured.module, X)


class Keeps(nn.Module):
    def forward(self, x):
        self.last = x.mean()
        return x


def test_a_module_in_hiding_may_keep_what_it_saw():
    hidden = [Keeps()]
    model = Block(lambda self, x: hidden[0](self.c(x)), c=nn.Conv2d(3, 3, 1)).eval()
    captured = capture(model)
    assert [part.path for part in captured.opaque] == [""]
    assert not hasattr(hidden[0], "last")
    assert_same(model, captured.module, X)
    assert isinstance(hidden[0].last, Tensor)


def test_a_layer_with_weights_that_code_makes_for_a_call_is_its_own():
    model = Block(lambda self, x: nn.Conv2d(3, 3, 1)(self.c(x)), c=nn.Conv2d(3, 3, 1)).eval()
    captured = capture(model)
    assert [part.path for part in captured.opaque] == [""]
    found = []
    for run in (model, captured.module):
        torch.manual_seed(0)
        found.append(outputs(run, (X,)))
    torch.testing.assert_close(*found)


class FromDict(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, batch: dict[str, Tensor], weight: Tensor):
        return self.conv(batch["image"]) * weight


def test_inputs_in_a_dict_and_by_keyword():
    model = FromDict().eval()
    graph = capture(model).module
    result = graph(batch={"image": X}, weight=X)
    torch.testing.assert_close(result, model({"image": X}, X))
    torch.testing.assert_close(script(graph)({"image": X}, X), result)


def test_sizes_stay_sizes_of_the_input():
    def run(self, x):
        n, c, h, w = x.shape
        return self.c(x).reshape(n, c * h, w) + torch.arange(w, device=x.device)

    model = Block(run, c=nn.Conv2d(3, 3, 1)).eval()
    graph = capture(model).module
    for size in (4, 9):
        assert_same(model, graph, torch.randn(3, 3, size, size + 1))


def test_what_code_asks_of_its_weights_is_known():
    def run(self, x):
        assert isinstance(self.weight, nn.Parameter)
        assert isinstance(self.weight, torch.Tensor)
        assert not isinstance(x, nn.Parameter)
        if self.weight.shape[-1] == 3 and self.weight.size(0) > 2 and self.weight.ndim == 4:
            x = self.c(x)
        return nn.functional.conv2d(x, self.weight, padding=self.weight.shape[2] // 2) * self.scale

    model = Block(run, c=nn.Conv2d(3, 3, 1)).eval()
    model.weight = nn.Parameter(torch.randn(4, 3, 3, 3))
    model.register_buffer("scale", torch.rand(4, 1, 1))
    captured = capture(model)
    assert not captured.opaque
    kinds = [(node.op, node.target) for node in captured.module.graph.nodes]
    assert kinds.count(("get_attr", "weight")) == kinds.count(("get_attr", "scale")) == 1
    assert ("call_module", "c") in kinds
    assert_same(model, captured.module, X)


def test_who_reads_a_value_after_a_write_reads_the_write():
    def run(self, x):
        x = self.c(x)
        same = x
        x.add_(1)
        nn.functional.relu(x, inplace=True)
        torch.mul(x, 2, out=same)
        return x + same

    model = Block(run, c=nn.Conv2d(3, 3, 1)).eval()
    graph = capture(model).module
    assert_same(model, graph, X)
    assert all(len(node.users) == 1 for node in graph.graph.nodes if node.op.startswith("call"))


def test_the_names_of_modules_are_kept():
    graph = capture(load_model("resnet18")).module
    names = set(graph.state_dict())
    assert names == set(load_model("resnet18").state_dict())


def test_capturing_leaves_no_trace_of_the_tracer():
    model = load_model("resnet18")
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    capture(model)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


def test_a_captured_graph_pickles_with_functions_the_tracer_kept_whole():
    graph = capture(load_model("swin_t")).module
    again = pickle.loads(pickle.dumps(graph))
    assert_same(graph, again, torch.randn(1, 3, 64, 64))


def image_models():
    return [
        ("torchvision:lraspp_mobilenet_v3_large", 47, []),
        ("torchvision:deeplabv3_resnet50", 60, []),
        ("timm:hrnet_w18_small", 91, []),
        ("timm:ghostnet_050", 80, []),
        ("timm:mobilevit_xxs", 32, ["stages.2.1", "stages.3.1", "stages.4.1"]),
    ]


@pytest.mark.parametrize(("name", "folded", "opaque"), image_models())
def test_whole_models(name, folded, opaque):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = random_(load_model(name))
    fused = fuse_checked(model, torch.randn(1, 3, 64, 64))
    assert len(fused.report.applied) == folded
    assert [part.path for part in fused.report.opaque] == opaque
    assert has_no_norm(fused)


@pytest.mark.parametrize("name", ["ssdlite320_mobilenet_v3_large", "fcos_resnet50_fpn"])
def test_detection_models_are_fused_around_their_loops(name):
    model = random_(load_model(f"torchvision:{name}"))
    fused = fuse(model)
    assert has_no_norm(fused)
    assert fused.report.opaque[0].path == ""
    assert "loops over data" in fused.report.opaque[0].reason
    assert {"backbone"} <= {path.split(".")[0] for path, _ in graphs(fused) if path}
    # What comes after the heads needs compiled operators that not every torchvision has.
    x = torch.randn(1, 3, 64, 64)
    features, expected = outputs(fused.model.backbone, (x,)), outputs(model.backbone, (x,))
    for level, wanted in expected.items():
        assert (features[level] - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    heads, wanted = (
        outputs(other.head, (list(expected.values()),)) for other in (fused.model, model)
    )
    torch.testing.assert_close(heads, wanted, rtol=1e-4, atol=1e-4)


def test_code_that_cannot_be_read_keeps_its_children():
    space = {"nn": nn}
    exec(  # a class without source
        "class Hidden(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.child = nn.Sequential(nn.Conv2d(3, 3, 1))\n"
        "    def forward(self, x):\n"
        "        return self.child(x) if x.sum() > 0 else x\n",
        space,
    )
    shell = space["Hidden"]()
    child = shell.child
    open_shell(shell, "", lambda module, path: nn.Identity())
    assert shell.child is child


class Grid(nn.Module):
    """Coordinates of the pixels: tensors made of sizes and devices that are traced."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 1)

    def forward(self, x):
        h, w = x.shape[2:]
        rows = torch.linspace(-1, 1, h, device=x.device)
        columns = torch.arange(w, device=x.device, dtype=x.dtype)
        grid = torch.stack(torch.meshgrid(rows, columns, indexing="ij"))
        return torch.cat(x.chunk(2), 1) + self.conv(grid[None]).repeat(1, 2, 1, 1) * torch.tensor(h)


class Masked(nn.Module):
    def forward(self, x):
        size = x.shape[-1]
        return (x @ x.mT + torch.full((size, size), -math.inf).triu(1)).softmax(-1) + torch.eye(
            size
        )


class WritesInto(nn.Module):
    """What it made is read before it is written to, and after."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        made = torch.zeros(x.shape[0], 3, 6, 6, device=x.device)
        before = self.conv(made)
        made.copy_(x)
        return before - self.conv(made)


class WritesByOut(nn.Module):
    def forward(self, x):
        made = torch.ones(x.shape, dtype=x.dtype)
        torch.add(x, 1, out=made)
        return made * 2


@pytest.mark.parametrize("kind", [Grid, Masked, WritesInto, WritesByOut])
def test_tensors_made_of_traced_sizes_are_made_anew_each_time(kind):
    model, make = kind().eval(), torch.arange
    captured = capture(model)
    assert not captured.opaque
    assert torch.arange is make
    for batch in (2, 4):
        x = torch.randn(batch, 3, 6, 6)
        torch.testing.assert_close(captured.module(x), model(x))
    assert pickle.loads(pickle.dumps(captured.module)).code == captured.module.code


class WritesIntoView(nn.Module):
    def forward(self, x):
        made = torch.zeros(x.shape[0], 3, 6, 6)
        view = made[:, 1]
        view += x[:, 0]
        return made


class WritesByOutIntoConstant(nn.Module):
    """A second call must find zeros again where the first one wrote."""

    def forward(self, x):
        made = torch.zeros(2, 3, 6, 6)
        before = made.sum() + x
        torch.add(x, 1, out=made)
        return before - made * 2


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (WritesIntoView, "it writes in place into a value"),
        (WritesByOutIntoConstant, "it writes a traced value into a tensor that it made"),
    ],
)
def test_writes_that_no_graph_shows_keep_their_code(kind, reason):
    captured = capture(kind())
    assert reason in captured.opaque[0].reason
    for x in torch.randn(2, 2, 3, 6, 6):
        torch.testing.assert_close(captured.module(x), kind()(x))


class Positions(nn.Module):
    """Tables for sizes that are larger than those of any input; a case is a method."""

    def __init__(self, run):
        super().__init__()
        self.register_buffer("grid", torch.randn(3, 9, 9))
        self.table, self.run = torch.randn(9), run

    def forward(self, x):
        return self.run(self, x)


PARTS = {
    "slices": lambda own, x: x + own.grid[:, : x.size(2), : x.size(3)],
    "an index": lambda own, x: x + own.grid[:, x.shape[0], None, -x.shape[3] :],
    "no buffer": lambda own, x: x + own.table[: x.shape[3]],
    "made": lambda own, x: x + torch.ones(9)[: x.shape[3]],
    "expanded": lambda own, x: x + own.grid[None, :, :6, :6].expand(x.size(0), -1, -1, -1),
    "repeated": lambda own, x: x + own.grid[None, :, :6, :6].repeat(x.size(0), 1, 1, 1),
    "narrowed": lambda own, x: x + own.grid.narrow(1, 0, x.size(2)).narrow(2, 0, x.size(3)),
    "typed": lambda own, x: x + own.table.double()[:6].type(x.data.type()),
    "converted": lambda own, x: x + own.table.double()[:6].to(device=x.device, dtype=x.dtype),
    "a copy written": lambda own, x: own.table[:6].repeat(x.size(0), 3, 6, 1).add_(x),
}


@pytest.mark.parametrize("case", PARTS)
def test_tables_are_cut_to_the_sizes_of_the_input(case):
    model = Positions(PARTS[case]).eval()
    captured = capture(model)
    assert not captured.opaque
    for batch in (2, 4):
        x = torch.randn(batch, 3, 6, 6)
        torch.testing.assert_close(captured.module(x), model(x))


def _added(own, x):
    part = own.grid[:, : x.size(2), : x.size(3)]
    part += 1
    return x + part


def _assigned(own, x):
    part = own.grid[:, : x.size(2), : x.size(3)]
    part[0] = x[0, 0]
    return x + part


def _of_a_part(own, x):
    part = own.grid[None, :, :6, :6].expand(x.size(0), -1, -1, -1)[0]
    part += 1
    return x + part


def _in_place(own, x):
    own.grid[:, : x.size(2)].add_(1)
    return x + own.grid.sum()


def _of_made(own, x):
    made = torch.zeros(9)
    part = made[: x.size(3)]
    part += 1
    return x + part + made.sum()


def _of_a_typed(own, x):
    part = own.grid.type(x.type())
    part += 1
    return x + part[:, :6, :6]


def _of_a_converted(own, x):
    part = own.grid[:, :6, :6].to(dtype=x.dtype)
    part += 1
    return x + part


WRITES = [_added, _assigned, _of_a_part, _in_place, _of_made, _of_a_typed, _of_a_converted]


@pytest.mark.parametrize("run", WRITES)
def test_code_that_writes_into_a_part_of_its_tables_stays(run):
    model = Positions(run).eval()
    captured = capture(model)
    assert captured.opaque
    for x in torch.randn(3, 2, 3, 6, 6):
        torch.testing.assert_close(captured.module(x), model(x))


class Typed(nn.Conv2d):
    def forward(self, x):
        kind = x.type()
        y = super().forward(x.type(self.weight.type()))
        return y.type(kind), y.double().type(torch.float16), torch.zeros(1, 1).type(kind)


def test_a_type_that_another_tensor_names_is_in_files(tmp_path):
    model = Typed(3, 4, 3).eval()
    assert not capture(model).opaque
    save(optimize(model, X), tmp_path / "model.nhwc")
    for again in (fuse(model), load(tmp_path / "model.nhwc")):
        for x in (X, X.double()):
            found, expected = again(x), model(x)
            assert [one.dtype for one in found] == [one.dtype for one in expected]
            torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


def test_tensors_have_no_methods_of_the_tracer_left():
    before = {**vars(Tensor)}
    capture(Positions(PARTS["slices"]).eval())
    assert {**vars(Tensor)} == before


class CallsOnNumber(nn.Module):
    def forward(self, x):
        return torch.Tensor.__rdiv__(2, x)


def test_a_method_of_tensors_called_on_a_number():
    captured = capture(CallsOnNumber())
    assert "it calls Tensor.__rdiv__ on an int" in captured.opaque[0].reason
    for model in (CallsOnNumber(), captured.module):
        with pytest.raises(AttributeError):
            model(torch.ones(2))


class Seeds(nn.Module):
    def forward(self, x):
        torch.manual_seed(7)
        return torch.nn.functional.dropout(x, 0.5, True)


class SeedsAndPutsBack(nn.Module):
    def forward(self, x):
        with torch.random.fork_rng():
            torch.manual_seed(7)
            x = torch.nn.functional.dropout(x, 0.5, True)
        return x + 1


@pytest.mark.parametrize("made", [Seeds, SeedsAndPutsBack])
def test_code_that_seeds_keeps_its_code(made):
    captured = capture(made())
    assert "it seeds torch's random numbers" in captured.opaque[0].reason
    x = torch.ones(3, 5)
    assert torch.equal(captured.module(x), made()(x))


class Blocks(nn.Module):
    """Blocks that write in place, behind one another and perhaps behind a constant."""

    def __init__(self, count, constant):
        super().__init__()
        blocks = (nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU(inplace=True)) for _ in range(count))
        self.blocks, self.constant = nn.Sequential(*blocks), constant

    def forward(self, x):
        return self.blocks(x + torch.ones(3, 1, 1) if self.constant else x)


@pytest.mark.parametrize("constant", [False, True])
def test_to_trace_twice_as_many_blocks_takes_looks_twice_as_often(constant, monkeypatch):
    looks = []
    look = nn.Module.get_submodule

    def counted(module, path):
        looks[-1] += 1
        return look(module, path)

    monkeypatch.setattr(nn.Module, "get_submodule", counted)
    for count in (20, 40):
        looks.append(0)
        capture(Blocks(count, constant))
    assert looks[1] <= 2.2 * looks[0]


KEYWORDS = {
    "group norm": nn.GroupNorm(2, 4),
    "instance norm": nn.InstanceNorm2d(4, affine=True),
    "batch norm": nn.BatchNorm2d(4),
    "convolution": nn.Conv2d(4, 4, 3),
}


@pytest.mark.parametrize("name", KEYWORDS)
def test_a_layer_that_is_given_its_input_by_keyword_is_any_layer(name):
    model = random_(Block(lambda self, x: self.layer(input=x.exp()).relu(), layer=KEYWORDS[name]))
    x = torch.randn(2, 4, 5, 6)
    fused = fuse(model, passes=PASSES)
    assert not fused.report.opaque
    assert [*fused.graph.find_nodes(op="call_module")][-1].kwargs == {}
    assert_same(model, fused, x)


def test_a_hook_is_given_the_keywords_of_the_code():
    layer = nn.ReLU()
    seen = []
    layer.register_forward_pre_hook(lambda *given: seen.append(given[1:]), with_kwargs=True)
    graph = capture(Block(lambda self, x: self.layer(input=x + 1), layer=layer)).module
    graph(torch.ones(2))
    assert [[*kwargs] for _, kwargs in seen] == [["input"]]
