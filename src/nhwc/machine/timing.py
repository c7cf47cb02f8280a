"""Times taken side by side, and the verdicts that they support."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy
import torch

LEVEL = 0.99
"""How sure an interval is. At 95 % one comparison in twenty would be a false alarm, and a suite
makes hundreds."""

SAME = 0.03
"""Two processes that run the same program differ by this much, by where their memory happens to
lie, so a smaller difference is not called one."""


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
    a slow minute of the machine, which hits both, does not widen it. Samples of two different runs
    are no pairs: say `paired=False`.

    >>> Comparison(Samples((2.0, 2.2, 2.1)), Samples((1.0, 1.1, 1.05))).ratio
    2.0
    """

    before: Samples
    after: Samples
    paired: bool = True

    @property
    def ratio(self) -> float:
        return self.before.median_s / self.after.median_s

    @property
    def interval(self) -> tuple[float, float]:
        """The 99 % bootstrap interval of `ratio`; the same on every call."""
        before, after = numpy.array(self.before.seconds), numpy.array(self.after.seconds)
        draw = numpy.random.default_rng(0)
        first = draw.integers(0, len(before), (2000, len(before)))
        if self.paired:
            if len(before) != len(after):
                raise ValueError(f"{len(before)} and {len(after)} samples are no pairs")
            second = first
        else:
            second = draw.integers(0, len(after), (2000, len(after)))
        ratios = numpy.median(before[first], axis=1) / numpy.median(after[second], axis=1)
        low, high = numpy.quantile(ratios, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return float(low), float(high)

    @property
    def verdict(self) -> str:
        """`same` (surely within 3 %), `faster`, `slower`, or `too noisy to tell`."""
        return verdict_of(*self.interval)


def verdict_of(low: float, high: float) -> str:
    """Return the verdict that an interval of a ratio supports.

    >>> verdict_of(0.99, 1.02), verdict_of(1.01, 1.3), verdict_of(0.8, 0.95), verdict_of(0.8, 1.1)
    ('same', 'faster', 'slower', 'too noisy to tell')
    >>> verdict_of(1.001, 1.032)  # not the same program, or the same in another place?
    'too noisy to tell'
    """
    if low > 1 - SAME and high < 1 + SAME:
        return "same"
    middle = math.sqrt(low * high)
    if low > 1 and middle > 1 + SAME:
        return "faster"
    return "slower" if high < 1 and middle < 1 - SAME else "too noisy to tell"


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
    timer = timer_for(device)
    for function in functions.values():
        for _ in range(warmup):
            function()
    taken: dict[str, list[float]] = {name: [] for name in functions}
    names: Sequence[str] = list(functions)
    for turn in range(rounds):
        # Each round starts with another: a fixed order favours a function that follows a light one.
        shift = turn % len(names)
        for name in [*names[shift:], *names[:shift]]:
            if between is not None:
                between()
            taken[name].append(timer(functions[name]))
    return {name: Samples(tuple(seconds)) for name, seconds in taken.items()}


def timer_for(device: torch.device | str) -> Callable[[Callable[[], object]], float]:
    """Return a timer of one call on `device`: a clock, or CUDA events, which wait for the kernels.

    >>> timer_for("cpu")(lambda: None) < 1
    True
    """
    return _cuda_seconds if torch.device(device).type == "cuda" else _seconds


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
