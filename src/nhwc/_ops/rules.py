"""The rules of memory formats: small programs, each with the outcome it must have.

A rule is data: what it claims, what is expected, and a function of a `Ground` that measures it.
Add one by adding a line. Values are checked by the programs themselves, with `same`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .ground import (
    LAST,
    LAST_3D,
    CannotTry,
    Ground,
    Rule,
    RuleResult,
    added,
    compiled,
    exported,
    moved_to_cuda,
    name,
    same,
    scripted,
    unsupported,
)

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
    ("cuda() preserves", "channels_last", moved_to_cuda),
    ("empty_like preserves", C_LAST, lambda g: torch.empty_like(g.last).stride()),
    (
        "zeros_like preserves",
        "channels_last",
        lambda g: same(torch.zeros_like(g.last), g.plain * 0),
    ),
    ("rand_like preserves", C_LAST, lambda g: torch.rand_like(g.last).stride()),
    ("a pointwise operator preserves", "channels_last", lambda g: same(g.last.relu(), g.plain)),
    ("two operands, both channels last", "channels_last", lambda g: added(g.last, g.last)),
    (
        "channels last + contiguous: the first wins",
        "channels_last",
        lambda g: added(g.last, g.plain),
    ),
    ("contiguous + channels last: the first wins", "contiguous", lambda g: added(g.plain, g.last)),
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
    ("an operator without support is still right", "right values", unsupported),
    (
        "torch.compile keeps",
        "channels_last",
        lambda g: same(compiled(g.net(), g.last), g.net()(g.plain)),
    ),
    ("torch.jit.script keeps", "channels_last", lambda g: scripted(g, torch.jit.script)),
    (
        "torch.jit.trace keeps",
        "channels_last",
        lambda g: scripted(g, lambda net: torch.jit.trace(net, (g.last,))),
    ),
    ("torch.export keeps", "channels_last", exported),
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
    device: torch.device | str = "cpu", rules: tuple[Rule, ...] | None = None
) -> tuple[RuleResult, ...]:
    """Run every rule on the installed torch and this device.

    >>> check_rules(rules=RULES[:1])[0].passed
    True
    """
    ground = Ground(torch.device(device))
    on_cuda = [ground.device] if ground.device.type == "cuda" else []
    with torch.random.fork_rng(devices=on_cuda), torch.no_grad():
        return tuple(_check(rule, ground) for rule in (RULES if rules is None else rules))


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
