"""Files made to do harm, every checksum right: nothing in them runs, no work is without end."""

import contextlib
import hashlib
import os
import struct
import time
import weakref

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import nhwc
from nhwc import FileError, InputError
from nhwc.files import container
from nhwc.files.budget import Budget
from nhwc.files.container import MAGIC, read, write
from nhwc.files.generated import check_code
from nhwc.files.plain import Foreign, checked_part, identifier
from nhwc.plan.ledger import Ledger
from nhwc.shown import printable, shown

from .test_files import tampered


class Small(nn.Module):
    """A step of each kind, with arguments of each kind."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.scale = nn.Parameter(torch.ones(4, 1, 1))

    def forward(self, x, gain=2.0):
        y = F.relu(self.conv(x) * self.scale) + gain
        y = F.interpolate(y, scale_factor=2.0, mode="nearest")[:, :, 1:]
        return {"flat": torch.flatten(y, start_dim=1), "sum": [y.sum(dim=(2, 3)), y.shape]}


IMAGE = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("small") / "small.nhwc"
    nhwc.save(Small().eval(), path)
    header, tensors = read(path)
    del header["tensors"]
    write(path, header | {"planned": [["1x3x8x8 float32"]]}, tensors)
    return path


def step(header, target):
    return next(n for n in header["nodes"] if n["target"] == target)


def held(header, path):
    return next(one for one in header["state"] if one["path"] == path)


def insert(header, target, *args, op="call_function", kwargs=(), name="planted"):
    """A step behind the arguments, on whose result everything else waits."""
    node = {"op": op, "name": name, "target": target}
    node |= {"args": {"tuple": list(args)}, "kwargs": {"dict": list(kwargs)}}
    header["nodes"].insert(2, node)


def in_a_part(header):
    """A call of what only holds a tensor."""
    held(header, "scale")["path"] = step(header, "scale")["target"] = "part.scale"
    insert(header, "part", X, op="call_module")


X = {"node": "x"}
PLANTED = "__import__('pathlib').Path({!r}).touch()"


@torch.no_grad()
def test_the_file_itself_is_planned_and_right(path):
    loaded = nhwc.load(path)
    assert len(loaded.recipes) == 1
    model = Small().eval()
    model.load_state_dict(loaded.portable.state_dict())
    torch.testing.assert_close(loaded(IMAGE), model(IMAGE))


def test_the_name_of_a_keyword_runs_nothing(path, tmp_path):
    harm = tmp_path / "harm"
    code = PLANTED.format(str(harm))

    def plant(header):
        step(header, "torch.flatten")["kwargs"] = {
            "dict": [[f"start_dim=1 + 0*({code} or 0), end_dim", -1]]
        }

    with pytest.raises(FileError, match=r"the name .start_dim=1"):
        nhwc.load(tampered(path, tmp_path, plant))
    assert not harm.exists()


@pytest.mark.parametrize(
    "place",
    ["name", "target", "key", "keyword", "module", "state", "class", "dtype", "device", "example",
     "default", "string", "file", "argument"],
)  # fmt: skip
def test_code_in_any_text_of_a_file_is_never_run(path, tmp_path, place):
    harm = tmp_path / "harm"
    code = PLANTED.format(str(harm))
    texts = [code, f"x={code}, y", f'a"), {code}, ("', f"a\n    {code}\n", f"{code} #", f"x.{code}"]

    def plant(header, text):
        flat = step(header, "torch.flatten")
        first = header["nodes"][0]
        match place:
            case "name":
                flat["name"] = text
            case "target":
                step(header, "conv")["target"] = text
            case "key":
                insert(header, "torch.flatten", {"dict": [[text, 1]]})
            case "keyword":
                flat["kwargs"]["dict"][0][0] = text
            case "module":
                header["modules"][text] = header["modules"].pop("conv")
                step(header, "conv")["target"] = text
            case "state":
                header["state"][0]["path"] = text
            case "class":
                header["modules"]["conv"]["class"] = text
            case "dtype":
                insert(header, "torch.ones", 1, kwargs=[["dtype", {"dtype": text}]])
            case "device":
                insert(header, "torch.ones", 1, kwargs=[["device", {"device": text}]])
            case "example":
                header["planned"] = [[text]]
            case "default":
                first["args"] = {"tuple": [text]}
            case "string":
                insert(header, "torch.flatten", X, text)
            case "file":
                header["name"] = text
            case "argument":
                header["modules"]["conv"]["arguments"]["padding_mode"] = text

    for text in texts:
        target = tampered(path, tmp_path, lambda header, text=text: plant(header, text))
        # Some texts are arguments that no operator takes.
        with contextlib.suppress(Exception):
            nhwc.load(target)(IMAGE)
        assert not harm.exists(), text


NOTHING_TO_CALL = """
    builtins.eval builtins.exec builtins.open builtins.__import__ builtins.range os.system
    torch.load torch.save torch.hub.load torch.compile torch.from_file torch.from_numpy
    torch.frombuffer torch.utils.cpp_extension.load torch.set_num_threads torch.manual_seed
    torch.ops.load_library torch.classes.load_library torch.segment_reduce torch.lu_solve
    torch.sparse_csr_tensor torch.linalg.lu_solve torch.linalg._linalg torch.nn.functional.math
    torch.nn.functional.boolean_dispatch torch.nn.functional.triplet_margin_with_distance_loss
    torch.svd_lowrank torch.pca_lowrank torch.lobpcg
    operator.call operator.methodcaller operator.attrgetter aten.from_file.default
    aten.save.default aten.set_.source_Storage aten.__class__.default aten.add.__class__
    aten.set_data.default aten.empty_quantized.default
    torch.embedding_bag torch.nn.functional.embedding_bag aten.embedding_bag.default
    torch.special.legendre_polynomial_p torch.special.chebyshev_polynomial_t torch.special.zeta
    torch.polygamma torch.special.polygamma aten.polygamma.default torch.mvlgamma
    torch.special.multigammaln aten.mvlgamma.out torch.lcm torch.gcd aten.lcm.default
    prim.Print.default nhwc.load math.__loader__
"""


@pytest.mark.parametrize("target", NOTHING_TO_CALL.split())
def test_a_function_that_does_more_than_compute_is_refused(path, tmp_path, target):
    with pytest.raises(FileError, match="the function"):
        nhwc.load(tampered(path, tmp_path, lambda h: insert(h, target, X)))


@pytest.mark.parametrize(
    "name",
    ["apply_", "map_", "numpy", "storage", "data_ptr", "backward", "register_hook", "set_", "type",
     "share_memory_", "resize_", "__class__", "__reduce_ex__", "format", "requires_grad_", "new",
     "polygamma_", "mvlgamma",
     "lcm_"],
)  # fmt: skip
def test_a_method_that_does_more_than_compute_is_refused(path, tmp_path, name):
    with pytest.raises(FileError, match="the method"):
        nhwc.load(tampered(path, tmp_path, lambda h: insert(h, name, X, op="call_method")))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda h: insert(h, "torch.relu", X, kwargs=[["nothing", 1]]),
            "torch.relu with 'nothing'",
        ),
        (lambda h: insert(h, "torch.relu", X, kwargs=[["class", 1]]), "the name 'class'"),
        (lambda h: insert(h, "operator.add", X, 1, kwargs=[["b", 1]]), "operator.add with 'b'"),
        (lambda h: insert(h, "builtins.max", X, kwargs=[["key", X]]), "builtins.max with 'key'"),
        (
            lambda h: insert(h, "relu", X, op="call_method", kwargs=[["func", 1]]),
            "relu with 'func'",
        ),
        (
            lambda h: insert(h, "format", "{0.__class__}", X, op="call_method"),
            "the method 'format'",
        ),
        (lambda h: insert(h, "split", "a b", op="call_method"), "the method 'split'"),
        (lambda h: insert(h, "type", X, op="call_method"), "the method 'type' without a type"),
        (
            lambda h: insert(h, "conv", X, op="call_module", kwargs=[["hook", 1]]),
            "conv with 'hook'",
        ),
        (lambda h: insert(h, "operator.getitem", {"tuple": [1, 2]}, X), "an item of"),
        (lambda h: insert(h, "builtins.getattr", X, "__class__"), "getattr of"),
        (lambda h: insert(h, "builtins.getattr", X, "shape", X), "getattr of"),
        (lambda h: h["nodes"][0].update(target="self"), "the name 'self'"),
        (lambda h: h["nodes"][0].update(target="torch"), "torch hide what its code calls"),
        (lambda h: h["nodes"][0].update(target="__debug__"), "the name '__debug__'"),
        (lambda h: h["nodes"][0].update(target="*x"), r"the name '\*x'"),
        (lambda h: h["nodes"][0].update(target="\uff53elf"), "the name"),
        (lambda h: h["nodes"][0].update(args={"tuple": [{"tuple": [[]]}]}), "default"),
        (
            lambda h: h["nodes"][0].update(args={"tuple": [{"ellipsis": True}]}),
            "a default that is no plain value",
        ),
        (lambda h: h["nodes"][0].update(args={"tuple": [1, 2]}), "a default that is no plain"),
        (lambda h: insert(h, "collections.OrderedDict", X), "an OrderedDict of"),
        (lambda h: insert(h, "torch.Size", X), "a torch.Size of"),
        (lambda h: insert(h, "torch.Size", {"tuple": [X]}), "a torch.Size of"),
        (lambda h: insert(h, "torch.relu", {"dict": [[True, 1]]}), "the key 'True'"),
        (lambda h: insert(h, "torch.relu", {"dict": [[1 << 70, 1]]}), "a number of 71 bits"),
        (lambda h: insert(h, "torch.relu", {"device": 3}), "describes no model"),
        (lambda h: insert(h, "conv", op="get_attr"), "a read of conv, which is no tensor"),
        (in_a_part, "a call of part, which computes nothing"),
        (lambda h: h["nodes"].insert(1, h["nodes"][0]), "two steps named x"),
        (lambda h: h["nodes"][-1].update(args={"tuple": []}), "'output' with 0 arguments"),
        (lambda h: h["nodes"].pop(), "the last is not the only output"),
        (
            lambda h: h["nodes"].append({**h["nodes"][-1], "name": "again"}),
            "the last is not the only output",
        ),
        (
            lambda h: h["nodes"].insert(1, h["nodes"].pop()),
            "the last is not the only output",
        ),
        (lambda h: h["nodes"][-1].update(kwargs={"dict": [["a", 1]]}), "output with 'a'"),
        (lambda h: h["state"][0].update(path="forward"), "the name 'forward'"),
        (lambda h: h["state"][0].update(path="training"), "the name 'training'"),
        (lambda h: h["state"][0].update(path="graph"), "the name 'graph'"),
        (lambda h: h["state"][0].update(path="\ufe4d\ufe4dclass\ufe4d\ufe4d"), "the name"),
        (lambda h: h["state"][0].update(tensor=-1), "tensor -1 of 3"),
        (lambda h: h["state"][0].update(tensor=True), "tensor True of 3"),
        (lambda h: h["state"].append(held(h, "scale")), "two tensors called scale"),
        (
            lambda h: h["state"].append(held(h, "scale") | {"path": "conv.part.scale"}),
            "conv.part.scale, inside a module that has no such part",
        ),
        (
            lambda h: h["modules"].update(spare=h["modules"]["conv"]),
            "a tensor spare.weight without values",
        ),
        (
            lambda h: h.update(modules={"conv.x": h["modules"]["conv"], **h["modules"]}),
            "two parts called conv",
        ),
        (lambda h: h["modules"]["conv"]["arguments"].update(device="cpu"), "Conv2d with 'device'"),
        (lambda h: h["modules"]["conv"].update({"class": "nn.Sequential"}), "nn.Sequential"),
        (lambda h: h["modules"]["conv"].update({"class": "nn.Module"}), "nn.Module"),
        (lambda h: h["modules"]["conv"]["arguments"].update(out_channels=10**9), "does not fit"),
        (lambda h: h["modules"]["conv"]["arguments"].update(kernel_size=[10**9] * 2), "describes"),
        (lambda h: h.update(exact="yes"), "exact is 'yes'"),
        (lambda h: h.update(planned=[["1x3x8x8 _dynamo"]]), "describes no model"),
        (lambda h: h.update(planned=[["1x3x8x8 bits8"]]), "describes no model"),
        (lambda h: h.update(planned=[["-" * 9000 + "1"]]), "the input '----"),
        (lambda h: h.update(planned=[["{" + "-" * 9000 + "1: 1}"]]), "the input '----"),
        # What a file says is no sign that there is no memory.
        (lambda h: insert(h, "out of memory", X), "the function 'out of memory'"),
        (lambda h: h["modules"]["conv"].update({"class": "out of memory"}), "'out of memory'"),
        (
            lambda h: insert(h, "torch.ones", 1, kwargs=[["device", {"device": "out of memory"}]]),
            "Invalid device string: 'out of memory'",
        ),
    ],
)
def test_what_no_model_was_saved_as_is_refused(path, tmp_path, change, says):
    with pytest.raises(FileError, match=says):
        nhwc.load(tampered(path, tmp_path, change))


def deep(levels, kind):
    value = X
    for _ in range(levels):
        value = {"tuple": [value]} if kind == "tuple" else [value]
    return value


def doubling(header):
    """A value that holds the one before it twice: a hundred of them hold 2 ** 100."""
    before = "x"
    for number in range(100):
        pair = {"tuple": [{"node": before}, {"node": before}]}
        insert(header, "builtins.tuple", pair, name=f"pair_{number}")
        header["nodes"].insert(2 + number, header["nodes"].pop(2))
        before = f"pair_{number}"


def twice_by_writing(header):
    """Lists that hold the one before them twice, since it was put there."""
    steps = []
    for number in range(60):
        steps.append(("operator.add", [X], [X]))
        for place in (0, 1) if number else ():
            before, last = ({"node": f"list_{n}"} for n in (number - 1, number))
            steps.append(("operator.setitem", last, place, before))
    for number, (target, *args) in enumerate(steps):
        lists = sum(one == "operator.add" for one, *_ in steps[: number + 1])
        name = f"list_{lists - 1}" if target == "operator.add" else f"put_{number}"
        insert(header, target, *args, name=name)
        header["nodes"].insert(2 + number, header["nodes"].pop(2))


def within_itself(header):
    insert(header, "operator.setitem", {"node": "one"}, 0, {"node": "one"})
    insert(header, "operator.add", [X], [X], name="one")


def layers_within_layers(header):
    layer = header["modules"]["conv"]
    for _ in range(20):
        inner = {"op": {"module": layer}, "activation": None}
        layer = {"class": "nhwc.Fused", "arguments": inner}
    header["modules"]["conv"] = layer


def softmax_of_many_parts(header):
    arguments = {"in_features": 4, "n_classes": 9999, "cutoffs": [*range(1, 2001)]}
    header["modules"]["a"] = {"class": "nn.AdaptiveLogSoftmaxWithLoss", "arguments": arguments}


NDIM = {"node": "ndim"}


def computed(*steps):
    """Steps of Python on a number that the graph takes from its input."""

    def change(header):
        planted = [("builtins.getattr", X, "ndim"), *steps]
        for number, (target, *args) in enumerate(planted):
            insert(header, target, *args, name="ndim" if number == 0 else f"made_{number}")
            header["nodes"].insert(2 + number, header["nodes"].pop(2))

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda h: insert(h, "operator.pow", 9, 10**9), "which Python computes, of constants"),
        (lambda h: insert(h, "operator.mul", [0], 10**12), "which Python computes, of constants"),
        (lambda h: insert(h, "torch.full", {"tuple": [10**12]}, 1.0), "a tensor of 1000000000000"),
        (lambda h: insert(h, "torch.arange", 10**15), "a tensor of 1000000000000000"),
        (lambda h: insert(h, "torch.relu", 1 << 70), "a number of 71 bits"),
        (lambda h: insert(h, "torch.relu", "a" * 20_000), "a text of more than 10000 letters"),
        (lambda h: insert(h, "torch.relu", deep(100, "tuple")), "more than 32 deep"),
        (lambda h: insert(h, "torch.relu", deep(400, "list")), "more than 32 deep"),
        (computed(("operator.pow", NDIM, 10**9)), "4 to the power of 1000000000"),
        (computed(("operator.ipow", NDIM, 10**9)), "4 to the power of 1000000000"),
        (computed(("operator.lshift", NDIM, 10**15)), "4 shifted by 1000000000000000"),
        (computed(("operator.ilshift", NDIM, 10**15)), "4 shifted by 1000000000000000"),
        (computed(("operator.pow", 3, NDIM), ("operator.pow", {"node": "made_1"}, 60),
                  ("operator.mul", {"node": "made_2"}, 1)), "81 to the power of 60|a number of"),
        (computed(("operator.mul", [0], NDIM), ("operator.mul", {"node": "made_1"}, 10**9)),
         "a sequence of 4000000000 values"),
        (computed(("operator.mul", "a", NDIM)), "arithmetic with a text"),
        (computed(("operator.mod", "%999999999d", NDIM)), "arithmetic with a text"),
        (computed(("builtins.round", NDIM, -(10**9))), "rounded to -1000000000 digits"),
        (doubling, "a sequence of more than"),
        (twice_by_writing, "a sequence of more than"),
        (within_itself, "too deep a one"),
        (lambda h: h.update(planned=[["1x3x8x8 float32"]] * 100_000), "more than 256 sets"),
        (lambda h: h.update(planned=[["1x3x8x8 float32"] * 100_000]), "no list of inputs"),
        (lambda h: h.update(planned=[["[" * 900]]), "describes no model"),
        (lambda h: h.update(planned=[["99999999x99999999 float32"]]), "a tensor of 9999"),
        (lambda h: h.update(nodes=[{}] * 100_001), "steps, of which there may be 100000"),
        (lambda h: insert(h, "torch.relu", [1] * 500_001), "more than 500000 arguments of steps"),
        (lambda h: h.update(state=h["state"] * 50_000), "150000 tensors, of which there may be"),
        (lambda h: held(h, "scale").update(path="a." * 200_000), "parts, of which there may be"),
        (layers_within_layers, "layers within layers, more than 8 deep"),
        (softmax_of_many_parts, "2000 layers of AdaptiveLogSoftmaxWithLoss"),
    ],
)  # fmt: skip
def test_work_without_end_is_refused_at_once(path, tmp_path, change, says):
    began = time.monotonic()
    with pytest.raises(FileError, match=says):
        nhwc.load(tampered(path, tmp_path, change))
    # What is not refused takes hours, or all memory: seconds are no measure of a machine's speed.
    assert time.monotonic() - began < 60


def test_layers_of_more_parts_than_any_model_has_are_refused(path, tmp_path, monkeypatch):
    monkeypatch.setattr("nhwc.files.serial.NODES", 20)
    nhwc.load(path)

    def plant(header):
        conv = header["modules"]["conv"]
        header["modules"] |= {f"spare_{number}": conv for number in range(20)}

    with pytest.raises(FileError, match="layers of more than 60 parts and tensors"):
        nhwc.load(tampered(path, tmp_path, plant))


def test_a_recurrent_layer_of_a_billion_layers_is_refused(tmp_path):
    path = tmp_path / "lstm.nhwc"
    nhwc.save(nn.Sequential(nn.LSTM(4, 4)).eval(), path)

    def grow(header):
        (layer,) = header["modules"].values()
        layer["arguments"]["num_layers"] = 10**9

    with pytest.raises(FileError, match="1000000000 layers of LSTM"):
        nhwc.load(tampered(path, tmp_path, grow))


def at_once(header, count):
    """Insert tensors of a gigabyte each, none of which is too large."""
    names = [f"ones_{number}" for number in range(count)]
    insert(header, "torch.broadcast_tensors", *({"node": name} for name in names))
    for name in names:
        insert(header, "torch.ones", 1 << 14, (1 << 14) - 1, name=name)


def with_ones(header, target, *shape, also=()):
    """Insert a step on so many ones."""
    insert(header, target, {"node": "ones"}, *also)
    insert(header, "torch.ones", *shape, name="ones")


def chunks_of_nothing(header):
    insert(header, "chunk", {"node": "ones"}, op="call_method", kwargs=[["chunks", 10**7]])
    insert(header, "torch.ones", 0, 2, name="ones")


@pytest.mark.parametrize(
    "change",
    [
        lambda h: h.update(planned=[["100000x3x100x100 float32"]]),
        lambda h: insert(h, "torch.randn", 60_000, 60_000),
        lambda h: insert(h, "expand", X, 1000, 1000, 10, 3, 8, 8, op="call_method"),
        # No tensor of these is too large: their work is, and their number.
        lambda h: with_ones(h, "torch.linalg.svdvals", 12_000, 12_000),
        lambda h: with_ones(h, "torch.unbind", 150_000, 1),
        lambda h: with_ones(h, "torch.unbind_copy", 1 << 27),
        lambda h: with_ones(h, "torch.unsafe_split", 1 << 27, also=[1]),
        lambda h: with_ones(h, "torch.split_copy", 1 << 27, also=[1]),
        # Of nothing torch makes as many pieces as it is told.
        lambda h: with_ones(h, "torch.chunk", 0, 2, also=[10**7]),
        lambda h: with_ones(h, "torch.unsafe_chunk", 0, 2, also=[10**7]),
        lambda h: with_ones(h, "aten.chunk.default", 0, 2, also=[10**7]),
        chunks_of_nothing,
        lambda h: with_ones(h, "torch.combinations", 2, also=[10**7]),
        lambda h: at_once(h, 5),
        lambda h: insert(h, "torch.nonzero", X),
        lambda h: insert(h, "torch._assert", False, "out of memory"),
        lambda h: insert(h, "nhwc.assert_holds", False, "RuntimeError", "out of memory"),
    ],
)
def test_what_takes_more_than_loading_may_is_loaded_and_not_planned(
    path, tmp_path, change, monkeypatch
):
    monkeypatch.setattr("nhwc.files.loading._served", lambda *_: pytest.fail("it is run"))
    assert nhwc.load(tampered(path, tmp_path, change)).recipes == ()


def test_an_operator_that_says_no_shapes_is_not_run_to_see_what_it_costs(path, tmp_path):
    def change(header):
        insert(header, "torch.histogramdd", {"node": "points"}, [4, 1])
        insert(header, "torch.ones", 5, 2, name="points")

    assert not nhwc.load(tampered(path, tmp_path, change)).recipes


@pytest.mark.parametrize("target", ["torch.div", "torch.divide", "aten.div.Tensor_mode", "div_"])
@pytest.mark.parametrize(("least", "planned"), [(-(1 << 63), False), (-7.0, True)])
def test_a_division_of_whole_numbers_that_may_end_the_process_is_not_run(
    path, tmp_path, target, least, planned
):
    def change(header):
        op = "call_method" if target == "div_" else "call_function"
        minus, how = {"node": "minus"}, [["rounding_mode", "trunc"]]
        insert(header, target, {"node": "least"}, minus, op=op, kwargs=how)
        for name, value in (("minus", -1), ("least", least)):
            insert(header, "torch.full", [1], value, name=name)

    assert bool(nhwc.load(tampered(path, tmp_path, change)).recipes) is planned


def test_the_cost_of_a_file_is_reckoned_once(path, tmp_path, monkeypatch):
    dear = tampered(path, tmp_path, lambda h: insert(h, "torch.randn", 60_000, 60_000))
    planned = [len(nhwc.load(one).recipes) for one in (path, dear)]
    monkeypatch.setattr(Budget, "check", lambda *_: pytest.fail("it is reckoned again"))
    assert [len(nhwc.load(one).recipes) for one in (path, dear)] == planned == [1, 0]
    larger = tampered(path, tmp_path, lambda h: h.update(planned=[["2x3x8x8 float32"]]))
    with pytest.raises(pytest.fail.Exception):
        nhwc.load(larger)


@pytest.mark.parametrize("kept", ["yes", [], [1], [True, True], {"0": True}])
def test_a_cost_in_the_ledger_that_is_none_is_reckoned(path, monkeypatch, kept):
    monkeypatch.setattr(Ledger, "get", lambda ledger, key: kept if "cost" in key else None)
    assert nhwc.load(path).recipes


def test_what_takes_much_in_turns_is_planned(path, tmp_path, monkeypatch):
    planned = []
    monkeypatch.setattr("nhwc.files.loading._served", lambda *given: planned.append(given))

    def in_turns(header):
        for number in range(5):
            insert(header, "torch.sum", {"node": f"ones_{number}"}, name=f"total_{number}")
            insert(header, "torch.ones", 1 << 14, (1 << 14) - 1, name=f"ones_{number}")

    nhwc.load(tampered(path, tmp_path, in_turns))
    assert planned


def test_one_example_is_planned_once_however_often_it_is_named(path, tmp_path, monkeypatch):
    planned = []
    monkeypatch.setattr("nhwc.files.loading._served", lambda *given: planned.append(given))
    nhwc.load(tampered(path, tmp_path, lambda h: h.update(planned=[["1x3x8x8 float32"]] * 200)))
    assert len(planned) == 1


def test_inputs_are_drawn_for_one_example_after_the_other(path, tmp_path, monkeypatch):
    """A file may name 256 examples of a gigabyte each."""
    drawn = []

    def served(_, inputs, *others):
        assert not any(one() is not None for one in drawn)
        drawn.append(weakref.ref(inputs[0]))

    monkeypatch.setattr("nhwc.files.loading._served", served)
    examples = [["1x3x8x8 float32"], ["2x3x8x8 float32"], ["1x3x9x9 float32"]]
    nhwc.load(tampered(path, tmp_path, lambda h: h.update(planned=examples)))
    assert len(drawn) == 3


def test_a_graph_that_raises_on_its_example_loads_and_says_so_when_called(path, tmp_path):
    loaded = nhwc.load(tampered(path, tmp_path, lambda h: insert(h, "torch.relu", X, 1, 2)))
    assert loaded.recipes == ()
    with pytest.raises(TypeError):
        loaded(IMAGE)


def sealed(content, rest=b""):
    """A file with `content` as its header, whose length and checksum are right."""
    fixed = struct.pack("<8sIQQ", MAGIC, 1, len(content), 60 + len(content) + len(rest))
    return fixed + hashlib.sha256(fixed + content).digest() + content + rest


@pytest.mark.parametrize(
    "content",
    [b"[" * 100_000, b'{"a":' * 100_000, b"NaN", b"3", b'{"nodes": NaN}', b"9" * 10_000, b"\xff"],
)
def test_a_header_that_is_no_header_is_damage(path, tmp_path, content):
    target = tmp_path / "f.nhwc"
    target.write_bytes(sealed(content))
    with pytest.raises(FileError, match="is damaged"):
        nhwc.load(target)


def test_bytes_behind_the_last_tensor_are_damage(path, tmp_path):
    content, target = path.read_bytes(), tmp_path / "f.nhwc"
    (length,) = struct.unpack_from("<Q", content, 12)
    header, tensors = content[60 : 60 + length], content[60 + length :]
    assert sealed(header, tensors) == content
    target.write_bytes(sealed(header, tensors + bytes(64)))
    with pytest.raises(FileError, match="64 bytes follow its last tensor"):
        nhwc.load(target)


def test_something_between_tensors_is_damage(path, tmp_path):
    content, target = bytearray(path.read_bytes()), tmp_path / "f.nhwc"
    (length,) = struct.unpack_from("<Q", content, 12)
    end = 60 + length + -(60 + length) % 64 + read(path)[1][0].nbytes
    assert end % 64
    content[end] = 1
    target.write_bytes(content)
    with pytest.raises(FileError, match="something between tensors 0 and 1"):
        nhwc.load(target)


def test_a_file_that_changes_while_it_is_read_is_not_believed(path, tmp_path, monkeypatch):
    other = tampered(path, tmp_path, lambda header: header.update(name="Other")).read_bytes()
    target = tmp_path / "f.nhwc"
    target.write_bytes(path.read_bytes())

    def written_meanwhile(*_):
        target.write_bytes(other)

    monkeypatch.setattr(container, "from_file", written_meanwhile)
    with pytest.raises(FileError, match="it changed while it was read"):
        nhwc.load(target)


def test_a_file_that_says_it_is_longer_than_it_is_is_not_read(tmp_path):
    target = tmp_path / "long.nhwc"
    target.write_bytes(struct.pack("<8sIQQ", MAGIC, 1, 1 << 60, 60) + b"\0" * 32)
    with pytest.raises(FileError, match="is longer than"):
        nhwc.load(target)
    with pytest.raises(FileError, match="it is no file"):
        nhwc.load("/dev/zero")


@pytest.mark.parametrize(
    "entry",
    [{"shape": "12"}, {"shape": [-1]}, {"shape": [1.0]}, {"shape": [True]},
     {"shape": {"a": 1}}, {"shape": [1 << 70]}, {"shape": [0, 1 << 62]}, {"dtype": "object"},
     {"dtype": []}, {"format": 3}, {"format": {}}, {"crc32": "x"}, {"order": [0]},
     {"order": [3, 2, 1, 1]}, {"order": 3}, {"order": ["a"]}, {"order": [3, 2, 1, True]}],
)  # fmt: skip
def test_a_list_of_tensors_of_other_kinds_is_damage(path, tmp_path, entry, monkeypatch):
    real = container._entry
    monkeypatch.setattr(container, "_entry", lambda tensor: real(tensor) | entry)
    header, tensors = read(path)
    del header["tensors"]
    write(tmp_path / "t.nhwc", header, tensors)
    with pytest.raises(FileError, match="damaged"):
        nhwc.load(tmp_path / "t.nhwc")


def test_a_tensor_is_in_an_order_or_channels_last(tmp_path, monkeypatch):
    real, both = container._entry, {"format": "channels_last", "order": [3, 2, 1, 0]}
    monkeypatch.setattr(container, "_entry", lambda tensor: real(tensor) | both)
    write(tmp_path / "t.nhwc", {}, [torch.ones(2, 3, 4, 5)])
    with pytest.raises(FileError, match="4 dimensions and the order"):
        read(tmp_path / "t.nhwc")


def test_a_list_of_more_tensors_than_any_model_has_is_damage(tmp_path, monkeypatch):
    write(tmp_path / "t.nhwc", {}, [torch.ones(1)] * 3)
    monkeypatch.setattr(container, "_TENSORS", 2)
    with pytest.raises(FileError, match="3 tensors, of which there may be 2"):
        read(tmp_path / "t.nhwc")


def test_a_tensor_of_more_dimensions_than_torch_computes_with_is_not_written_nor_read(
    tmp_path, monkeypatch
):
    target, many = tmp_path / "t.nhwc", [torch.ones([1] * 65)]
    with pytest.raises(InputError, match="a tensor of 65 dimensions; a file holds up to 64"):
        write(target, {}, many)
    assert list(tmp_path.iterdir()) == []
    with monkeypatch.context() as patched:
        patched.setattr(container, "_DIMENSIONS", 65)
        write(target, {}, many)
    with pytest.raises(FileError, match=r"damaged: .*the shape \[1, 1"):
        read(target)


@pytest.mark.parametrize("format", ["channels_last_3d", "other"])
def test_a_format_that_the_shape_cannot_have_is_damage(tmp_path, monkeypatch, format):
    real = container._entry
    monkeypatch.setattr(container, "_entry", lambda tensor: real(tensor) | {"format": format})
    write(tmp_path / "t.nhwc", {}, [torch.ones(2, 3, 4, 5)])
    with pytest.raises(FileError, match=f"damaged: .*4 dimensions and {format}"):
        read(tmp_path / "t.nhwc")


def test_an_error_of_a_file_is_one_line_without_escapes(path, tmp_path):
    text = "\x1b[2J\n\x1b]0;title\x07\u202eevil" * 100
    with pytest.raises(FileError) as caught:
        nhwc.load(tampered(path, tmp_path, lambda h: insert(h, text, X)))
    said = str(caught.value).replace(str(tmp_path), "")
    assert said.isprintable()
    assert len(said) < 1000


@pytest.mark.parametrize(
    "name", ["a b", "", "1a", "x=1", "a.b", "a,b", "self", "for", "__x", "\uff58", "a" * 10_001]
)
def test_what_is_no_name_is_no_name(name):
    with pytest.raises(Foreign):
        identifier(name)


@pytest.mark.parametrize(
    "name", ['a"b', "a'b", "a\\", "a\nb", "class", "forward", "_modules", "a b"]
)
def test_what_no_module_is_called_is_refused(name):
    with pytest.raises(Foreign):
        checked_part(name)


# The last check knows none of the fields: it reads what torch wrote.


def graph_of(build):
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(build(graph, x))
    return graph


@pytest.mark.parametrize(
    "build",
    [
        lambda g, x: g.call_function(torch.flatten, (x,), {"start_dim=print(1), end_dim": -1}),
        lambda g, x: g.call_function(torch.flatten, (x,), {"start_dim=1, end_dim": -1}),
        lambda g, x: g.call_function(torch.flatten, (x,), {"a=[i for i in x], b": -1}),
        lambda g, x: g.call_function(torch.flatten, (x,), {"a=(lambda: 1), b": -1}),
        lambda g, x: g.call_method('relu"), print("', (x,)),
        lambda g, x: g.call_method("relu", (x,), {"**{}, **x": 1}),
        lambda g, x: g.create_node("get_attr", 'a"), print("b'),
        lambda g, x: g.create_node("call_module", "a.__class__", (x,)),
        lambda g, x: g.create_node("placeholder", "y=print(1), z"),
        lambda g, x: g.create_node("placeholder", "y=1, z"),
        lambda g, x: g.create_node("placeholder", "y", (x,)),
        lambda g, x: g.create_node("placeholder", "torch"),
        lambda g, x: g.create_node("placeholder", "*y"),
        lambda g, x: g.create_node("placeholder", "y", type_expr=int),
        lambda g, x: g.create_node("call_function", torch.relu, (x,), type_expr=int),
    ],
)
def test_the_code_of_a_graph_has_nothing_but_its_steps(build):
    with pytest.raises(Foreign):
        check_code(graph_of(build))


@pytest.mark.parametrize("written", ["print(1)\n{}", "{}\nprint(1)\n", "pass\n", ""])
def test_the_code_of_a_graph_is_one_function(written, monkeypatch):
    graph = graph_of(lambda g, x: x)
    code = graph.python_code("self")
    code.src = written.format(code.src)
    monkeypatch.setattr(graph, "python_code", lambda _: code)
    with pytest.raises(Foreign, match="more than one function"):
        check_code(graph)


@pytest.mark.parametrize(
    ("old", "new"),
    [("def", "@print\ndef"), ("):", ") -> print(1):"), ("x):", "*x):"), ("x):", "*, x):")],
)
def test_the_code_of_a_graph_begins_with_its_arguments_alone(old, new, monkeypatch):
    graph = graph_of(lambda g, x: x)
    code = graph.python_code("self")
    code.src = code.src.replace(old, new, 1)
    monkeypatch.setattr(graph, "python_code", lambda _: code)
    with pytest.raises(Foreign, match="its code begins with"):
        check_code(graph)


@pytest.mark.parametrize(
    "build",
    [
        lambda g, x: g.call_function(torch.flatten, (x,), {"start_dim": -1}),
        lambda g, x: g.call_function(torch.full, ((2,), float("-inf")), {"dtype": torch.half}),
        lambda g, x: g.call_function(torch.ones, (2,), {"device": torch.device("cpu", 0)}),
        lambda g, x: (g.call_method("to", (x, torch.channels_last)), slice(None, x, -1), ..., 1j),
        lambda g, x: {"a": [x, (x,)], "b": -1, 'q"\n': "t'\\"},
        lambda g, x: g.call_function(getattr, (x, "shape")),
        lambda g, x: g.call_module("a.0-1.b", (x,), {"input": x}),
        lambda g, x: g.placeholder("input", default_value=float("inf")),
    ],
)
def test_what_torch_writes_for_steps_of_all_kinds_passes(build):
    check_code(graph_of(build))


# What is saved can be loaded, or is refused in words and not written.


class Named(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.parts = nn.ModuleDict({name: nn.Conv2d(3, 3, 1)})
        self.name = name

    def forward(self, x):
        return self.parts[self.name](x)


@pytest.mark.parametrize("name", ["a\\b", "a b", "a-b", "é"])
def test_what_is_saved_can_be_loaded(name, tmp_path):
    try:
        nhwc.save(Named(name).eval(), tmp_path / "m.nhwc")
    except InputError:
        assert list(tmp_path.iterdir()) == []
    else:
        nhwc.load(tmp_path / "m.nhwc")(IMAGE)


def test_text_of_others_is_shown_not_obeyed():
    assert printable("a\x1b[31m\x9b2J\u202e\u2028\r") == r"a\x1b[31m\x9b2J\u202e\u2028\r"
    assert printable("a\ud7ffb") == r"a\ud7ffb"
    assert printable("größe 3×3\n\tx") == "größe 3×3\n\tx"
    assert shown("a\n b\x07" + "c" * 1000).startswith(r"a b\x07ccc")
    assert len(shown("c" * 1000)) == 300


def test_a_path_that_no_file_can_have_is_refused():
    with pytest.raises(FileError, match=r"cannot read .*: embedded null"):
        nhwc.load("a\0b")
    with pytest.raises(FileError, match=r"cannot write .*: embedded null"):
        nhwc.save(nn.Conv2d(3, 3, 1).eval(), "a\0b")


def test_a_file_named_with_escapes_is_shown_by_the_command_line(tmp_path, capsys):
    from nhwc.cli import main

    path = tmp_path / "a\x1b[2Jb.nhwc"
    path.write_bytes(MAGIC + os.urandom(5))
    assert main(["audit", str(path)]) == 2
    said = capsys.readouterr().err
    assert "\x1b" not in said
    assert r"\x1b[2J" in said
