"""Made-up benchmark results: what renderers and comparisons are tried on."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

from nhwc._bench import SUITES, Benchmark, Case, Measurement, Row
from nhwc.machine.environment import Environment

SPEEDS = {"eager": 1.0, "channels_last": 0.7, "fused": 0.65, "optimized": 0.4, "onnxruntime": 0.5}
"""Seconds per call, as shares of eager's."""

HERE = Environment(
    processor="Test CPU",
    instruction_set="AVX2",
    cores=2,
    threads=2,
    device="cpu",
    torch="2.13.0",
    numpy="2.4.6",
    python="3.11.2",
    system="Linux x86_64",
)


def measured(variant: str, seconds: float, *, noise: float = 0.002, seed: int = 0) -> Measurement:
    draw = random.Random(f"{variant}{seconds}{seed}")
    turns = tuple(
        tuple(seconds * math.exp(draw.gauss(0, noise)) for _ in range(3)) for _ in range(11)
    )
    version = "1.31.1" if variant == "onnxruntime" else ""
    return Measurement(variant, turns, 1.2, 230_000_000, 4e-7, version)


def row(case: Case, speeds: Mapping[str, float] = SPEEDS, **more) -> Row:
    return Row(case, tuple(measured(name, 0.05 * share) for name, share in speeds.items()), **more)


def one() -> Benchmark:
    """One case; one variant failed."""
    made = row(Case("resnet50", ((4, 3, 224, 224),), 2), propagation="clean")
    failed = Measurement("openvino", failure="not installed: pip install 'nhwc[engines]'")
    return Benchmark(HERE, (Row(made.case, (*made.measurements, failed), propagation="clean"),))


def suite() -> Benchmark:
    """The first models of a suite at two batch sizes; one model failed altogether."""
    icelake = SUITES[1]
    tasks = [
        task
        for task in icelake.tasks(tuple(SPEEDS), batches=(1, 4))
        if task.case.model in icelake.models[:4]
    ]
    rows = [row(task.case, published=task.published, propagation="clean") for task in tasks]
    rows.append(Row(Case("broken", ((1, 3, 224, 224),), 2), failure="ModelFailed: it is broken"))
    return Benchmark(HERE, tuple(rows), title="icelake: a title")
