"""Models written as those that people deploy are: one graph for the shapes of the example."""

import copy
import functools
from collections import OrderedDict
from contextvars import ContextVar
from dataclasses import dataclass, fields

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten

import nhwc
from nhwc.graph import capture
from nhwc.graph.tracing.recorded import record_run
from nhwc.graph.tracing.sized import capture_sized
from nhwc.verify.inputs import random_inputs
from nhwc.zoo import randomize_batchnorm_

from ..optimizing import close, force, runs_program


@dataclass
class Output(OrderedDict):
    """A dict whose entries are attributes, too, without those that are None."""

    features: torch.Tensor | None = None
    pooled: torch.Tensor | None = None
    hidden: tuple[torch.Tensor, ...] | None = None

    def __post_init__(self):
        for field in fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)

    def to_tuple(self):
        return tuple(self.values())


COLLECTED = ContextVar("collected", default=None)


def with_config(forward):
    """A decorator that looks into its arguments, and puts back what it changed."""

    @functools.wraps(forward)
    def wrapper(self, *args, **kwargs):
        as_dict = kwargs.pop("return_dict", self.config["return_dict"])
        token = COLLECTED.set([] if kwargs.get("hidden") else None)
        try:
            output = forward(self, *args, **kwargs)
        finally:
            COLLECTED.reset(token)
        return output if as_dict else output.to_tuple()

    return wrapper


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x, mask=None, **more):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        causal = q.shape[2] > 1 and mask is None and more.get("causal", False)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        if COLLECTED.get() is not None:
            COLLECTED.get().append(x)
        return x


class Vision(nn.Module):
    """Its forward takes `**kwargs`, asks for types and for None, and returns a kind of dict."""

    def __init__(self):
        super().__init__()
        self.config = {"return_dict": True, "size": (16, 16)}
        self.patches, self.cls = nn.Conv2d(3, 8, 4, 4), nn.Parameter(torch.randn(1, 1, 8))
        self.place = nn.Parameter(torch.randn(1, 17, 8))
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    @with_config
    def forward(self, pixels=None, mask=None, **kwargs):
        if pixels is None:
            raise ValueError("give pixels")
        if tuple(pixels.shape[2:]) != self.config["size"] and type(pixels) is not None:
            raise ValueError("give 16x16")
        try:
            x = self.patches(pixels.to(dtype=self.patches.weight.dtype)).flatten(2).transpose(1, 2)
        except AttributeError:
            x = None
        x = torch.cat((self.cls.expand(len(pixels), -1, -1), x), 1) + self.place
        for layer in self.layers:
            x = layer(x, mask, **kwargs)
        hidden = COLLECTED.get()
        return Output(x, x[:, 0], tuple(hidden) if hidden is not None else None)


def image(*shape, seed=1):
    return torch.randn(shape or (2, 3, 16, 16), generator=torch.Generator().manual_seed(seed))


def woken(kind):
    torch.manual_seed(0)
    return randomize_batchnorm_(kind()).eval()


@torch.no_grad()
def test_a_model_of_varying_arguments_is_one_program_and_returns_its_own_kind_of_dict(tmp_path):
    model, x = woken(Vision), image()
    fast = force(model, x)
    [plan] = fast.report.plans
    assert [part.path for part in plan.opened] == [""]
    assert runs_program(fast, x)
    for other in (x, image(seed=2)):
        for found in (fast(other), fast(pixels=other), fast(other, None)):
            assert type(found) is Output
            close(found.pooled, model(other).pooled)
    found, expected = fast(x, hidden=True), model(x, hidden=True)
    close(found.hidden[1], expected.hidden[1])
    assert isinstance(fast(x, return_dict=False), tuple)
    nhwc.save(fast, tmp_path / "model.nhwc")
    loaded = nhwc.load(tmp_path / "model.nhwc")
    assert list(loaded(x)) == ["features", "pooled"]
    close(loaded(x)["features"], model(x).features)


@torch.no_grad()
def test_arguments_by_name_run_the_program():
    model, x = woken(Vision), image()
    fast, calls = force(model, x), []
    [key] = fast._programs
    own = fast._programs[key]
    fast._programs[key] = lambda *given: calls.append(given) or own(*given)
    fast(pixels=x)
    fast(mask=None, pixels=x)
    fast(x, causal=True)
    # What is given as its default is as good as left out.
    assert len(calls) == 2


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride=1):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn, self.act = nn.BatchNorm2d(outputs), nn.SiLU()

    def forward(self, x):
        return self.act(self.bn(self.conv(x)))


class Head(nn.Module):
    """Keeps anchors for the shape of its first call; what it returns hangs on flags."""

    shape, export, dynamic = None, False, False

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleDict({"near": nn.Conv2d(8, 7, 1), "far": nn.Conv2d(8, 7, 1)})
        self.stride = torch.tensor([4.0, 8.0])
        self.anchors = torch.empty(0)

    def forward(self, features):
        found = {name: self.convs[name](features[name]) for name in self.convs}
        if self.training:
            return found
        flat = torch.cat([one.flatten(2) for one in found.values()], 2)
        shape = features["near"].shape
        if self.dynamic or self.shape != shape:
            self.anchors, self.strides = self.made(found)
            self.shape = shape
        box, scores = flat.split((4, 3), 1)
        corner, other = box.chunk(2, 1)
        box = torch.cat((self.anchors - corner, self.anchors + other), 1) * self.strides
        box[:, :2] = box[:, :2].clamp(0)
        best, place = scores.sigmoid().amax(1).topk(5)
        kept = box.gather(2, place.unsqueeze(1).expand(-1, 4, -1))
        decoded = torch.cat((kept, best.unsqueeze(1)), 1)
        return decoded if self.export else (decoded, {"maps": found})

    def made(self, found):
        points, strides = [], []
        for one, stride in zip(found.values(), self.stride, strict=True):
            h, w = one.shape[2:]
            ys, xs = torch.meshgrid(torch.arange(h) + 0.5, torch.arange(w) + 0.5, indexing="ij")
            points.append(torch.stack((xs, ys)).flatten(1))
            strides.append(torch.full((1, h * w), float(stride)))
        return torch.cat(points, 1), torch.cat(strides, 1)


class Detector(nn.Module):
    """Says from which layers each layer takes its input, and keeps what later ones need."""

    def __init__(self):
        super().__init__()
        layers = OrderedDict(stem=Block(3, 8, 2), down=Block(8, 8, 2), deep=Block(8, 8, 2))
        self.model = nn.Sequential(layers)
        self.head = Head()

    def forward(self, x, *args, **kwargs):
        if isinstance(x, dict):
            return self.forward(x["image"])
        return self.predict(x, *args, **kwargs)

    def predict(self, x, profile=False, embed=None):
        kept, embed = [], frozenset(embed or ())
        for number, layer in enumerate(self.model):
            x = layer(x)
            kept.append(x if number > 0 or number in embed else None)
        return self.head({"near": kept[1], "far": kept[-1]})


@torch.no_grad()
@pytest.mark.parametrize("first", [False, True], ids=["before", "after"])
def test_a_detector_that_keeps_anchors_is_one_program(first):
    model, x = woken(Detector), image()
    if first:
        model(image(1, 3, 24, 24))
    fast = force(model, x)
    assert {""} <= {part.path for part in fast.report.plans[0].opened}
    for other in (x, image(seed=2), image(1, 3, 32, 32)):
        (found, maps), (expected, same) = fast(other), copy.deepcopy(model)(other)
        close(found, expected)
        close(maps["maps"]["far"], same["maps"]["far"])
    assert runs_program(fast, x)


def made_by_values(self, x):
    found = self.patches(x).flatten(1)
    return found[:, found.sum(0) > 0]


def kept_in_itself(self, x):
    self.place.data[:, 0] = self.patches(x).mean()
    return self.patches(x) + self.place.sum()


def kept_in_a_table(self, x):
    self.table[0] = self.patches(x).mean()
    return self.patches(x) + self.table


def hidden_from_torch(self, x):
    return self.patches(x) + torch.from_numpy(self.patches(x).numpy())


def caught(self, x):
    try:
        return self.patches(x) * float(x.sum())
    except Exception:
        return self.patches(x)


@pytest.mark.parametrize(
    "does",
    [made_by_values, kept_in_itself, kept_in_a_table, hidden_from_torch, caught],
    ids=lambda does: does.__name__,
)
def test_what_a_graph_could_not_repeat_is_refused(does):
    def forward(self, x, **kwargs):
        return does(self, x)

    model = woken(type("Refused", (Vision,), {"forward": forward}))
    model.table = torch.zeros(4)
    with pytest.raises((fx.proxy.TraceError, RuntimeError)):
        record_run(capture(model).module, [image()])


def one_hot(self, x):
    y = self.patches(x)
    places = y.argmax(1, keepdim=True)
    return y * torch.zeros_like(y).scatter_(1, places, 1.0)


def pasted(self, x):
    y = self.patches(x)
    out = y.new_zeros(y.shape[0], 8, 6, 6)
    out[:, :, 1:-1, 1:-1] = y
    out += 1
    return out


def normalized(self, x):
    y = self.patches(x)
    grid = torch.linspace(0, 1, y.shape[-1])
    grid[1:] *= 2
    return (y - y.mean()) / (grid + y.std(correction=0))


def typed_by_its_name(self, x):
    y = self.patches(x)
    grid = torch.arange(y.shape[-1]).type(y.data.type())
    return (y + grid).double().type(y.type())


def written_in_pairs(self, x):
    y = self.patches(x)
    best, places = torch.empty(0), torch.empty(0, dtype=torch.long)
    torch.max(y, 1, keepdim=True, out=(best, places))
    torch.sort(y, 1, out=(y, torch.empty(0, dtype=torch.long)))
    return y + best * places


@pytest.mark.parametrize(
    "does",
    [one_hot, pasted, normalized, typed_by_its_name, written_in_pairs],
    ids=lambda does: does.__name__,
)
@torch.no_grad()
def test_tensors_that_code_makes_and_writes_into_are_right_in_every_call(does):
    def forward(self, x, **kwargs):
        return does(self, x)

    model, x = woken(type("Made", (Vision,), {"forward": forward})), image()
    graph, closed = capture_sized(capture(model).module, [x])
    assert not closed
    for other in random_inputs((x,), 3) * 2:
        close(graph(*other), model(*other))


class Gaps(nn.Module):
    """It writes into a table whose numbers do not lie side by side."""

    def forward(self, x):
        table = torch.empty_strided((2, 4), (16, 2)).fill_(3.0)
        return table.mul_(x.mean()), x.relu()


@torch.no_grad()
def test_what_a_call_writes_into_lies_as_the_code_made_it():
    model, x = Gaps().eval(), image()
    graph, _ = capture_sized(capture(model).module, [x])
    for _ in range(2):
        torch.testing.assert_close(graph(x), model(x), check_stride=True)


def best(self, x):
    return torch.Tensor.max(self.patches(x), 1)


def best_of_all(self, x):
    y = self.patches(x)
    return {"best": y.topk(2, 1), "order": [y.sort(1), y.flatten(2).median(2).values]}


def changed(self, x):
    found = self.patches(x).max(1)
    found.values.add_(1)
    return found


@pytest.mark.parametrize("does", [best, best_of_all], ids=lambda does: does.__name__)
@torch.no_grad()
def test_named_tuples_of_torchs_come_back_as_such(does, tmp_path):
    def forward(self, x, **kwargs):
        return does(self, x)

    model, x = woken(type("Found", (Vision,), {"forward": forward})), image()
    fast = force(model, x)
    assert type(fast(x)) is type(model(x))
    nhwc.save(fast, tmp_path / "found.nhwc")
    for one in (fast, nhwc.load(tmp_path / "found.nhwc")):
        found, expected = (tree_flatten(each(x)) for each in (one, model))
        assert found[1] == expected[1]
        close(found[0], expected[0])


@torch.no_grad()
def test_a_named_tuple_whose_parts_were_written_to_keeps_its_kind():
    def forward(self, x, **kwargs):
        return changed(self, x)

    model, x = woken(type("Found", (Vision,), {"forward": forward})), image()
    found, expected = nhwc.optimize(model, x)(x), model(x)
    assert type(found) is type(expected)
    close(list(found), list(expected))


def compared(self, x):
    kept = "no frame yet"
    for row in self.patches(x).unbind(2):
        kept = row if kept == "no frame yet" else kept + row
        assert kept != "no frame yet"
    return kept


@torch.no_grad()
def test_a_tensor_is_unlike_a_text():
    """As diffusers' video decoders ask whether a frame was kept already."""

    def forward(self, x, **kwargs):
        return compared(self, x)

    model, x = woken(type("Kept", (Vision,), {"forward": forward})), image()
    fast = force(model, x)
    assert fast.serves((x,))
    close(fast(x), model(x))


@torch.no_grad()
def test_a_layer_is_given_a_weight_alone():
    """As models that merge tokens normalize what they have learned to ask for."""

    class Merged(Vision):
        def __init__(self):
            super().__init__()
            self.queries = nn.Parameter(torch.randn(1, 3, 5, 5))

        def forward(self, x, **kwargs):
            return compared(self, x) + self.patches(self.queries).mean()

    model, x = woken(Merged), image()
    fast = force(model, x)
    assert fast.serves((x,))
    close(fast(x), model(x))


@torch.no_grad()
def test_a_hook_of_the_users_fires_in_every_call():
    model, x, seen = woken(Vision), image(), []
    model.layers[0].register_forward_hook(lambda module, given, result: seen.append(result))
    fast = force(model, x)
    del seen[:]
    fast(x)
    assert len(seen) == 1


def test_results_of_autograd_kept_in_a_dict_are_copied():
    model = woken(Detector)
    model.tables = {"cpu": [model.head.convs["far"].weight * 2]}
    assert not capture(model).module.training
    with torch.no_grad():
        close(nhwc.fuse(model)(image())[0], model(image())[0])


@pytest.mark.parametrize("writer", [nn.ReLU(inplace=True), nn.Dropout(0.2, inplace=True)])
def test_a_module_writes_into_its_input(writer):
    """As MobileNet of transformers drops what it has pooled."""

    def forward(self, x, **kwargs):
        y = self.patches(x)
        return Output(features=self.writer(y) + y)

    model = woken(type("Written", (Vision,), {"forward": forward}))
    model.writer = writer.eval()
    graph, x = capture(model).module, image()
    traced, _ = record_run(graph, [x])
    close(fx.GraphModule(graph, traced)(x)["features"], model(x).features)


class TwoConstants(nn.Module):
    """Makes a tensor from no size, and before it one from a size."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1)

    def forward(self, x):
        table = torch.arange(x.shape[3]).float()
        return self.conv(x * table) + torch.linspace(1, 2, 8)


def test_a_constant_of_a_size_takes_no_name_of_another():
    model, x = TwoConstants().eval(), torch.rand(1, 3, 8, 8)
    graph = capture(model).module
    constants = [name for name, _ in graph.named_buffers()]
    assert constants == ["_tensor_constant0"]
    traced, _ = record_run(graph, [x])
    assert len({node.target for node in traced.find_nodes(op="get_attr")}) == 2
    close(fx.GraphModule(graph, traced)(x), model(x))


@torch.no_grad()
def test_what_follows_from_sizes_alone_may_be_a_count():
    """As V-JEPA 2 repeats its mask tokens by the largest of the places it made."""

    class Repeated(Vision):
        def __init__(self):
            super().__init__()
            self.token = nn.Parameter(torch.randn(1, 3, 1, 1))

        def forward(self, x, **kwargs):
            count = torch.arange(x.shape[2]).max() + 1
            tokens = self.token.repeat(1, 1, count, count) + x
            return compared(self, x) + self.patches(tokens[..., : count // 2]).mean()

    model, x = woken(Repeated), image()
    fast = force(model, x)
    assert fast.serves((x,))
    close(fast(x), model(x))


class Matched(nn.Module):
    """It compares two images, unless they are one."""

    def __init__(self, one):
        super().__init__()
        self.conv, self.one = nn.Conv2d(3, 8, 3), one

    def forward(self, x, y, scale=None):
        if self.one(x, y):
            return self.conv(x) * 2
        return self.conv(x) - self.conv(y)


def _is(x, y):
    return x is y


def _has_the_id(x, y):
    return id(x) == id(y)


@pytest.mark.parametrize("one", [_is, _has_the_id])
@pytest.mark.parametrize("alike", [False, True])
def test_two_inputs_may_be_one_tensor_in_another_call(one, alike):
    """A run that is recorded sees one case; the other was answered by its branch."""
    model, x, y = Matched(one).eval(), torch.rand(1, 3, 8, 8), torch.rand(1, 3, 8, 8)
    fast = force(model, x, x if alike else y)
    for given in [(x, y), (x, x), (y, x)]:
        close(fast(*given), model(*given))


def test_inputs_of_other_kinds_cannot_be_one_tensor():
    model, x = Matched(_is).eval(), torch.rand(1, 3, 8, 8)
    given = x, torch.rand(2, 3, 8, 8)
    fast = force(model, *given)
    assert runs_program(fast, *given)
    close(fast(*given), model(*given))
