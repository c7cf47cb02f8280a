"""A kernel that holds its weights several times must be clearly faster than one that does not."""

import dataclasses

import pytest
import torch
from torch import fx, nn

from nhwc.formats import Format
from nhwc.plan.implementation import Implementation, Timed
from nhwc.plan.native.weighted import weighted
from nhwc.plan.scene import Scene
from nhwc.plan.specs import Convolution, Layer, Linear, OperatorSpec
from nhwc.plan.weighing import without_waste

LAST, PLAIN = Format.CHANNELS_LAST, Format.CONTIGUOUS
TAIL = (False, False, None, torch.float32, "cpu")


def convolution(channels):
    weight, pairs = (channels, channels, 3, 3), ((1, 1),) * 3
    return Convolution((1, channels, 14, 14), weight, *pairs, 1, *TAIL)


LINEAR = Linear((1, 1024), (1024, 1024), *TAIL)


OURS = {
    "f4": ("nhwc winograd4x4", 4.0),
    "f2": ("nhwc winograd2x2", 16 / 9),
    "direct": ("nhwc direct", 1.0),
    "elsewhere": ("nhwc direct", 1.0),
    "ours": ("nhwc", 0.0),
}
THEIRS = {"torch": 0.0, "onednn": 1.0}


def implementation(name, spec):
    """A kernel by a short name, with as many copies of its weights as it holds."""
    layouts = {"torch": (PLAIN, PLAIN), "elsewhere": (PLAIN, LAST)}.get(name, (LAST, LAST))
    layouts = (None, None) if isinstance(spec, Linear) else layouts
    if name in THEIRS:
        return Implementation(name, *layouts, copies=THEIRS[name])
    full, copies = OURS[name]
    return Implementation(full, *layouts, emit=print, copies=copies)


def weighed(specs, **seconds):
    """For every layer of these specifications the short names of the kernels that are left."""
    layers = [Layer(spec, f"node {number}", ()) for number, spec in enumerate(specs)]
    known = {spec.key: {name: implementation(name, spec) for name in seconds} for spec in specs}
    made = {layer.node: tuple(known[layer.spec.key].values()) for layer in layers}
    timings = {node: tuple(map(Timed, some, seconds.values())) for node, some in made.items()}
    found = without_waste(Scene(None, None, tuple(layers), made, {}), timings)
    left = [[timed.implementation for timed in found[layer.node]] for layer in layers]
    return [
        {name for name, one in known[layer.spec.key].items() if one in some}
        for layer, some in zip(layers, left, strict=True)
    ]


@pytest.mark.parametrize(
    ("spec", "seconds", "expected"),
    [
        (convolution(256), {"f4": 1.0, "f2": 1.04, "direct": 3.0}, {"f2", "direct"}),
        (convolution(256), {"f4": 1.0, "f2": 1.04, "direct": 1.0}, {"direct"}),
        (convolution(256), {"f4": 1.0, "f2": 1.2, "direct": 3.0}, {"f4", "f2", "direct"}),
        (convolution(64), {"f4": 1.0, "f2": 1.0, "direct": 1.0}, {"f4", "f2", "direct"}),
        (convolution(256), {"f4": 1.0, "elsewhere": 1.0}, {"f4", "elsewhere"}),
        (convolution(256), {"f4": 1.0, "onednn": 1.0}, {"f4", "onednn"}),
        (LINEAR, {"torch": 1.04, "onednn": 1.0, "ours": 1.0}, {"torch", "ours"}),
        (LINEAR, {"torch": 1.5, "onednn": 1.0}, {"torch", "onednn"}),
    ],
)
def test_which_kernels_are_worth_their_memory(spec, seconds, expected):
    assert weighed([spec], **seconds) == [expected]


def test_on_a_gpu_the_fastest_kernels_stay_however_much_they_hold():
    spec = dataclasses.replace(convolution(256), device="cuda")
    assert weighed([spec], f4=1.0, direct=1.0) == [{"f4", "direct"}]


def test_small_filters_of_a_large_model_come_from_memory_as_well(monkeypatch):
    monkeypatch.setattr("nhwc.plan.weighing._ALWAYS", 1 << 28)
    seconds = {"f4": 165e-6, "f2": 184e-6, "direct": 424e-6}
    assert weighed([convolution(64)] * 30, **seconds) == [{*seconds}] * 30
    assert weighed([convolution(64)] * 300, **seconds) == [{"f2", "direct"}] * 300


def test_a_model_of_large_filters_holds_few_of_them_transformed(monkeypatch):
    monkeypatch.setattr("nhwc.plan.weighing._ALWAYS", 1 << 26)
    specs = [convolution(512), convolution(384), convolution(256)]
    seconds = {"f4": 1.0, "f2": 1.2, "direct": 3.0}
    assert weighed(specs, **seconds) == [{*seconds}] * 3
    # The smaller a filter, the more is saved for each number that is held.
    few = [{"direct"}, {"f2", "direct"}, {"f2", "direct"}]
    assert weighed(specs * 10, **seconds) == few * 10


def held(implementation, *constants):
    """How many numbers a kernel holds beside its constants, for each number of the weights."""
    prepared = implementation.prepare(*constants)
    tensors = [prepared] if isinstance(prepared, torch.Tensor) else prepared
    given = {constant.untyped_storage().data_ptr() for constant in constants}
    own = [one for one in tensors if one.untyped_storage().data_ptr() not in given]
    return sum(one.numel() for one in own) / constants[0].numel()


@pytest.mark.parametrize(
    "spec",
    [
        Convolution((1, 64, 14, 14), (64, 64, 3, 3), *[(1, 1)] * 3, 1, *TAIL),
        Convolution((1, 64, 14, 14), (64, 64, 1, 1), (1, 1), (0, 0), (1, 1), 1, *TAIL),
        Convolution((1, 64, 14, 14), (64, 32, 3, 3), *[(1, 1)] * 3, 2, *TAIL),
        Linear((2, 256), (256, 256), *TAIL),
        Linear((64, 256), (256, 256), *TAIL),
        Linear((2, 49, 256), (256, 256), *TAIL),
    ],
    ids=lambda spec: f"{'x'.join(map(str, spec.input))} {'x'.join(map(str, spec.weight))}",
)
def test_each_kernel_of_ours_holds_the_copies_that_it_names(spec):
    constants = torch.randn(spec.weight), torch.randn(spec.weight[0])
    kernels = weighted(spec)
    assert kernels
    named = {one.name: one.copies for one in kernels}
    assert {one.name: held(one, *constants) for one in kernels} == pytest.approx(named, abs=0.1)


def test_weights_that_are_read_in_place_come_from_memory_as_well():
    """Of many small layers, one read where it lies is no faster than one that was packed."""
    small = Linear((8, 512), (512, 512), *TAIL)
    assert weighed([small] * 40, torch=1.2e-4, onednn=1e-4) == [{"torch", "onednn"}] * 40
    assert weighed([small] * 40, torch=1.02e-4, onednn=1e-4) == [{"torch"}] * 40


@pytest.mark.parametrize(("channels", "kept"), [(64, {"direct"}), (4500, {"f4", "direct"})])
def test_the_weights_of_a_transposed_convolution_count(channels, kept):
    graph = fx.symbolic_trace(
        nn.Sequential(nn.ConvTranspose3d(channels, channels, 2, 2, device="meta"))
    )
    (node,) = graph.graph.find_nodes(op="call_module", target="0")
    spec = convolution(1024)
    layers = (Layer(spec, "node", ()), Layer(OperatorSpec("transposed", "", "cpu"), node, ()))
    some = {name: implementation(name, spec) for name in ("f4", "direct")}
    made = {"node": tuple(some.values()), node: ()}
    timings = {
        "node": tuple(Timed(one, s) for one, s in zip(made["node"], (0.1, 0.3), strict=True))
    }
    found = without_waste(Scene(graph, None, layers, made, {}), timings | {node: ()})
    left = [timed.implementation for timed in found["node"]]
    assert {name for name, one in some.items() if one in left} == kept
