"""Times taken side by side, and what may be said of them."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Samples:
    """The raw seconds of repeated calls; every statistic is derived.

    >>> Samples((0.3, 0.1, 0.2)).median_s
    0.2
    """

    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def quartiles_s(self) -> tuple[float, float]:
        if len(self.seconds) < 2:
            return self.seconds[0], self.seconds[0]
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    @property
    def spread(self) -> float:
        """The distance between the quartiles, as a share of the median."""
        low, high = self.quartiles_s
        return (high - low) / self.median_s


@dataclass(frozen=True)
class Comparison:
    """Two variants timed in turns: sample i of one was taken next to sample i of the other.

    `ratio` is how many times faster `after` is. Its interval comes from resampling the pairs, so
    a slow minute of the machine, which hits both, does not widen it.

    >>> Comparison(Samples((2.0, 2.2, 2.1)), Samples((1.0, 1.1, 1.05))).ratio
    2.0
    """

    before: Samples
    after: Samples

    @property
    def ratio(self) -> float:
        return self.before.median_s / self.after.median_s

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % bootstrap interval of `ratio`; the same on every call."""
        pairs = list(zip(self.before.seconds, self.after.seconds, strict=True))
        draw = random.Random(0)
        ratios = []
        for _ in range(1000):
            chosen = draw.choices(pairs, k=len(pairs))
            ratios.append(
                statistics.median(b for b, _ in chosen) / statistics.median(a for _, a in chosen)
            )
        ratios.sort()
        return ratios[24], ratios[974]

    @property
    def verdict(self) -> str:
        """`faster`, `slower`, `same` (within 3 %), or `too noisy to tell`."""
        low, high = self.interval
        if low > 1:
            return "faster"
        if high < 1:
            return "slower"
        return "same" if low > 0.97 and high < 1.03 else "too noisy to tell"


def interleave(
    functions: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int = 2,
    device: torch.device | str = "cpu",
    between: Callable[[], object] | None = None,
) -> dict[str, Samples]:
    """Time each function once per round, in turns, so that what disturbs one disturbs all.

    `between` runs, untimed, before each timed call.

    >>> times = interleave({"a": lambda: None, "b": lambda: None}, rounds=3)
    >>> [len(samples.seconds) for samples in times.values()]
    [3, 3]
    """
    timer = _cuda_seconds if torch.device(device).type == "cuda" else _seconds
    for function in functions.values():
        for _ in range(warmup):
            function()
    taken: dict[str, list[float]] = {name: [] for name in functions}
    names: Sequence[str] = list(functions)
    for turn in range(rounds):
        # Each round starts with another: a fixed order would favour who follows a light one.
        shift = turn % len(names)
        for name in [*names[shift:], *names[:shift]]:
            if between is not None:
                between()
            taken[name].append(timer(functions[name]))
    return {name: Samples(tuple(seconds)) for name, seconds in taken.items()}


def _seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def _cuda_seconds(function: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    function()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
