"""A lot in place of the clock: each kernel that is offered to a layer is chosen now and then.

Kernels that lose on this machine win on another, and what wins is all that a call runs. Here a lot
chooses, and the plan is returned also where the model as it is would have been faster. What is not
chosen is not compiled. Nothing that was drawn is remembered.
"""

from __future__ import annotations

import contextlib
import importlib
import random
import tempfile
from collections.abc import Callable, Container, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from nhwc.plan.evidence import RivalTime
from nhwc.plan.implementation import Identifier
from nhwc.plan.ledger import Ledger
from nhwc.plan.scene import Scene
from nhwc.plan.specs import Layer
from nhwc.plan.trials import time_layer

_FEWEST_S, _MOST_S = 1e-6, 1e-3


class _Chosen:
    """The one implementation of a layer that the lot fell on, or torch's own operator."""

    def __init__(self, layer: Layer, scene: Scene, draw: random.Random) -> None:
        self.known = [one.identifier for one in scene.implementations[layer.node]]
        self.one = draw.choice([*self.known, None] if draw.random() < 0.5 else self.known or [None])

    def __contains__(self, asked: Identifier) -> bool:
        return asked == self.one or (self.one is None and asked not in self.known)


@contextlib.contextmanager
def by_lot(seed: str) -> Iterator[None]:
    """Have kernels drawn, the same for the same `seed`, and the plan win."""
    draw = random.Random(seed)

    def timer(device: object) -> Callable[[Callable[[], object]], float]:
        return lambda function: draw.uniform(_FEWEST_S, _MOST_S)

    def chosen(
        scene: Scene, layer: Layer, rivals: Container[Identifier] | None = None
    ) -> dict[Identifier, RivalTime]:
        found = time_layer(scene, layer, rivals or _Chosen(layer, scene, draw))
        # Torch has no operator of its own for some layers.
        return found or time_layer(scene, layer)

    def nowhere(environment: object) -> Ledger:
        return Ledger(Path(folder) / "nothing.json")

    def winner(compared: dict[str, Any]) -> tuple[str, str]:
        return [*compared][-1], ""

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as patches:
        patches.enter_context(patch.object(Ledger, "of", nowhere))
        for module, name, instead in (
            ("nhwc.machine.timing", "timer_for", timer),
            ("nhwc.plan.measuring", "time_layer", chosen),
            ("nhwc.plan.measuring", "compile_ahead", lambda scene, layers: None),
            ("nhwc.plan.measuring", "switch_seconds", lambda ledger, leisure: 0.0),
            ("nhwc._optimize.stages", "winner", winner),
        ):
            patches.enter_context(patch.object(importlib.import_module(module), name, instead))
        yield
