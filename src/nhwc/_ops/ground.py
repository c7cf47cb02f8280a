"""Parts that the rules share: tensors and networks on one device, and words for results."""

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
    """A rule's claim and what was measured; `passed` is None where it could not be tried."""

    claim: str
    expected: str
    measured: str
    passed: bool | None

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


class CannotTry(Exception):
    """This machine lacks something that the rule needs."""


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
    """Return the format of `result` if its values equal the reference's, else 'wrong values'.

    >>> same(torch.ones(2, 3, 4, 4), torch.zeros(2, 3, 4, 4))
    'wrong values'
    """
    close = torch.allclose(result.float(), reference.float(), rtol=1e-3, atol=1e-3)
    return name(result) if close and result.shape == reference.shape else "wrong values"


def moved_to_cuda(g: Ground) -> str:
    if not torch.cuda.is_available():
        raise CannotTry("no CUDA device")
    return same(g.last.cuda(), g.plain.cuda())


def compiled(module: nn.Module, x: Tensor) -> Tensor:
    try:
        result: Tensor = torch.compile(module)(x)
        return result
    except Exception as error:
        if "compiler" in str(error).lower() or "triton" in str(error).lower():
            raise CannotTry(f"torch.compile: {str(error).splitlines()[0]}") from error
        raise
    finally:
        torch.compiler.reset()


def scripted(g: Ground, make: Callable[[nn.Module], Any]) -> str:
    net = g.net()
    with warnings.catch_warnings():
        # Scripting and tracing are deprecated; the rules cover them as long as torch has them.
        warnings.simplefilter("ignore")
        return same(make(net)(g.last), net(g.plain))


def exported(g: Ground) -> str:
    net = g.net()
    return same(torch.export.export(net, (g.last,)).module()(g.last), net(g.plain))


def unsupported(g: Ground) -> str:
    grid = F.affine_grid(torch.eye(2, 3, device=g.device).expand(10, 2, 3), [10, 3, 32, 32], False)
    reference = F.grid_sample(g.plain, grid, align_corners=False)
    found = same(F.grid_sample(g.last, grid, align_corners=False), reference)
    return "right values" if found != "wrong values" else found


def added(first: Tensor, second: Tensor) -> str:
    return same(first + second, second + first)
