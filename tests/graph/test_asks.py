"""Compiled code must not take a traced value for a tensor, whose memory it would read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import nhwc

from ..optimize.hostile import Halve

SEVERAL = (nn.Module, torch.FloatTensor)


kept = Halve.apply


class Asking(nn.Module):
    def __init__(self, answer):
        super().__init__()
        self.conv, self.answer = nn.Conv2d(3, 4, 1), answer

    def forward(self, x: Tensor) -> Tensor:
        return self.answer(self.conv(x))


def _set_data(y: Tensor) -> Tensor:
    other = torch.zeros(1)
    other.data = y.detach()
    return other + y


def _set_gradient(y: Tensor) -> Tensor:
    other = torch.zeros(1, 4, 3, 3)
    other.grad = y.detach() * 2
    return other.grad


def _matched(y: Tensor) -> Tensor:
    match y:
        case torch.FloatTensor():
            return y
    return y + 1


READS_MEMORY = {
    "legacy class": lambda: lambda y: y if isinstance(y, torch.FloatTensor) else y + 1,
    "legacy class in a tuple": lambda: lambda y: y if isinstance(y, SEVERAL) else y + 1,
    "legacy class matched": lambda: _matched,
    "class that a call returns": lambda: lambda y: y if isinstance(y, type(y.new(1))) else y + 1,
    "legacy constructor": lambda: lambda y: torch.Tensor(y.detach()),
    "as_tensor": lambda: torch.as_tensor,
    "as_tensor, in a lambda": lambda: lambda y: torch.as_tensor(y) + 1,
    "data of another": lambda: _set_data,
    "gradient of another": lambda: _set_gradient,
    "binding": lambda: lambda y: y + 1 if torch._C._is_alias_of(y, torch.zeros(1)) else y,
    "asked by map": lambda: lambda y: y if all(map(isinstance, [y], [Tensor])) else y + 1,
}


@pytest.mark.parametrize("case", READS_MEMORY)
@torch.no_grad()
def test_compiled_code_gets_no_traced_value(case):
    model, x = Asking(READS_MEMORY[case]()).eval(), torch.randn(1, 3, 3, 3)
    torch.testing.assert_close(nhwc.fuse(model)(x), model(x))


@torch.no_grad()
def test_a_scripted_function_gets_no_traced_value():
    scripted, x = torch.jit.script(_relu_twice), torch.randn(1, 3, 3, 3)
    model = Asking(lambda y: scripted(y)).eval()
    torch.testing.assert_close(nhwc.fuse(model)(x), model(x))


def _relu_twice(y: Tensor) -> Tensor:
    return torch.relu(y) * 2


RECORDED = {
    "isinstance": lambda y: y if isinstance(y, Tensor) else y + 1,
    "several classes": lambda y: y if isinstance(y, (float, torch.Tensor)) else y + 1,
    "union": lambda y: y if isinstance(y, Tensor | None) else y + 1,
    "is_tensor": lambda y: y if torch.is_tensor(y) else y + 1,
    "__class__": lambda y: y if y.__class__ is Tensor else y + 1,
    "getattr": lambda y: y if getattr(y, "__class__", None) is Tensor else y + 1,
    "generator": lambda y: y if all(isinstance(t, Tensor) for t in [y]) else y + 1,
    "custom function": lambda y: Halve.apply(y),
    "its apply, kept": lambda y: kept(y),
    "its apply, with a list": lambda y: Halve.apply(*[y]),
    "its apply, of a result": lambda y: Halve.apply(torch.cat([y, y], dim=1)),
    "a pool over all pixels": lambda y: F.avg_pool2d(y, y.size()[2:]),
    "a pool by name": lambda y: F.avg_pool2d(y, kernel_size=(y.size(2), y.shape[3])),
    "groups of the batch": lambda y: F.conv2d(
        y.reshape(1, -1, y.size(2), y.size(3)), torch.ones(4, 4, 1, 1), groups=y.size(0)
    ),
    "a number beside a tensor": lambda y: torch.where(y > 0, y, 0.5),
    "the least of a type": lambda y: y.masked_fill(y < 0, torch.finfo(y.dtype).min),
    "how fine a type is": lambda y: y.clamp(min=2 * torch.finfo(type=y.dtype).eps),
    "how large a type is": lambda y: y * torch.iinfo(y.argmax(1).dtype).bits,
}


@pytest.mark.parametrize("case", RECORDED)
@torch.no_grad()
def test_python_that_asks_is_answered(case):
    model, x = Asking(RECORDED[case]).eval(), torch.randn(1, 3, 3, 3)
    fused = nhwc.fuse(model)
    assert [n.target for n in fused.graph.nodes if n.op == "call_module"] == ["conv"]
    torch.testing.assert_close(fused(x), model(x))


@torch.no_grad()
def test_the_least_of_a_type_changes_with_the_type():
    model, x = Asking(RECORDED["the least of a type"]).eval(), torch.randn(1, 3, 3, 3).double()
    assert torch.equal(nhwc.fuse(model).double()(x), model.double()(x))


def _filled(y: Tensor) -> Tensor:
    made = torch.empty(y.shape[0], 8, y.shape[2], y.shape[3], dtype=y.dtype)
    made[:, :4] = y
    part = made[:, 4:]
    part.copy_(y * 2)
    return made


def _written_through(y: Tensor) -> Tensor:
    same = torch.as_tensor(y)
    same.mul_(2)
    return y + same


def _added_through(y: Tensor) -> Tensor:
    same = torch.as_tensor(y)
    same += 1
    return y * same


MADE = {
    "no channels": lambda y: [torch.empty([y.shape[0], 0, y.shape[2] // 2], device=y.device), y],
    "filled": _filled,
    "the layout of an image": lambda y: torch.empty(
        y.shape, memory_format=torch.channels_last
    ).copy_(y),
    "itself": lambda y: y + torch.as_tensor(y.relu()),
    "a size as a tensor": lambda y: y + torch.as_tensor(y.shape[2], dtype=y.dtype),
    "a size alone": lambda y: y * torch.scalar_tensor(y.shape[3]),
    "below a diagonal": lambda y: y + torch.tril_indices(y.shape[2], y.shape[3]).sum(),
    "above a diagonal": lambda y: y + torch.triu_indices(y.shape[2], y.shape[3], 1).sum(),
    "powers": lambda y: y + torch.logspace(0, 1, y.shape[3]),
}


@pytest.mark.parametrize("case", MADE)
@torch.no_grad()
def test_a_tensor_made_of_sizes_is_in_the_graph(case):
    model = Asking(MADE[case]).eval()
    fused = nhwc.fuse(model)
    assert not fused.report.opaque
    for shape in (1, 3, 3, 3), (2, 3, 5, 4):
        x = torch.randn(shape)
        torch.testing.assert_close(fused(x), model(x), check_stride=True)


@pytest.mark.parametrize("code", [_written_through, _added_through])
@torch.no_grad()
def test_a_write_reaches_what_as_tensor_was_given(code):
    model, x = Asking(code).eval(), torch.randn(1, 3, 3, 3)
    torch.testing.assert_close(nhwc.fuse(model)(x), model(x))
