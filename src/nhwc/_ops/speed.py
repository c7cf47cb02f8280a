"""NCHW against NHWC on a realistic shape, taken in turns."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import torch

from ..machine.timing import Comparison, interleave
from .forms import forward
from .samples import Sample, channels_last, contiguous, describe
from .table import Speed

TOO_SLOW_S = 0.1
"""A call that takes longer is not timed: it would take the time of a hundred others."""

MOST_ELEMENTS = 1 << 25
ROUNDS = 5
AGAIN = 15


def time_samples(samples: Iterable[Sample], device: str, dtype: str) -> Iterator[Speed]:
    """Time the samples with a label, and the first of the others that can be timed."""
    for sample in samples:
        speed = _time(sample, device, dtype)
        if speed is not None:
            yield speed
            if not sample.label:
                return


def _time(sample: Sample, device: str, dtype: str) -> Speed | None:
    try:
        calls = {
            "nchw": forward(sample, contiguous).call,
            "nhwc": forward(sample, channels_last).call,
        }
        with torch.inference_mode():
            start = time.perf_counter()
            results = calls["nchw"]()
            if time.perf_counter() - start > TOO_SLOW_S or _too_many(results):
                return None
            del results
            comparison = _compare(calls, ROUNDS, device)
            if comparison.interval[1] < 0.95:
                # Measure again, and longer, before calling an operator slower.
                comparison = _compare(calls, AGAIN, device)
    except Exception:
        return None
    low, high = comparison.interval
    return Speed(
        case=describe(sample) if sample.label else "as sampled",
        shape="x".join(map(str, next(t.shape for t in sample.tensors if t.ndim in (4, 5)))),
        dtype=dtype,
        nchw_s=float(f"{comparison.before.median_s:.4g}"),
        nhwc_s=float(f"{comparison.after.median_s:.4g}"),
        ratio=round(comparison.ratio, 3),
        interval=(round(low, 3), round(high, 3)),
    )


def _compare(calls: dict, rounds: int, device: str) -> Comparison:
    times = interleave(calls, rounds=rounds, warmup=1, device=device)
    return Comparison(times["nchw"], times["nhwc"])


def _too_many(results: list[torch.Tensor]) -> bool:
    return sum(result.numel() for result in results) > MOST_ELEMENTS
