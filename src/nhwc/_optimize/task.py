"""The task of an optimization: a model, its example inputs, and the machine it is for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..kernels.programs.pool import Pool
from ..machine.environment import Environment
from ..passes import Pass
from ..plan.ledger import Ledger
from ..plan.measuring import Leisure

Progress = Callable[[str], None]


@dataclass(frozen=True)
class OptimizeTask:
    """A model and the inputs to plan it for: the first of `examples` is timed.

    `say` is told of each stage as it begins. `leisure` is for measuring again what is known.
    `pool` is the memory of calls, one for all plans.
    """

    model: nn.Module
    examples: tuple[tuple[Any, ...], ...]
    passes: Sequence[Pass]
    exact: bool
    say: Progress
    environment: Environment
    ledger: Ledger
    leisure: Leisure
    pool: Pool = field(default_factory=Pool)

    @property
    def example(self) -> tuple[Any, ...]:
        return self.examples[0]
