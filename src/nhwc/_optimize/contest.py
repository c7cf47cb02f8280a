"""Time the optimized model and the given one in turns; the faster one wins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils._pytree import tree_map

from ..graph.nodes.flat import is_nested
from ..machine.timing import Comparison, Samples, interleave
from ..models.places import by_call
from ..models.preserve import preserved
from ..plan.ledger import is_time
from ..verify import cloned
from .report import much_slower
from .task import OptimizeTask

_TIMING_S = 0.4
"""About how long the paired timing of a stage takes on a quiet machine."""

_LONG_S = 30.0
"""Turns that would take longer in all are fewer: the longer a call, the less it is disturbed."""

_MOST = 150
"""With as many turns a stage is not timed again, however slow it seems."""

_PATIENCE = 3
"""On a noisy machine the timing of a plan may take this many times as long."""


@dataclass(frozen=True)
class Turns:
    """Stages, each compared with the input in the same turns, maybe by an earlier run."""

    compared: dict[str, Comparison]
    remembered: bool


def take_turns(
    task: OptimizeTask, stages: Mapping[str, nn.Module], key: str, layers_s: float = 0.0
) -> Turns:
    """Time `stages` beside the input, or recall it by `key`: the same for what would run the same.

    If the plan took much longer than its layers do alone, `layers_s`, they are timed once more, and
    all turns count.
    """
    task.say(f"timing the {' and the '.join(stages)}")
    # What a call keeps would be there in the next run of the model, which is a comparison.
    with preserved(task.model):
        return _taken(task, stages, key, layers_s)


def _taken(task: OptimizeTask, stages: Mapping[str, nn.Module], key: str, layers_s: float) -> Turns:
    names, planned = ["input", *stages], "plan" in stages
    times = dict.fromkeys(names, Samples(()))
    known = task.ledger.get(key)
    if _are_turns(known, len(names)):
        times = {name: Samples(tuple(row)) for name, row in zip(names, known, strict=True)}
        found = _compared(times)
        slow = planned and much_slower(found["plan"].after.median_s, layers_s)
        if not slow or len(known[0]) >= _MOST:
            return Turns(found, remembered=True)
    device = "cpu" if task.environment.device == "cpu" else "cuda"
    calls = {name: _call(stages.get(name, task.model), task.example) for name in names}
    once = interleave(calls, rounds=1, warmup=0, device=device)
    total = max(1e-6, sum(samples.seconds[0] for samples in once.values()))
    least, fewest = (5, 2) if planned else (3, 1)
    least = max(fewest, min(least, int(_LONG_S / total)))
    rounds = max(least, min(25, int(_TIMING_S / total)))
    for _ in range(_PATIENCE if planned else 1):
        more = interleave(calls, rounds=rounds, warmup=0, device=device)
        times = {name: Samples(times[name].seconds + more[name].seconds) for name in names}
        found = _compared(times)
        if not planned or found["plan"].verdict != "too noisy to tell":
            # A plan's times are remembered only if they tell it from the input.
            task.ledger.put(key, [list(times[name].seconds) for name in names])
            break
    return Turns(found, remembered=False)


def _compared(times: Mapping[str, Samples]) -> dict[str, Comparison]:
    return {name: Comparison(times["input"], one) for name, one in times.items() if name != "input"}


def _are_turns(known: Any, count: int) -> bool:
    """Whether an entry of the ledger has the times of `count` variants, taken in turns."""
    if not isinstance(known, list) or len(known) != count:
        return False
    if not all(isinstance(seconds, list) and seconds for seconds in known):
        return False
    fits = all(is_time(one) and one > 0 for seconds in known for one in seconds)
    return fits and len({len(seconds) for seconds in known}) == 1


def winner(compared: dict[str, Comparison]) -> tuple[str, str]:
    """The fastest stage that is not slower than the input, and why, if it is not the plan."""
    ratios = {stage: one.ratio for stage, one in compared.items()}
    best = max(ratios, key=ratios.__getitem__)
    if ratios[best] <= 1:
        return "input", f"nothing was gained: the best of the rest runs {ratios[best]:.2f}x as fast"
    if best == "graph" and "plan" in ratios:
        ratio = ratios["plan"] / ratios["graph"]
        return "graph", f"the plan runs {ratio:.2f}x as fast as the graph it was made from"
    return best, ""


def _call(function: Callable[..., Any], inputs: tuple[Any, ...]) -> Callable[[], Any]:
    # The model may write into its input, so each stage gets a copy.
    args, named = by_call(function, cloned(inputs))
    if not any(map(is_nested, inputs)):
        return lambda: function(*args, **named)

    def call() -> Any:
        # It may also take inputs out of the list or dict that holds them.
        own_args, own_named = tree_map(lambda leaf: leaf, (args, named))
        return function(*own_args, **own_named)

    return call
