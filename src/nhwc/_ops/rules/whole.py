"""Rules of whole models: how they are converted, and what compilers make of them."""

from __future__ import annotations

from .rule import Rule, Section
from .strides import LAST, NO_RANK_4

NET = "net = convert_(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval())"
POSITIONS = (
    "net = nn.Sequential(nn.Conv2d(3, 8, 3))\nnet.position = nn.Parameter(torch.rand(1, 4, 8, 8))\n"
)
MIXED = "net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv3d(3, 8, 3))\n"
SHARED = (
    "net = nn.ModuleList([nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3)])\n"
    "net[1].weight = nn.Parameter(net[0].weight.data)\n"
)
TO = "net.to(memory_format=torch.channels_last)\n"
CONVERT = "convert_(net)\n"
SHARES = "v = net[0].weight\nw = net[1].weight\nv.data_ptr() == w.data_ptr()"

SECTIONS = (
    Section(
        "Models: Module.to(memory_format=) and nhwc.convert_",
        (
            Rule(
                "Module.to converts the weight of a convolution",
                "channels_last",
                f"net = nn.Conv2d(3, 8, 3)\n{TO}w = net.weight\nformat_of(w)",
            ),
            Rule(
                "convert_ does",
                "channels_last",
                f"net = nn.Conv2d(3, 8, 3)\n{CONVERT}w = net.weight\nformat_of(w)",
            ),
            Rule(
                "Module.to marks 1x1 weights",
                (8, 1, 8, 8),
                f"net = nn.Conv2d(8, 4, 1)\n{TO}w = net.weight\nw.stride()",
            ),
            Rule(
                "convert_ does too",
                (8, 1, 8, 8),
                f"net = nn.Conv2d(8, 4, 1)\n{CONVERT}w = net.weight\nw.stride()",
            ),
            Rule(
                "Module.to converts all that has four dimensions",
                "channels_last",
                f"{POSITIONS}{TO}p = net.position\nformat_of(p)",
            ),
            Rule(
                "convert_ leaves what is no convolution's",
                "contiguous",
                f"{POSITIONS}{CONVERT}p = net.position\nformat_of(p)",
            ),
            Rule("Module.to fails for a 3-D convolution", NO_RANK_4, f"{MIXED}{TO}"),
            Rule(
                "convert_ gives each weight the format of its dimensions",
                "channels_last channels_last_3d",
                f"{MIXED}{CONVERT}v = net[0].weight\nw = net[1].weight\n"
                "f'{format_of(v)} {format_of(w)}'",
            ),
            Rule("Module.to parts weights that share memory", False, f"{SHARED}{TO}{SHARES}"),
            Rule("convert_ keeps them together", True, f"{SHARED}{CONVERT}{SHARES}"),
            Rule(
                "Module.to keeps the parameter itself",
                True,
                f"net = nn.Conv2d(3, 8, 3)\nbefore = net.weight\n{TO}net.weight is before",
            ),
            Rule(
                "convert_ keeps it too",
                True,
                f"net = nn.Conv2d(3, 8, 3)\nbefore = net.weight\n{CONVERT}net.weight is before",
            ),
            Rule(
                "neither touches the weight of a 1-D convolution: Module.to",
                (24, 3, 1),
                f"net = nn.Conv1d(8, 4, 3)\n{TO}w = net.weight\nw.stride()",
            ),
            Rule(
                "neither touches the weight of a 1-D convolution: convert_",
                (24, 3, 1),
                f"net = nn.Conv1d(8, 4, 3)\n{CONVERT}w = net.weight\nw.stride()",
            ),
        ),
    ),
    Section(
        "Compilers",
        (
            Rule(
                "torch.compile keeps",
                "channels_last",
                f"{NET}\n{LAST}\ny = torch.compile(net)(x)\nsame(y, net(x.contiguous()))",
            ),
            Rule(
                "torch.jit.script keeps",
                "channels_last",
                f"{NET}\n{LAST}\ny = torch.jit.script(net)(x)\nsame(y, net(x.contiguous()))",
            ),
            Rule(
                "torch.jit.trace keeps",
                "channels_last",
                f"{NET}\n{LAST}\ny = torch.jit.trace(net, (x,))(x)\nsame(y, net(x.contiguous()))",
            ),
            Rule(
                "torch.export keeps",
                "channels_last",
                f"{NET}\n{LAST}\ny = torch.export.export(net, (x,)).module()(x)\n"
                "same(y, net(x.contiguous()))",
            ),
        ),
    ),
)
