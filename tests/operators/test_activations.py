"""One table of activations: torch's modules, functions and in-place forms, oneDNN's, and ours."""

import pytest
import torch
from torch import nn

from nhwc.kernels.layers.activations import Activation as Code
from nhwc.kernels.layers.activations import code_of
from nhwc.kernels.layers.elementwise import activation_step
from nhwc.kernels.tape.invoke import Invocation
from nhwc.kernels.tape.steps import View
from nhwc.operators import activations
from nhwc.operators.activations import (
    FUNCTIONS,
    MODULES,
    NamedActivation,
    in_onednn,
    in_torch,
    of_module,
)

SETTINGS = {
    nn.Hardtanh: [(-1.0, 1.0), (0.0, 6.0), (-0.5, float("inf"))],
    nn.LeakyReLU: [(0.01,), (0.3,)],
    nn.GELU: [("none",), ("tanh",)],
}
OTHERS = [nn.ELU(0.5), nn.CELU(2.0), nn.Softplus(2.0), nn.Softplus(1.0, 5.0), nn.GELU("other")]
"""Settings that the table leaves to torch."""
EVERY = [kind(*given) for kind in MODULES for given in SETTINGS.get(kind, [()])]
ONEDNN_LACKS = {
    *("hardsigmoid", "hardtanh", "mish", "relu", "sigmoid", "elu", "selu", "softplus"),
    *("quick_gelu", "erf_gelu", "tanh_gelu", "squared_relu"),
}


def data():
    return torch.linspace(-8, 8, 160).reshape(1, 16, 2, 5).to(memory_format=torch.channels_last)


@pytest.mark.parametrize("module", EVERY, ids=repr)
def test_all_who_compute_it_agree(module):
    known, x = of_module(module), data()
    expected = module(x.clone())
    torch.testing.assert_close(in_torch(known)(x.clone()), expected)
    for function, kind in FUNCTIONS.items():
        numbers = (*known.numbers,) if kind in (nn.Hardtanh, nn.LeakyReLU) else ()
        if kind is type(module) and kind is not nn.GELU:
            call = getattr(torch.Tensor, function) if isinstance(function, str) else function
            torch.testing.assert_close(call(x.clone(), *numbers), expected)
    code = code_of(known.name, known.numbers)
    if code is not None:
        y = torch.empty_like(x)
        views = [View(name, (1, 16, 2, 5), 16) for name in "xy"]
        Invocation.of([activation_step(*views, code[0], slope=code[1])], 1)({"x": x, "y": y})
        torch.testing.assert_close(y, expected, atol=1e-6, rtol=1e-5)
    assert (code is None) is (known == NamedActivation("hardtanh", (-1.0, 1.0)))


@pytest.mark.parametrize("module", EVERY, ids=repr)
def test_onednn_computes_what_the_table_says(module):
    known, x = of_module(module), torch.linspace(-8, 8, 40).reshape(5, 8)
    spelt = in_onednn(known)
    assert (spelt is None) is (known.name in ONEDNN_LACKS)
    if spelt is not None:
        y = torch.ops.mkldnn._linear_pointwise.default(x, torch.eye(8), None, *spelt)
        torch.testing.assert_close(y, module(x), atol=1e-5, rtol=1e-5)


def test_our_kernels_have_what_the_table_has_and_nothing_else():
    known = {(of_module(module).name, of_module(module).numbers) for module in EVERY}
    ours = {code_of(*one)[0] for one in known if code_of(*one)}
    assert ours == set(Code) - {Code.NONE}


@pytest.mark.parametrize("module", OTHERS, ids=repr)
def test_what_is_set_otherwise_is_none_of_the_table(module):
    assert of_module(module) is None


def test_names_of_functions():
    assert {"relu", "relu_", "gelu", "hardtanh", "sigmoid_", "mish"} <= activations.NAMES
