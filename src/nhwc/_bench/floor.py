"""The floor below which no call can come: a model's arithmetic at the most this machine computes.

What an engine takes beyond it is memory, steps between the layers and kernels that fall short of
the peak. Only operations of the direct sums are counted, so Winograd may come below the floor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ..kernels import unavailable


@dataclass(frozen=True)
class Floor:
    """The float operations of one call, and those a second that the machine reaches at most.

    `handover_s` is how long it takes until one core sees what another wrote; None with one thread.
    """

    flop: float
    peak_flops: float
    handover_s: float | None = None

    @property
    def seconds(self) -> float:
        return self.flop / self.peak_flops


def find_floor(model: nn.Module, inputs: Sequence[Tensor]) -> Floor | None:
    """Count and measure; None where either cannot be had.

    >>> floor = find_floor(nn.Conv2d(3, 8, 3), [torch.ones(1, 3, 8, 8)])
    >>> floor is None or floor.flop
    15552.0
    """
    if unavailable() or any(x.device.type != "cpu" for x in inputs):
        return None
    from ..kernels.tape.fastest import peak_flops
    from ..kernels.tape.handover import handover_seconds

    # A model that cannot be counted is still worth timing, and it may raise anything.
    with contextlib.suppress(Exception):
        return Floor(float(count_flop(model, inputs)), peak_flops(), handover_seconds())
    return None


def count_flop(model: nn.Module, inputs: Sequence[Tensor]) -> int:
    """Count the operations of convolutions and products in one call, attention's among them.

    >>> count_flop(nn.Linear(4, 2), [torch.ones(3, 4)])
    48
    """
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), _spelled_out(), counter:
        model(*inputs)
    return counter.get_total_flops()


@contextlib.contextmanager
def _spelled_out() -> Iterator[None]:
    """Let attention run as products: the counter does not know all that it can run as."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
