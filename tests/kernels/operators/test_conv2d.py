"""`nhwc::conv2d` as torch sees it: traced, exported, compiled, and refused with reasons."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from nhwc import InputError, kernels
from nhwc.kernels.convolutions.conv import conv2d_candidates
from nhwc.kernels.convolutions.spec import ConvSpec
from nhwc.kernels.language import compiler
from nhwc.kernels.layers.activations import Activation
from nhwc.kernels.operators.conv2d import conv2d, op_arguments

from ..cases import Case

SPEC = ConvSpec(2, 16, 9, 9, 24, 3, 3, padding=(1, 1), activation=Activation.RELU)


class Layer(nn.Module):
    def __init__(self, kernel, packed):
        super().__init__()
        self.kernel = kernel
        self.register_buffer("packed", packed)

    def forward(self, x):
        return conv2d(self.kernel, x, self.packed) * 2


@pytest.fixture(params=range(3))
def layer(request):
    kernels.register()
    case = Case(SPEC)
    kernel = conv2d_candidates(SPEC)[request.param]
    return Layer(kernel, kernel.pack(case.weight, case.bias)), case


def test_torch_finds_the_operator_in_order(layer):
    module, case = layer
    arguments = (case.x, module.packed, None, *op_arguments(module.kernel))
    torch.library.opcheck(
        torch.ops.nhwc.conv2d.default,
        arguments,
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


def test_export_and_load(layer, tmp_path):
    module, case = layer
    with torch.inference_mode():
        expected = module(case.x)
    program = torch.export.export(module, (case.x,))
    torch.export.save(program, tmp_path / "layer.pt2")
    again = torch.export.load(tmp_path / "layer.pt2").module()
    with torch.no_grad():
        assert torch.equal(again(case.x), expected)


def test_other_sizes_than_the_kernel_was_made_for(layer):
    module, _ = layer
    other = Case(ConvSpec(1, 16, 5, 13, 24, 3, 3, padding=(1, 1), activation=Activation.RELU))
    packed = module.kernel.pack(other.weight, other.bias)
    other.check(conv2d(module.kernel, other.x, packed), module.kernel.name)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_the_result_is_float32_for_images_of_every_type(layer, dtype):
    module, case = layer
    x = case.x.to(dtype)
    arguments = (x, module.packed, None, *op_arguments(module.kernel))
    torch.library.opcheck(
        torch.ops.nhwc.conv2d.default, arguments, test_utils=("test_schema", "test_faketensor")
    )
    expected = conv2d(module.kernel, x.float(), module.packed)
    assert torch.equal(conv2d(module.kernel, x, module.packed), expected)


def test_several_threads_call_one_layer(layer):
    module, _ = layer
    inputs = [torch.randn(1, 16, 30, 30) for _ in range(16)]
    with torch.inference_mode():
        expected = [module(x) for x in inputs]

    def call(x):
        with torch.inference_mode():
            return module(x)

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(call, inputs))
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


def test_no_gradient(layer):
    module, case = layer
    with pytest.raises(InputError, match="nhwc::conv2d has no gradient"):
        module(case.x.clone().requires_grad_())
    with torch.no_grad():
        module(case.x.clone().requires_grad_())


def test_weights_of_another_machine(layer, monkeypatch):
    module, case = layer
    arguments = list(op_arguments(module.kernel))
    arguments[1] = "neon" if arguments[1] != "neon" else "avx2"
    with pytest.raises(InputError, match="Pack them again here"):
        torch.ops.nhwc.conv2d(case.x, module.packed, None, *arguments)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.zeros(16, 9, 9), "the input has 3 dimensions"),
        (torch.zeros(1, 16, 9, 9, dtype=torch.int32), "computes in float32"),
        (torch.zeros(1, 16, 0, 9), "smaller than the 3x3 filter"),
    ],
)
def test_messages(layer, x, message):
    module, _ = layer
    with pytest.raises(InputError, match=message):
        conv2d(module.kernel, x, module.packed)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (2, -3, "16 channels to -3 cannot be cut"),
        (5, [1], r"stride is \[1\]. Give two sizes"),
        (6, [1, 1, 1], r"padding is \[1, 1, 1\]. Give two sizes"),
        (7, [], r"dilation is \[\]. Give two sizes"),
    ],
)
def test_settings_that_cannot_work(layer, place, value, message):
    module, case = layer
    settings = list(op_arguments(module.kernel))
    settings[place] = value
    with pytest.raises(InputError, match=message):
        torch.ops.nhwc.conv2d(case.x, module.packed, None, *settings)


def test_packed_weights_of_another_type(layer):
    module, case = layer
    with pytest.raises(InputError, match=r"numbers of torch\.float64"):
        conv2d(module.kernel, case.x, module.packed.double())


def test_prepare_reports_each_kernel_and_compiles_it(monkeypatch):
    seen, compiled = [], []
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "address_of", lambda kernel, isa: compiled.append(kernel.name))
        kernels.prepare(lambda name, done, total: seen.append((name, done, total)))
    assert compiled == [name for name, *_ in seen]
    assert [done for _, done, _ in seen] == list(range(len(seen)))
    assert {"direct", "tile1", "walk", "winograd2x2", "winograd4x4"} <= {name for name, *_ in seen}
    assert kernels.available()
