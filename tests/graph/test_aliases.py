"""Random programs in which several names stand for one memory, and some of them are written into.

Each is a `forward` of a few lines: values of (2, 8, 6, 6), views of half of their channels, writes
by methods, functions, layers, augmented assignments and keys. A graph must answer as the code does,
and leave in the input what the code leaves there. What torch itself does not define, a write that
reads the same memory in another order, is not among them.
"""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nhwc

from ..fusing import random_


class Programmed(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.point = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.norm, self.relu = nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        self.leaky, self.hard = nn.LeakyReLU(0.1, inplace=True), nn.Hardswish(inplace=True)


VALUES = (
    *("s.point({f})", "{f} + {g}", "{f} * 0.5", "s.norm({f})", "{f}.clone()", "{f}.contiguous()"),
    *("{f}.flip(2)", "s.relu({f})", "s.leaky({f})", "s.hard({f})", "F.relu({f}, inplace=True)"),
    *("F.relu({f})", "F.leaky_relu_({f}, 0.2)", "torch.relu_({f})", "{f}.view(2, 8, 6, 6)"),
    *("{f}[:]", "{f}.detach()", "torch.cat([{f}[:, 4:], {g}[:, :4]], 1)"),
)
HALVES = ("{f}[:, :4]", "{f}[:, 4:]", "{f}[:, 2:6]", "{f}[:, ::2]")
WRITES = (
    *("{f} += {g}.clone()", "{f} -= {g}.clone()", "{f} *= 0.5", "{f}.relu_()", "{f}.mul_(0.5)"),
    *("{f}.add_({g}.flip(2))", "{f}.clamp_(-1, 1)", "{f}.neg_()", "{f}[:] = {g} * 2"),
    *("{f}[...] = {g}.clone()", "{f}[:, :] = 0.25", "{f}[:] = {g}", "{f}[:, :4] *= 0.5"),
    *("{f}[:, 4:] = {g}[:, 2:6].clone()", "{f}[:, 1:5] += {g}[:, 2:6].clone()"),
    *("{f}[:, :4].mul_(2)", "{f}[:, 4:].copy_({g}[:, 2:6].clone())", "{f}[:, :4].zero_()"),
)
WRITES_OF_HALVES = (
    *("{h}[:] = 0.5", "{h}[0] = 0.25", "{h}[:, 1] = 0.5", "{h}[...] = {i} * 0.5", "{h} += 1"),
    *("{h}.mul_(0.5)", "{h}.relu_()", "{h}.copy_({f}[:, :4].clone())", "{h}.fill_(0.5)"),
)
WRITES_OF_THE_INPUT = ("x[:] = x * 0.5", "x.mul_(0.5)", "x += 1", "x[:, 0] = 0")


def program(seed):
    """The lines of a `forward`."""
    lot = random.Random(seed)
    values, halves, lines = ["a"], [], ["a = s.conv(x)"]
    for number in range(lot.randint(3, 9)):
        names = {"f": lot.choice(values), "g": lot.choice(values)}
        names |= {"h": lot.choice(halves), "i": lot.choice(halves)} if halves else {}
        kind = lot.choice(["value", "value", "half", "write", "write", "half written", "input"])
        if kind == "value":
            lines.append(f"v{number} = {lot.choice(VALUES).format(**names)}")
            values.append(f"v{number}")
        elif kind == "half":
            lines.append(f"h{number} = {lot.choice(HALVES).format(**names)}")
            halves.append(f"h{number}")
        elif kind == "half written" and halves:
            lines.append(lot.choice(WRITES_OF_HALVES).format(**names))
        elif kind == "input" and lot.random() < 0.3:
            lines += [lot.choice(WRITES_OF_THE_INPUT), f"v{number} = s.conv(x)"]
            values.append(f"v{number}")
        else:
            lines.append(lot.choice(WRITES).format(**names))
    results = lot.sample(values + halves, min(3, len(values + halves)))
    summed = " + ".join(f"{name}.sum(1)" for name in results)
    return [*lines, f"return {summed}" if lot.random() < 0.4 else f"return ({', '.join(results)},)"]


def made(seed):
    lines = program(seed)
    names = {"torch": torch, "F": F}
    exec("def forward(s, x):\n" + "".join(f"    {line}\n" for line in lines), names)
    torch.manual_seed(seed)
    kind = type("Programmed", (Programmed,), {"forward": names["forward"]})
    return random_(kind()).eval(), torch.randn(2, 3, 6, 6)


def assert_answers(model, other, x):
    before, after = x.clone(), x.clone()
    with torch.no_grad():
        wanted = model(before)
        for _ in range(2):
            after.copy_(x)
            torch.testing.assert_close(other(after), wanted, rtol=1e-3, atol=1e-3)
            torch.testing.assert_close(after, before)


@pytest.mark.parametrize(
    "seeds", [range(start, start + 50) for start in range(0, 300, 50)], ids=str
)
def test_a_graph_answers_as_the_code(seeds):
    graphs = 0
    for seed in seeds:
        model, x = made(seed)
        fused = nhwc.fuse(model)
        graphs += not fused.report.opaque
        try:
            assert_answers(model, fused, x)
        except AssertionError as error:
            error.add_note("\n".join([f"seed {seed}", *program(seed)]))
            raise
    assert graphs > len(seeds) / 3


@pytest.mark.parametrize("seed", range(300, 312))
def test_a_plan_answers_as_the_code(seed):
    model, x = made(seed)
    assert_answers(model, nhwc.optimize(model, x), x)
