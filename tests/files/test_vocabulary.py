"""What a file may call: all of torch's operators that compute, and nothing that does more."""

import functools
import inspect
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import nhwc
from nhwc import InputError
from nhwc.files.schemas import is_pure, pure_overload
from nhwc.files.serial import dump, restore
from nhwc.files.vocabulary import (
    function_of,
    functions,
    keywords_of_function,
    keywords_of_layer,
    keywords_of_method,
    methods,
    module_names,
    modules,
    name_of,
)
from nhwc.graph import capture
from nhwc.graph.tracing.recorded import record_run

BAD = """
    load save from_file file open read write path compile compiled eval exec import hook hooks
    apply call map numpy storage ptr pickle reduce_ex backward register script tracing jit
    distributed manual seed threads deterministic format print memory_ data
"""
"""Words of names that have to do with files, code, functions of others, or the process."""


@pytest.mark.parametrize("name", sorted({*functions(), *methods(), *modules()}))
def test_no_name_says_that_it_does_more_than_compute(name):
    leaf = name.rpartition(".")[2]
    assert not leaf.startswith("_") or leaf == "_assert"
    assert not {*BAD.split()} & {*leaf.lower().split("_")}


@pytest.mark.parametrize(
    "name",
    [
        "CTCLoss",
        "EmbeddingBag",
        "FractionalMaxPool2d",
        "LazyConv2d",
        "SyncBatchNorm",
        "RNNBase",
        "DataParallel",
    ],
)
def test_a_layer_that_does_more_than_compute_is_none_of_a_file(name):
    assert hasattr(torch.nn, name)
    assert f"nn.{name}" not in modules()


def test_every_function_is_torchs_or_one_of_a_short_list():
    rooms = {}
    for name, function in functions().items():
        rooms.setdefault(name.rpartition(".")[0], []).append(name)
        assert callable(function)
        made = name.startswith(("builtins.", "collections.")) or name == "torch.Size"
        assert made or not isinstance(function, type)
    listed = {room: len(names) for room, names in rooms.items() if not room.startswith("torch")}
    # Whoever lengthens one of these lists by hand reads docs/file-format.md first.
    assert listed == {"operator": 41, "builtins": 13, "math": 6, "collections": 1, "nhwc": 8}
    assert {room for room in rooms if room.startswith("torch")} == {
        *("torch", "torch.fft", "torch.linalg", "torch.nn.functional", "torch.special"),
    }
    assert len(functions()) > 600
    assert len(methods()) > 400


def test_no_function_takes_a_function_and_no_layer_does():
    written = [f for f in functions().values() if inspect.isfunction(f)]
    for function in (*written, *modules().values()):
        for parameter in inspect.signature(function).parameters.values():
            assert "Callable" not in str(parameter.annotation), function


@pytest.mark.parametrize(
    "name",
    ["from_file", "set_", "resize_", "record_stream", "data", "requires_grad_", "retain_grad",
     "sparse_csr_tensor", "_foreach_add", "segment_reduce", "lu_solve", "linalg_lu_solve",
     "mkldnn_convolution", "cudnn_convolution", "fbgemm_linear_int8_weight", "pin_memory", "save",
     "quantized_lstm_cell", "ctc_loss", "rrelu_with_noise", "__class__", "no such operator"],
)  # fmt: skip
def test_an_operator_that_does_more_than_compute_is_not_pure(name):
    assert not is_pure(name)
    assert pure_overload(name, "default") is None
    assert function_of(f"torch.{name}") is None
    assert name not in methods()


def test_what_may_be_given_by_name_is_what_the_schema_names():
    assert keywords_of_function("torch.flatten", torch.flatten) >= {"start_dim", "end_dim", "input"}
    assert "func" not in keywords_of_function("torch.flatten", torch.flatten)
    assert keywords_of_function("torch.fft.fft", torch.fft.fft) >= {"n", "dim", "norm"}
    pool = keywords_of_function("torch.nn.functional.max_pool2d", F.max_pool2d)
    assert pool >= {"kernel_size", "return_indices"}
    assert keywords_of_method("sum") >= {"dim", "keepdim", "dtype", "axis"}
    assert keywords_of_method("float") == {"memory_format"}
    assert keywords_of_layer(nn.MultiheadAttention(4, 1)) >= {"query", "need_weights"}
    for name, function in functions().items():
        assert all(map(str.isidentifier, keywords_of_function(name, function)))
    for name in methods():
        assert all(map(str.isidentifier, keywords_of_method(name)))


def test_operators_of_exported_graphs_have_names_too():
    assert name_of(torch.ops.aten.add.Tensor) == "aten.add.Tensor"
    assert function_of("aten.convolution.default") is torch.ops.aten.convolution.default
    assert name_of(torch.ops.aten.from_file.default) is None
    assert name_of(torch.ops.prims.add.default) is None


class One(nn.Module):
    """A model of one operator, as a graph."""

    def __new__(cls, op, target, args, kwargs):
        graph, inputs = fx.Graph(), []

        def place(value):
            if isinstance(value, torch.Tensor):
                inputs.append(value)
                return graph.placeholder(f"x{len(inputs)}")
            if isinstance(value, (list, tuple)):
                return type(value)(place(item) for item in value)
            return value

        given, named = place(list(args)), {name: place(v) for name, v in kwargs.items()}
        places = graph.find_nodes(op="placeholder")
        graph.output(graph.create_node(op, target, tuple(given), named))
        assert list(graph.nodes)[: len(places)] == places
        return fx.GraphModule(nn.Module(), graph), inputs


def check(model, inputs, path):
    """That the model answers the same after it was saved and loaded."""
    nhwc.save(model, path)
    same(model, nhwc.load(path), inputs)


def same(model, loaded, inputs):
    answers = []
    for one in (model, loaded):
        torch.manual_seed(0)
        answers.append(one(*[x.clone() for x in inputs]))
    torch.testing.assert_close(*answers, rtol=0, atol=0, equal_nan=True)


REPORTED = [
    lambda x: x.log_softmax(1),
    lambda x: torch.logical_xor(x > 0, x < 1),
    lambda x: torch.less(x, 0.5),
    lambda x: torch.greater(x, 0.5) & x.greater_equal(0.1) | x.less_equal(-1),
    lambda x: torch.ceil(x) + x.ceil(),
    lambda x: x.clone().zero_(),
    lambda x: F.pairwise_distance(x, x + 1),
    lambda x: torch.pairwise_distance(x, x.flip(0)),
    lambda x: F.max_pool2d(x, 2, return_indices=True),
    lambda x: F.max_unpool2d(x[:, :, ::2, ::2], F.max_pool2d(x, 2, return_indices=True)[1], 2),
    lambda x: torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127),
    lambda x: torch.fake_quantize_per_channel_affine(
        x, torch.ones(3), torch.zeros(3, dtype=torch.int32), 1, -128, 127
    ),
    lambda x: (x * 4).int().bitwise_and(3) | (x.int() ^ 1),
    lambda x: torch.linalg.vector_norm(x, dim=1) + torch.linalg.norm(x, dim=(2, 3)).sum(),
    lambda x: torch.special.erfcx(x) + torch.fft.rfft(x).real.sum() + x.erfinv(),
    lambda x: torch.scatter_add(x, 1, torch.zeros_like(x).long(), x),
    lambda x: (x.cumprod(1), x.cummax(1), x.logsumexp(1), x.argsort(1), x.sort(2), x.kthvalue(2)),
    lambda x: torch.cosh(x) + torch.atan2(x, x) + x.hypot(x) + x.remainder(2) + x.trunc(),
    lambda x: F.cross_entropy(x, torch.zeros(2, 6, 6).long()) + F.mse_loss(x, x * 2),
]


class Of(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


@pytest.mark.parametrize("number", range(len(REPORTED)))
@torch.no_grad()
def test_operators_that_models_call_are_saved(number, tmp_path):
    x = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    check(Of(REPORTED[number]).eval(), [x], tmp_path / "m.nhwc")


WITH_SIGNS = """
    x**2 x**-0.5 2**x x**x pow(x,2) x@x x/2 2/x x//2 5//x x%2 5%x -x +x abs(x) x-1 1-x x*2 2*x x+1
    i&1 1&i i|1 1|i i^1 1^i ~i i<<1 1<<i i<<i i>>1 8>>i i>>i x==1 x!=1 x<1 1<x x<=1 (x>0)&(x<1)
    x.mT x.mH x.data x.clamp_min(1) x.clamp_max(1) torch.clamp_min(x,1) torch.clamp_max(x,1)
    x.type(torch.float64) x.new_tensor([2.])*x x.split_with_sizes([2,1],1)[0]
"""
IN_PLACE = "x+= x-= x*= x/= x//= x%= x**= i&= i|= i^= i<<= i>>="
WRITTEN = [
    *(f"y = {code}" for code in WITH_SIGNS.split()),
    *(f"y = {code[0]}.clone(); y {code[1:]} 2" for code in IN_PLACE.split()),
    *(f"y = {code[0]}.clone(); y {code[1:]} {code[0]}" for code in (*IN_PLACE.split(), "x@=")),
]


class Written(nn.Module):
    """Computes what `code` says of a tensor of floats and one of whole numbers."""

    def __init__(self, code):
        super().__init__()
        self.code = compile(code, code, "exec")

    def forward(self, x, i):
        names = {"torch": torch, "x": x, "i": i}
        exec(self.code, names)
        return names["y"]


@pytest.mark.parametrize("how", ["traced", "recorded"])
@pytest.mark.parametrize("code", WRITTEN)
@torch.no_grad()
def test_what_python_has_signs_for_is_saved(code, how):
    """Torch has another function for `x ** 2` than `x.pow(2)`, and for `1 / x` a `__rdiv__`."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(2, 3, 4, 4, generator=generator) + 0.5
    inputs = [x, torch.randint(0, 4, x.shape, generator=generator)]
    root = capture(Written(code)).module
    if how == "recorded":
        root = fx.GraphModule(root, record_run(Written(code), inputs)[0])
    data, tensors = dump(root)
    same(Written(code), restore(json.loads(json.dumps(data)), tensors), inputs)


# Torch's own samples of its operators: of each the first that a graph can be made of.


def _samples():
    from torch.testing._internal.common_methods_invocations import op_db

    for info in op_db:
        if torch.float32 in info.dtypes and info.name not in ("empty", "empty_like", "new_empty"):
            yield info


def _first(info):
    for sample in info.sample_inputs("cpu", torch.float32):
        if isinstance(sample.input, torch.Tensor) and sample.input.numel():
            return sample
    return None


def with_few_frames(test):
    """Run a test in a thread: each of torch's samples notes all the frames it was made under."""

    @functools.wraps(test)
    def run():
        with ThreadPoolExecutor(1) as pool:
            pool.submit(torch.no_grad()(test)).result()

    return run


@pytest.mark.filterwarnings("ignore")
@with_few_frames
def test_torchs_own_samples_of_its_operators_come_back():
    """What is in the vocabulary is saved, loaded and answers the same; most of torch is in it."""
    pytest.importorskip("expecttest")
    saved, refused, wrong = set(), set(), []
    for info in _samples():
        if name_of(info.op) is None or (sample := _first(info)) is None:
            continue
        model, inputs = One("call_function", info.op, (sample.input, *sample.args), sample.kwargs)
        try:
            data, tensors = dump(model)
            same(model, restore(json.loads(json.dumps(data)), tensors), inputs)
            saved.add(info.name)
        except InputError:
            refused.add(info.name)
        except Exception as error:
            wrong.append(f"{info.name}: {type(error).__name__} {str(error)[:200]}")
    # It takes an object of a kind of its own.
    assert refused <= {"nn.functional.linear_cross_entropy"}
    assert wrong == []
    assert len(saved) > 300


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")
def test_torchs_own_samples_of_its_layers_come_back(tmp_path):
    pytest.importorskip("expecttest")
    from torch.testing._internal.common_modules import module_db

    saved, wrong = [], []
    for info in module_db:
        if info.module_cls not in module_names():
            continue
        samples = info.module_inputs_func(
            info, device="cpu", dtype=torch.float32, requires_grad=False, training=False
        )
        for sample in samples:
            made, given = sample.constructor_input, sample.forward_input
            args = [] if given is None else given.args
            if any(isinstance(v, torch.Tensor) for v in (*made.args, *made.kwargs.values())):
                continue
            if given is None or given.kwargs or not all(isinstance(a, torch.Tensor) for a in args):
                continue
            layer = info.module_cls(*made.args, **made.kwargs).eval()
            try:
                check(nn.Sequential(layer) if len(args) == 1 else layer, args, tmp_path / "m.nhwc")
                saved.append(info.name)
            except Exception as error:
                wrong.append(f"{info.name}: {type(error).__name__} {str(error)[:200]}")
            break
    assert wrong == []
    assert len({*saved}) > 60
