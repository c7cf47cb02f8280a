"""Rules of operators: which format a result has, by the formats of what went in."""

from __future__ import annotations

from .rule import Rule, Section
from .strides import LAST, X

VOLUME = "x = torch.rand(2, 3, 4, 8, 8)\nx = x.to(memory_format=torch.channels_last_3d)"
WEIGHT = "w = torch.rand(8, 3, 3, 3)"
WEIGHT_LAST = f"{WEIGHT}\nw = w.to(memory_format=torch.channels_last)"


def _conv(dtype: str) -> str:
    """A convolution of images in this dtype, held against float32."""
    return (
        f"{LAST}\n{WEIGHT_LAST}\n"
        f"y = F.conv2d(x.to(torch.{dtype}), w.to(torch.{dtype}))\nsame(y, F.conv2d(x, w))"
    )


def _conv_3d(dtype: str) -> str:
    """A convolution of clips in this dtype, held against float32."""
    weight = "w = torch.rand(4, 3, 3, 3, 3)\nw = w.to(memory_format=torch.channels_last_3d)"
    return (
        f"{VOLUME}\n{weight}\n"
        f"y = F.conv3d(x.to(torch.{dtype}), w.to(torch.{dtype}))\nsame(y, F.conv3d(x, w))"
    )


SECTIONS = (
    Section(
        "Number by number",
        (
            Rule(
                "a pointwise operator preserves",
                "channels_last",
                f"{LAST}\ny = x.relu()\nsame(y, x)",
            ),
            Rule(
                "two operands, both channels last",
                "channels_last",
                f"{LAST}\ny = x + x\nsame(y, 2 * x)",
            ),
            Rule(
                "channels last + contiguous: the first wins",
                "channels_last",
                f"{LAST}\nw = x.contiguous()\ny = x + w\nsame(y, w + x)",
            ),
            Rule(
                "contiguous + channels last: the first wins",
                "contiguous",
                f"{X}\nw = x.to(memory_format=torch.channels_last)\ny = x + w\nsame(y, w + x)",
            ),
            Rule(
                "channels last + a number per channel",
                "channels_last",
                f"{LAST}\nw = torch.rand(3, 1, 1)\ny = x + w\nsame(y, x.contiguous() + w)",
            ),
        ),
    ),
    Section(
        "Written into a tensor that is there",
        (
            Rule(
                "out=: a tensor of the right shape keeps its own strides: contiguous",
                "contiguous",
                f"{LAST}\ny = torch.empty(10, 3, 32, 32)\ntorch.add(x, x, out=y)\nsame(y, 2 * x)",
            ),
            Rule(
                "out=: ... or channels last",
                "channels_last",
                f"{X}\ny = torch.empty_like(x, memory_format=torch.channels_last)\n"
                "torch.add(x, x, out=y)\nsame(y, 2 * x)",
            ),
            Rule(
                "out=: an empty tensor takes the format of the result",
                "channels_last",
                f"{LAST}\ny = torch.empty(0)\ntorch.add(x, x, out=y)\nsame(y, 2 * x)",
            ),
            Rule(
                "out=: cat into an empty tensor too",
                "channels_last",
                f"{LAST}\ny = torch.empty(0)\ntorch.cat([x, x], 1, out=y)\n"
                "same(y, torch.cat([x, x], 1))",
            ),
            Rule(
                "copy_ leaves the target's strides",
                "contiguous",
                f"{LAST}\ny = torch.empty(10, 3, 32, 32)\ny.copy_(x)\nsame(y, x)",
            ),
            Rule(
                "+= leaves the target's strides",
                "contiguous",
                f"{LAST}\ny = torch.zeros(10, 3, 32, 32)\ny += x\nsame(y, x)",
            ),
        ),
    ),
    Section(
        "Layers",
        (
            Rule(
                "conv2d: channels-last weight, contiguous input",
                "channels_last",
                f"{X}\n{WEIGHT_LAST}\ny = F.conv2d(x, w)\nsame(y, F.conv2d(x, w.contiguous()))",
            ),
            Rule(
                "conv2d: contiguous weight, channels-last input",
                "channels_last",
                f"{LAST}\n{WEIGHT}\ny = F.conv2d(x, w)\nsame(y, F.conv2d(x.contiguous(), w))",
            ),
            Rule(
                "conv2d: all contiguous",
                "contiguous",
                f"{X}\n{WEIGHT}\ny = F.conv2d(x, w)\n"
                "same(y, F.conv2d(x.to(memory_format=torch.channels_last), w))",
            ),
            Rule(
                "conv2d: one image without a batch, channels-last weight: channels are densest",
                (1, 240, 8),
                f"x = torch.rand(3, 32, 32)\n{WEIGHT_LAST}\ny = F.conv2d(x, w)\ny.stride()",
                names=(("x", "CHW"), ("y", "CHW")),
            ),
            Rule(
                "conv1d knows no channels last",
                "contiguous",
                "x = torch.rand(2, 8, 16).transpose(1, 2)\nw = torch.rand(4, 16, 3)\n"
                "y = F.conv1d(x, w)\nformat_of(y)",
            ),
            Rule(
                "batch_norm preserves",
                "channels_last",
                f"{LAST}\ny = F.batch_norm(x, None, None, training=True)\n"
                "same(y, F.batch_norm(x.contiguous(), None, None, training=True))",
            ),
            Rule(
                "an operator without support is still right",
                True,
                f"{LAST}\ny = F.instance_norm(x)\n"
                "torch.allclose(y, F.instance_norm(x.contiguous()), atol=1e-5)",
            ),
            Rule("conv2d in bfloat16", "channels_last", _conv("bfloat16")),
            Rule("conv2d in float16", "channels_last", _conv("float16")),
            Rule("conv2d in float64", "channels_last", _conv("float64"), elsewhere="contiguous"),
        ),
    ),
    Section(
        "Layers of clips",
        (
            Rule(
                "5-D: a pointwise operator preserves",
                "channels_last_3d",
                f"{VOLUME}\ny = x.relu()\nsame(y, x)",
            ),
            Rule("5-D: conv3d keeps", "channels_last_3d", _conv_3d("float32")),
            Rule(
                "5-D: conv3d in bfloat16",
                "channels_last_3d",
                _conv_3d("bfloat16"),
                elsewhere="contiguous",
            ),
            Rule(
                "5-D: conv3d in float16",
                "channels_last_3d",
                _conv_3d("float16"),
                elsewhere="contiguous",
            ),
            Rule(
                "5-D: batch_norm preserves",
                "channels_last_3d",
                f"{VOLUME}\ny = F.batch_norm(x, None, None, training=True)\n"
                "same(y, F.batch_norm(x.contiguous(), None, None, training=True))",
            ),
        ),
    ),
)
