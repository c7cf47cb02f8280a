"""The recorded suites: what a run measures, goes on with, and shows."""

import dataclasses
import time

import pytest
from benchmarks import published

from nhwc._bench import SUITES, Benchmark, load_benchmark

from ..made_up import HERE, row

BY_NAME = {suite.name: suite for suite in SUITES}


@pytest.fixture
def measured(monkeypatch):
    """The models that were measured: instead of a machine, a table answers."""
    seen = []

    def run(tasks, *, title, seconds, done):
        (task,) = tasks
        seen.append(task.case.model)
        speeds = dict.fromkeys(task.variants, 1.0) | {"channels_last": 0.7}
        rows = (*(done.rows if done else ()), row(task.case, speeds, published=task.published))
        return Benchmark(HERE, rows, title=title)

    monkeypatch.setattr(published, "run", run)
    monkeypatch.setattr(published, "left_to_do", lambda tasks, done: [
        task for task in tasks if done is None or task.case not in {r.case for r in done.rows}
    ])  # fmt: skip
    return seen


def test_a_run_goes_on_where_the_limit_stopped_the_first(measured, tmp_path, monkeypatch):
    path = tmp_path / "blog.json"
    blog = BY_NAME["blog"]

    def forecast(tasks, *, seconds):
        return [
            dataclasses.replace(task, expected_s=1.0 if task.case.model == "resnet50" else 1e6)
            for task in tasks
        ]

    with monkeypatch.context() as patched:
        patched.setattr(published, "forecast", forecast)
        published.record(blog, path, time.monotonic() + 60)
    assert measured == ["resnet50"]
    text = published.table(load_benchmark(path))
    assert "| resnet50 |" in text
    assert "1.43 (1.4" in text
    assert "| 1.30-1.80x | reproduced |" in text
    assert "Not recorded yet: alexnet, densenet121" in text

    published.record(blog, path, time.monotonic() + 1e9)
    assert measured[:3] == ["resnet50", "mnasnet1_0", "squeezenet1_1"]
    assert sorted(measured) == sorted(blog.models)
    assert "Not recorded" not in published.table(load_benchmark(path))


def test_the_fusion_table_has_the_tutorials_three_numbers(measured, tmp_path):
    path = tmp_path / "fusion.json"
    published.record(BY_NAME["fusion"], path, time.monotonic() + 1e9)
    text = published.table(load_benchmark(path))
    head = (
        "| model | unfused ms | fused ms | jit.script(fused) ms | folding gains | jit.script gains"
    )
    assert head in text
    assert "| vgg11 |" in text
    assert "| control |" in text
