"""Rules of single tensors: what strides they get, keep and lose, and which say nothing."""

from __future__ import annotations

from .rule import Rule, Section

X = "x = torch.rand(10, 3, 32, 32)"
LAST = f"{X}\nx = x.to(memory_format=torch.channels_last)"
C_LAST = (3072, 1, 96, 3)
C_PLAIN = (3072, 1024, 32, 1)
NO_RANK_4 = "RuntimeError: required rank 4 tensor to use channels_last format"

SECTIONS = (
    Section(
        "From one format to the other",
        (
            Rule("a 10x3x32x32 tensor is contiguous", C_PLAIN, f"{X}\nx.stride()"),
            Rule(
                ".to(channels_last) restrides",
                C_LAST,
                f"{X}\ny = x.to(memory_format=torch.channels_last)\ny.stride()",
            ),
            Rule("... and keeps the shape", (10, 3, 32, 32), f"{LAST}\ntuple(x.shape)"),
            Rule(
                "... and the values",
                "channels_last",
                f"{X}\ny = x.to(memory_format=torch.channels_last)\nsame(y, x)",
            ),
            Rule(
                ".contiguous(channels_last) restrides",
                C_LAST,
                f"{X}\ny = x.contiguous(memory_format=torch.channels_last)\ny.stride()",
            ),
            Rule(".contiguous() goes back", C_PLAIN, f"{LAST}\ny = x.contiguous()\ny.stride()"),
            Rule(
                ".to(contiguous_format) goes back",
                C_PLAIN,
                f"{LAST}\ny = x.to(memory_format=torch.contiguous_format)\ny.stride()",
            ),
            Rule(
                "is_contiguous(channels_last) says yes",
                True,
                f"{LAST}\nx.is_contiguous(memory_format=torch.channels_last)",
            ),
            Rule("is_contiguous() says no", False, f"{LAST}\nx.is_contiguous()"),
            Rule(
                "permute makes the same strides",
                C_LAST,
                "x = torch.rand(10, 32, 32, 3)\ny = x.permute(0, 3, 1, 2)\ny.stride()",
                names=(("x", "NHWC"),),
            ),
        ),
    ),
    Section(
        "New tensors and copies",
        (
            Rule(
                "empty(memory_format=channels_last)",
                C_LAST,
                "x = torch.empty(10, 3, 32, 32, memory_format=torch.channels_last)\nx.stride()",
            ),
            Rule("clone preserves", "channels_last", f"{LAST}\ny = x.clone()\nsame(y, x)"),
            Rule(
                "to(float64) preserves",
                "channels_last",
                f"{LAST}\ny = x.to(torch.float64)\nsame(y, x)",
            ),
            Rule(
                "float() preserves", "channels_last", f"{LAST}\ny = x.double().float()\nsame(y, x)"
            ),
            Rule("half() preserves", "channels_last", f"{LAST}\ny = x.half()\nsame(y, x)"),
            Rule(
                "cuda() preserves",
                "channels_last",
                f"{LAST}\ny = x.cuda()\nsame(y, x.cuda())",
                needs_cuda=True,
            ),
            Rule("empty_like preserves", C_LAST, f"{LAST}\ny = torch.empty_like(x)\ny.stride()"),
            Rule(
                "zeros_like preserves",
                "channels_last",
                f"{LAST}\ny = torch.zeros_like(x)\nsame(y, x * 0)",
            ),
            Rule("rand_like preserves", C_LAST, f"{LAST}\ny = torch.rand_like(x)\ny.stride()"),
        ),
    ),
    Section(
        "Slices and views",
        (
            Rule(
                "a slice of the batch keeps",
                "channels_last",
                f"{LAST}\ny = x[2:4]\nformat_of(y)",
            ),
            Rule(
                "a slice of channels is in neither format",
                "other",
                "x = torch.rand(1, 6, 2, 3)\nx = x.to(memory_format=torch.channels_last)\n"
                "y = x[:, :3]\nformat_of(y)",
            ),
            Rule(
                "a crop is in neither format, and channels stay densest",
                (3072, 1, 96, 3),
                f"{LAST}\ny = x[:, :, 2:5, 2:6]\ny.stride()",
            ),
            Rule(
                "expanded numbers share their place",
                (0, 1, 0, 0),
                "x = torch.rand(1, 3, 1, 1)\ny = x.expand(2, 3, 2, 4)\ny.stride()",
            ),
        ),
    ),
    Section(
        "Sizes of 1: both formats at once",
        (
            Rule("C=1 is both", "ambiguous", "x = torch.rand(4, 1, 8, 8)\nformat_of(x)"),
            Rule("H=W=1 is both", "ambiguous", "x = torch.rand(4, 8, 1, 1)\nformat_of(x)"),
            Rule(
                "C=1: .contiguous(channels_last) does not restride",
                (64, 64, 8, 1),
                "x = torch.rand(4, 1, 8, 8)\n"
                "y = x.contiguous(memory_format=torch.channels_last)\ny.stride()",
            ),
            Rule(
                "C=1: .to(channels_last) does",
                (64, 1, 8, 1),
                "x = torch.rand(4, 1, 8, 8)\n"
                "y = x.to(memory_format=torch.channels_last)\ny.stride()",
            ),
            Rule(
                "C=1: nor does going through N, H, W, C by permute",
                (64, 64, 8, 1),
                "x = torch.rand(4, 1, 8, 8)\n"
                "y = x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)\ny.stride()",
            ),
            Rule(
                "C=1: after .to(channels_last), permute goes to N, H, W, C and back",
                (64, 1, 8, 1),
                "x = torch.rand(4, 1, 8, 8)\nx = x.to(memory_format=torch.channels_last)\n"
                "y = x.permute(0, 2, 3, 1)\nz = y.permute(0, 3, 1, 2)\nz.stride()",
                names=(("y", "NHWC"),),
            ),
            Rule(
                "C=1: a convolution takes its word: contiguous",
                "contiguous",
                "x = torch.rand(4, 1, 8, 8)\nw = torch.rand(8, 1, 3, 3)\n"
                "y = F.conv2d(x, w)\nformat_of(y)",
            ),
            Rule(
                "C=1: a convolution takes its word: channels last",
                "channels_last",
                "x = torch.rand(4, 1, 8, 8)\nx = x.to(memory_format=torch.channels_last)\n"
                "w = torch.rand(8, 1, 3, 3)\ny = F.conv2d(x, w)\nformat_of(y)",
            ),
            Rule(
                "H=W=1: .contiguous(channels_last) does not restride",
                (8, 1, 1, 1),
                "x = torch.rand(4, 8, 1, 1)\n"
                "y = x.contiguous(memory_format=torch.channels_last)\ny.stride()",
            ),
            Rule(
                "H=W=1: .to(channels_last) does",
                (8, 1, 8, 8),
                "x = torch.rand(4, 8, 1, 1)\n"
                "y = x.to(memory_format=torch.channels_last)\ny.stride()",
            ),
            Rule(
                "1x1x1 cannot be marked",
                (1, 1, 1, 1),
                "x = torch.rand(4, 1, 1, 1)\n"
                "y = x.to(memory_format=torch.channels_last)\ny.stride()",
            ),
        ),
    ),
    Section(
        "Other numbers of dimensions",
        (
            Rule(
                "3-D: .to(channels_last) is refused",
                NO_RANK_4,
                "x = torch.rand(3, 8, 8)\nx.to(memory_format=torch.channels_last)",
            ),
            Rule(
                "3-D: .contiguous(channels_last) is refused",
                NO_RANK_4,
                "x = torch.rand(3, 8, 8)\nx.contiguous(memory_format=torch.channels_last)",
            ),
            Rule(
                "3-D: an image of a batch keeps its strides",
                (1, 96, 3),
                f"{LAST}\ny = x[0]\ny.stride()",
                names=(("y", "CHW"),),
            ),
            Rule(
                "3-D: ... and unsqueeze makes it channels last again",
                "channels_last",
                f"{LAST}\ny = x[0]\nz = y.unsqueeze(0)\nformat_of(z)",
                names=(("y", "CHW"),),
            ),
            Rule(
                "3-D: is_contiguous(channels_last) says no to any",
                False,
                f"{LAST}\ny = x[0]\ny.is_contiguous(memory_format=torch.channels_last)",
                names=(("y", "CHW"),),
            ),
            Rule(
                "5-D: .to(channels_last) is refused",
                NO_RANK_4,
                "x = torch.rand(2, 3, 4, 8, 8)\nx.to(memory_format=torch.channels_last)",
            ),
            Rule(
                "4-D: .to(channels_last_3d) is refused",
                "RuntimeError: required rank 5 tensor to use channels_last_3d format",
                f"{X}\nx.to(memory_format=torch.channels_last_3d)",
            ),
            Rule(
                "5-D: .to(channels_last_3d)",
                (768, 1, 192, 24, 3),
                "x = torch.rand(2, 3, 4, 8, 8)\n"
                "y = x.to(memory_format=torch.channels_last_3d)\ny.stride()",
            ),
            Rule(
                "5-D: clone preserves",
                "channels_last_3d",
                "x = torch.rand(2, 3, 4, 8, 8)\nx = x.to(memory_format=torch.channels_last_3d)\n"
                "y = x.clone()\nsame(y, x)",
            ),
            Rule(
                "5-D: C=1, .to(channels_last_3d) restrides",
                (256, 1, 64, 8, 1),
                "x = torch.rand(2, 1, 4, 8, 8)\n"
                "y = x.to(memory_format=torch.channels_last_3d)\ny.stride()",
            ),
        ),
    ),
)
