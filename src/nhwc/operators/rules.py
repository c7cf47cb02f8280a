"""The rules of memory formats: small programs, each with the outcome it must have.

A rule is data: what it claims, what is expected, and a function of a `Ground` that measures it.
Add one by adding a line. Values are checked by the programs themselves, with `same`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..formats import convert_, format_of

LAST = torch.channels_last
LAST_3D = torch.channels_last_3d


@dataclass(frozen=True)
class RuleResult:
    """What a rule claims, and what was found; `passed` is None where it could not be tried."""

    claim: str
    expected: str
    measured: str
    passed: bool | None

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


class CannotTry(Exception):
    """This machine lacks what the rule speaks of."""


@dataclass(frozen=True)
class Ground:
    """Where the programs run: tensors on one device, the same numbers each time."""

    device: torch.device

    def rand(self, *shape: int) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.rand(shape, generator=generator).to(self.device)

    @property
    def plain(self) -> Tensor:
        return self.rand(10, 3, 32, 32)

    @property
    def last(self) -> Tensor:
        return self.plain.contiguous(memory_format=LAST)

    @property
    def last_3d(self) -> Tensor:
        return self.rand(2, 3, 4, 8, 8).contiguous(memory_format=LAST_3D)

    def conv(self, *, last: bool) -> nn.Module:
        torch.manual_seed(0)
        conv = nn.Conv2d(3, 8, 3).to(self.device)
        return convert_(conv) if last else conv

    def net(self) -> nn.Module:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
        return convert_(net.to(self.device))


Program = Callable[[Ground], Any]
Rule = tuple[str, object, Program]


def name(tensor: Tensor) -> str:
    return str(format_of(tensor))


def same(result: Tensor, reference: Tensor) -> str:
    """The format of a result that has the numbers of the reference; otherwise say that it has not.

    >>> same(torch.ones(2, 3, 4, 4), torch.zeros(2, 3, 4, 4))
    'wrong values'
    """
    close = torch.allclose(result.float(), reference.float(), rtol=1e-3, atol=1e-3)
    return name(result) if close and result.shape == reference.shape else "wrong values"


def _cuda(g: Ground) -> str:
    if not torch.cuda.is_available():
        raise CannotTry("no CUDA device")
    return same(g.last.cuda(), g.plain.cuda())


def _compiled(module: nn.Module, x: Tensor) -> Tensor:
    try:
        result: Tensor = torch.compile(module)(x)
        return result
    except Exception as error:
        if "compiler" in str(error).lower() or "triton" in str(error).lower():
            raise CannotTry(f"torch.compile: {str(error).splitlines()[0]}") from error
        raise
    finally:
        torch.compiler.reset()


def _scripted(g: Ground, make: Callable[[nn.Module], Any]) -> str:
    net = g.net()
    with warnings.catch_warnings():
        # Both are deprecated; that they keep the format is claimed as long as they are there.
        warnings.simplefilter("ignore")
        return same(make(net)(g.last), net(g.plain))


def _exported(g: Ground) -> str:
    net = g.net()
    return same(torch.export.export(net, (g.last,)).module()(g.last), net(g.plain))


def _unsupported(g: Ground) -> str:
    grid = F.affine_grid(torch.eye(2, 3, device=g.device).expand(10, 2, 3), [10, 3, 32, 32], False)
    reference = F.grid_sample(g.plain, grid, align_corners=False)
    found = same(F.grid_sample(g.last, grid, align_corners=False), reference)
    return "right values" if found != "wrong values" else found


def _wins(first: Tensor, second: Tensor) -> str:
    return same(first + second, second + first)


C_LAST = (3072, 1, 96, 3)
C_PLAIN = (3072, 1024, 32, 1)

RULES: tuple[Rule, ...] = (
    ("a 10x3x32x32 tensor is contiguous", C_PLAIN, lambda g: g.plain.stride()),
    (".to(channels_last) restrides", C_LAST, lambda g: g.plain.to(memory_format=LAST).stride()),
    ("... and keeps the shape", (10, 3, 32, 32), lambda g: tuple(g.last.shape)),
    ("... and the values", "channels_last", lambda g: same(g.last, g.plain)),
    (".contiguous(channels_last) restrides", C_LAST, lambda g: g.last.stride()),
    (".contiguous() goes back", C_PLAIN, lambda g: g.last.contiguous().stride()),
    (
        ".to(contiguous_format) goes back",
        C_PLAIN,
        lambda g: g.last.to(memory_format=torch.contiguous_format).stride(),
    ),
    (
        "is_contiguous(channels_last) says yes",
        True,
        lambda g: g.last.is_contiguous(memory_format=LAST),
    ),
    ("is_contiguous() says no", False, lambda g: g.last.is_contiguous()),
    (
        "empty(memory_format=channels_last)",
        C_LAST,
        lambda g: torch.empty(10, 3, 32, 32, device=g.device, memory_format=LAST).stride(),
    ),
    ("clone preserves", "channels_last", lambda g: same(g.last.clone(), g.plain)),
    ("to(float64) preserves", "channels_last", lambda g: same(g.last.to(torch.float64), g.plain)),
    ("float() preserves", "channels_last", lambda g: same(g.last.double().float(), g.plain)),
    ("half() preserves", "channels_last", lambda g: same(g.last.half(), g.plain)),
    ("cuda() preserves", "channels_last", _cuda),
    ("empty_like preserves", C_LAST, lambda g: torch.empty_like(g.last).stride()),
    (
        "zeros_like preserves",
        "channels_last",
        lambda g: same(torch.zeros_like(g.last), g.plain * 0),
    ),
    ("rand_like preserves", C_LAST, lambda g: torch.rand_like(g.last).stride()),
    ("a pointwise operator preserves", "channels_last", lambda g: same(g.last.relu(), g.plain)),
    ("two operands, both channels last", "channels_last", lambda g: _wins(g.last, g.last)),
    (
        "channels last + contiguous: the first wins",
        "channels_last",
        lambda g: _wins(g.last, g.plain),
    ),
    ("contiguous + channels last: the first wins", "contiguous", lambda g: _wins(g.plain, g.last)),
    (
        "channels last + a number per channel",
        "channels_last",
        lambda g: same(g.last + g.rand(3, 1, 1), g.plain + g.rand(3, 1, 1)),
    ),
    (
        "conv2d: channels-last weight, contiguous input",
        "channels_last",
        lambda g: same(g.conv(last=True)(g.plain), g.conv(last=False)(g.plain)),
    ),
    (
        "conv2d: contiguous weight, channels-last input",
        "channels_last",
        lambda g: same(g.conv(last=False)(g.last), g.conv(last=False)(g.plain)),
    ),
    (
        "conv2d: all contiguous",
        "contiguous",
        lambda g: same(g.conv(last=False)(g.plain), g.conv(last=True)(g.last)),
    ),
    (
        "batch_norm preserves",
        "channels_last",
        lambda g: same(
            F.batch_norm(g.last, None, None, training=True),
            F.batch_norm(g.plain, None, None, training=True),
        ),
    ),
    (
        "permute makes the same strides",
        C_LAST,
        lambda g: g.rand(10, 32, 32, 3).permute(0, 3, 1, 2).stride(),
    ),
    ("C=1 is both", "ambiguous", lambda g: name(g.rand(4, 1, 8, 8))),
    ("H=W=1 is both", "ambiguous", lambda g: name(g.rand(4, 8, 1, 1))),
    (
        "C=1: .contiguous(channels_last) does not restride",
        (64, 64, 8, 1),
        lambda g: g.rand(4, 1, 8, 8).contiguous(memory_format=LAST).stride(),
    ),
    (
        "C=1: .to(channels_last) does",
        (64, 1, 8, 1),
        lambda g: g.rand(4, 1, 8, 8).to(memory_format=LAST).stride(),
    ),
    (
        "H=W=1: .contiguous(channels_last) does not restride",
        (8, 1, 1, 1),
        lambda g: g.rand(4, 8, 1, 1).contiguous(memory_format=LAST).stride(),
    ),
    (
        "H=W=1: .to(channels_last) does",
        (8, 1, 8, 8),
        lambda g: g.rand(4, 8, 1, 1).to(memory_format=LAST).stride(),
    ),
    (
        "1x1x1 cannot be marked",
        (1, 1, 1, 1),
        lambda g: g.rand(4, 1, 1, 1).to(memory_format=LAST).stride(),
    ),
    ("an operator without support is still right", "right values", _unsupported),
    (
        "torch.compile keeps",
        "channels_last",
        lambda g: same(_compiled(g.net(), g.last), g.net()(g.plain)),
    ),
    ("torch.jit.script keeps", "channels_last", lambda g: _scripted(g, torch.jit.script)),
    (
        "torch.jit.trace keeps",
        "channels_last",
        lambda g: _scripted(g, lambda net: torch.jit.trace(net, (g.last,))),
    ),
    ("torch.export keeps", "channels_last", _exported),
    ("5-D: .to(channels_last_3d)", (768, 1, 192, 24, 3), lambda g: g.last_3d.stride()),
    ("5-D: clone preserves", "channels_last_3d", lambda g: same(g.last_3d.clone(), g.last_3d)),
    (
        "5-D: a pointwise operator preserves",
        "channels_last_3d",
        lambda g: same(g.last_3d.relu(), g.last_3d.contiguous()),
    ),
    (
        "5-D: conv3d keeps",
        "channels_last_3d",
        lambda g: same(
            F.conv3d(g.last_3d, g.rand(4, 3, 3, 3, 3)),
            F.conv3d(g.last_3d.contiguous(), g.rand(4, 3, 3, 3, 3)),
        ),
    ),
    (
        "5-D: batch_norm preserves",
        "channels_last_3d",
        lambda g: same(
            F.batch_norm(g.last_3d, None, None, training=True),
            F.batch_norm(g.last_3d.contiguous(), None, None, training=True),
        ),
    ),
    (
        "5-D: C=1, .to(channels_last_3d) restrides",
        (256, 1, 64, 8, 1),
        lambda g: g.rand(2, 1, 4, 8, 8).to(memory_format=LAST_3D).stride(),
    ),
)


def check_rules(
    device: torch.device | str = "cpu", rules: tuple[Rule, ...] = RULES
) -> tuple[RuleResult, ...]:
    """Run every rule on the installed torch and this device.

    >>> check_rules(rules=RULES[:1])[0].passed
    True
    """
    ground = Ground(torch.device(device))
    on_cuda = [ground.device] if ground.device.type == "cuda" else []
    with torch.random.fork_rng(devices=on_cuda), torch.no_grad():
        return tuple(_check(rule, ground) for rule in rules)


def _check(rule: Rule, ground: Ground) -> RuleResult:
    claim, expected, program = rule
    try:
        measured = program(ground)
    except CannotTry as reason:
        return RuleResult(claim, str(expected), f"not tried: {reason}", None)
    except Exception as error:
        words = str(error).strip().splitlines()
        text = f"{type(error).__name__}: {words[0] if words else ''}"
        return RuleResult(claim, str(expected), text, False)
    return RuleResult(claim, str(expected), str(measured), measured == expected)
