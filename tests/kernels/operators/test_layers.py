"""`nhwc::...` beside the convolutions, as torch sees them: against torch's own, and refused."""

import pytest
import torch
import torch.nn.functional as F

from nhwc import Format, InputError, format_of
from nhwc.kernels.operators.layers import OPERATORS, register

torch.manual_seed(0)
X = torch.randn(2, 12, 9, 8)
WEIGHT, BIAS = torch.randn(12, 1, 3, 3), torch.randn(12)
ROW = torch.randn(5, 12)
GATE = torch.rand(2, 12, 1, 1)
CASES = {
    "depthwise": (
        (X, WEIGHT, BIAS, None, [2, 2], [1, 1], [1, 1], "relu"),
        lambda: F.conv2d(X, WEIGHT, BIAS, 2, 1, 1, 12).relu(),
    ),
    "max_pool": (
        (X, [3, 3], [2, 2], [1, 1], True),
        lambda: F.max_pool2d(X, 3, 2, 1, ceil_mode=True),
    ),
    "avg_pool": (
        (X, [3, 2], [2, 3], [1, 1], True, False),
        lambda: F.avg_pool2d(X, (3, 2), (2, 3), 1, True, False),
    ),
    "adaptive_avg_pool": ((X, [3, 2]), lambda: F.adaptive_avg_pool2d(X, (3, 2))),
    "affine": (
        (X, BIAS, BIAS, X, "silu"),
        lambda: F.silu(X * BIAS[:, None, None] + BIAS[:, None, None] + X),
    ),
    "activation": ((X, "leaky_relu", 0.2), lambda: F.leaky_relu(X, 0.2)),
    "add": ((X, X, "relu6"), lambda: F.relu6(X + X)),
    "multiply": ((X, GATE), lambda: X * GATE),
    "linear": ((X[:, :, 0, 0], ROW, None, "none"), lambda: X[:, :, 0, 0] @ ROW.T),
    "interleave": (([X, -X],), lambda: F.channel_shuffle(torch.cat([X, -X], 1), 2)),
    "softmax": ((X,), lambda: X.softmax(1)),
    "layer_norm": (
        (X, BIAS, None, 1e-5),
        lambda: F.layer_norm(X.permute(0, 2, 3, 1), (12,), BIAS).permute(0, 3, 1, 2),
    ),
    "nearest": ((X, [20, 3]), lambda: F.interpolate(X, (20, 3))),
    "bilinear": ((X, [18, 16], False), lambda: F.interpolate(X, (18, 16), mode="bilinear")),
}


@pytest.fixture(autouse=True)
def _registered():
    register()


def operator(name):
    return getattr(torch.ops.nhwc, name)


def test_every_operator_has_a_case():
    assert set(CASES) == {operator.name for operator in OPERATORS}


@pytest.mark.parametrize("name", CASES)
def test_computes_what_torch_does(name):
    arguments, expected = CASES[name]
    y = operator(name)(*arguments)
    torch.testing.assert_close(y, expected(), rtol=1e-5, atol=1e-5)
    if y.ndim == 4:
        assert format_of(y, Format.CHANNELS_LAST) is Format.CHANNELS_LAST


@pytest.mark.parametrize("name", CASES)
def test_torch_finds_it_in_order(name):
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operator(name).default, CASES[name][0], test_utils=tests)


@pytest.mark.parametrize("name", ["depthwise", "max_pool", "activation", "softmax"])
def test_an_empty_batch(name):
    (_, *rest), expected = CASES[name]
    y = operator(name)(X[:0], *rest)
    assert y.shape == (0, *expected().shape[1:])


def test_no_gradient():
    with pytest.raises(InputError, match="nhwc::softmax has no gradient"):
        torch.ops.nhwc.softmax(X.clone().requires_grad_())
    with torch.no_grad():
        torch.ops.nhwc.softmax(X.clone().requires_grad_())


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("softmax", (X[0],), "needs floats of N, C, H, W"),
        ("softmax", (X.long(),), "torch.int64"),
        ("activation", (X, "cube", 0.0), "activation 'cube' is not known"),
        ("max_pool", (X, [20, 20], [1, 1], [0, 0], False), "Output size is too small"),
        ("max_pool", (X, [2, 2], [0, 1], [0, 0], False), r"stride is \[0, 1\]. Give two sizes"),
        ("max_pool", (X, [2], [1, 1], [0, 0], False), r"size is \[2\]. Give two sizes"),
        (
            "depthwise",
            (X, WEIGHT[:4], *CASES["depthwise"][0][2:]),
            "nhwc::depthwise: .* must match",
        ),
        ("depthwise", (X, WEIGHT, BIAS[:4], *CASES["depthwise"][0][3:]), "must match"),
        ("affine", (X, BIAS[:5], None, None, "none"), "vector of size equal to the number of"),
        ("affine", (X, BIAS, None, X[:, :5], "none"), "nhwc::affine"),
        ("affine", (X[:, :, :1], BIAS, None, X, "none"), "cannot be added to"),
        ("add", (X, X[:, :1], "none"), "cannot be added to"),
        ("multiply", (X, X[:1]), "or of one pixel for each image"),
        ("multiply", (X, X[:, :, :1]), "or of one pixel for each image"),
        ("multiply", (X, GATE[:, :1]), "or of one pixel for each image"),
        ("linear", (X[:, :, 0, 0], ROW[:, :0], None, "none"), "nhwc::linear"),
        ("linear", (X[:, :, 0, 0], torch.ones(5, 24), None, "none"), "nhwc::linear"),
        ("linear", (X[:, :, 0, 0], ROW, BIAS, "none"), "nhwc::linear"),
        ("linear", (X[:, :, 0, 0], BIAS, None, "none"), "nhwc::linear: .* Give a matrix"),
        ("max_pool", (ROW, [1, 1], [1, 1], [0, 0], False), "nhwc::max_pool: "),
        ("interleave", ([X, X[:, :5]],), "equal size"),
        ("layer_norm", (X, BIAS[:5], None, 1e-5), "nhwc::layer_norm: .*normalized_shape"),
        ("nearest", (X, [0, 3]), r"size is \[0, 3\]"),
        ("bilinear", (X[:, :, :0], [3, 3], True), "needs floats of N, C, H, W"),
    ],
)
def test_messages(name, arguments, message):
    with pytest.raises(InputError, match=message):
        operator(name)(*arguments)
