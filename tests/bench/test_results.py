"""Results of a benchmark: read back as written, judged as measured."""

import dataclasses
import json
import math
import re

import pytest
import torch
from torch import nn

from nhwc import FileError, InputError, bench
from nhwc._bench import SUITES, Benchmark, Case, Measurement, Published, Row, compare
from nhwc._bench.floor import Floor, count_flop
from nhwc._bench.forecast import GFLOP
from nhwc.render import bench_words
from nhwc.render.bench_text import bench_text, changes_text
from nhwc.zoo.sources import find_builder

from ..made_up import HERE, measured, one, row, suite

CASE = Case("net", ((2, 3, 8, 8),), 1)


@pytest.mark.parametrize("made", [one, suite])
def test_json_keeps_everything(made):
    result = made()
    again = Benchmark.from_dict(json.loads(json.dumps(result.to_dict())))
    # Nanoseconds are all that is kept of a time.
    assert again.to_dict() == result.to_dict()
    assert [r.case for r in again.rows] == [r.case for r in result.rows]
    assert again.rows[0].measurements[0].median_s == pytest.approx(0.05, rel=0.05)


def test_json_has_no_nan():
    failed = Row(CASE, (dataclasses.replace(one().rows[0].measurements[-1]),))
    text = json.dumps(Benchmark(HERE, (failed,)).to_dict(), allow_nan=False)
    assert math.isnan(Benchmark.from_dict(json.loads(text)).rows[0].measurements[0].setup_s)


def spoiled(data, part, **others):
    """A result with other values in the case, or in the first measurement, of its first row."""
    row = dict(data["rows"][0])
    held = row[part]
    row[part] = held | others if part == "case" else [held[0] | others, *held[1:]]
    return {**data, "rows": [row, *data["rows"][1:]]}


def with_others(data, taken):
    data["rows"][0]["others"] = {"taken": taken, "cores": 2}
    return data


def with_floor(data, **changes):
    data["rows"][0]["floor"] = {"flop": 1e9, "peak_flops": 1e11, "handover_s": 1e-7, **changes}
    return data


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda d: [], "no result of nhwc bench"),
        (lambda d: {**d, "kind": "audit"}, "no result of nhwc bench"),
        (lambda d: {**d, "schema": 99}, "schema 99; this nhwc reads 1"),
        (lambda d: {**d, "rows": [{}]}, "damaged"),
        (lambda d: {**d, "environment": {"cpu": 1}}, "damaged"),
        (lambda d: {k: v for k, v in d.items() if k != "baseline"}, "damaged"),
        (lambda d: {**d, "baseline": "magic"}, "no variant is called 'magic'"),
        (lambda d: {**d, "title": 3}, "damaged: the result.title is 3, not str"),
        (lambda d: spoiled(d, "case", threads="1"), "threads is '1', not int"),
        (lambda d: spoiled(d, "case", threads=0), "has no image or no thread"),
        (lambda d: spoiled(d, "case", shapes=[[]]), "has no image or no thread"),
        (lambda d: spoiled(d, "measurements", error=None), "was timed without an error"),
        (lambda d: spoiled(d, "measurements", setup_s=-1.0), "was timed without an error"),
        (lambda d: spoiled(d, "measurements", turns=[]), "had no turns"),
        (lambda d: spoiled(d, "measurements", peak_bytes=10**400), "damaged: .*peak_bytes is 1000"),
        (lambda d: spoiled(d, "measurements", turns=[[1.0]]), "had no turns, or not as many"),
        (lambda d: spoiled(d, "measurements", turns=[[0.0]] * 11), "took no time"),
        (lambda d: spoiled(d, "measurements", turns=[[1e-320]] * 11), "no time that a clock shows"),
        (lambda d: spoiled(d, "measurements", turns=[[1e308]] * 11), "no time that a clock shows"),
        (lambda d: with_floor(d, handover_s=1e300), "floor of resnet50 is no time"),
        (lambda d: with_floor(d, peak_flops=1e-300), "floor of resnet50 is no time"),
        (lambda d: with_others(d, taken=3.0), "others had more cores beside resnet50 than there"),
        (lambda d: with_others(d, taken=math.nan), "others had more cores"),
        (lambda d: with_others(d, taken="all"), "damaged"),
        (lambda d: spoiled(d, "measurements", variant="magic"), "damaged"),
    ],
)
def test_foreign_results_are_refused(spoil, message):
    with pytest.raises(FileError, match=message):
        Benchmark.from_dict(spoil(one().to_dict()))


@pytest.mark.parametrize(
    ("share", "low", "high", "judgement"),
    [
        (0.5, 1.26, 1.76, "exceeded"),
        (0.7, 1.26, 1.76, "reproduced"),
        (1.0, 1.26, 1.76, "not here"),
        (0.99, 1.0, 1.76, "reproduced"),
        (0.9, None, None, "reproduced"),
        (0.999, None, None, "too noisy to tell"),
        (1.2, None, None, "not here"),
    ],
)
def test_judgement(share, low, high, judgement):
    claim = Published(low, high, "eager", "channels_last", "somewhere")
    made = row(CASE, {"eager": 1.0, "channels_last": share}, published=claim)
    assert made.judgement == judgement


def test_a_figure_that_noise_alone_may_have_made_is_not_reproduced():
    before, after = measured("eager", 1.0), measured("channels_last", 1 / 1.2)
    wild = tuple((3.0,) if place % 2 else (0.5,) for place in range(len(after.turns)))
    claim = Published(1.08, 4.0, "eager", "channels_last", "somewhere")
    case = Case("net", ((1, 3, 8, 8),), 1)
    noisy = Row(case, (before, dataclasses.replace(after, turns=wild)), published=claim)
    found = noisy.comparison("channels_last", "eager")
    assert (found.ratio >= 1.08, found.verdict) == (True, "too noisy to tell")
    assert noisy.judgement == "too noisy to tell"


def test_judgement_without_the_variant_it_is_about():
    claim = Published(1.2, 1.2, "eager", "fused", "somewhere")
    assert row(CASE, {"eager": 1.0}, published=claim).judgement == "not measured"


def test_best_of_ours_and_of_the_others():
    made = one().rows[0]
    assert made.best(ours=True).variant == "optimized"
    assert made.best(ours=False).variant == "onnxruntime"
    assert Row(CASE).best(ours=True) is None


def test_turns_are_what_is_compared_and_calls_are_what_is_kept():
    m = measured("eager", 1.0)
    assert len(m.per_turn.seconds) == 11
    assert len(m.samples.seconds) == 33


def test_geometric_mean_is_over_rows_with_both():
    result = suite()
    assert result.geometric_mean("optimized") == pytest.approx(2.5, rel=0.01)
    assert math.isnan(result.geometric_mean("openvino"))


def test_compare_finds_what_got_slower_and_nothing_else():
    speeds = {"eager": 1.0, "fused": 0.8}
    old = Benchmark(HERE, (row(CASE, speeds),))
    slower = (measured("eager", 0.0501, seed=1), measured("fused", 0.044, seed=1))
    new = Benchmark(HERE, (Row(CASE, slower),))
    changes = compare(old, new)
    assert [(c.variant, c.verdict) for c in changes.changes] == [
        ("eager", "same"),
        ("fused", "slower"),
    ]
    assert [c.variant for c in changes.slower] == ["fused"]
    assert [c.verdict for c in compare(new, old).changes] == ["same", "faster"]
    assert changes.same_machine
    assert changes.to_dict()["changes"][1]["ratio"] == pytest.approx(0.04 / 0.044, rel=0.01)


def test_compare_says_when_the_machine_is_another():
    other = dataclasses.replace(HERE, processor="Other CPU")
    changes = compare(one(), dataclasses.replace(one(), environment=other))
    assert not changes.same_machine


@pytest.mark.parametrize("whole", [True, False])
def test_what_fails_now_is_told(whole):
    new = Row(CASE, failure="KeyError: 3")
    if not whole:
        new = Row(CASE, (measured("eager", 0.05), Measurement("fused", failure="KeyError: 3")))
    speeds = {"eager": 1.0, "fused": 0.8}
    changes = compare(Benchmark(HERE, (row(CASE, speeds),)), Benchmark(HERE, (new,)))
    assert len(changes.changes) + len(changes.failed) == 2
    assert f"  {CASE}, fused: KeyError: 3\n" in changes_text(changes)
    assert changes.to_dict()["failed"][-1]["failure"] == "KeyError: 3"


def test_compare_needs_something_in_common():
    with pytest.raises(InputError, match="no model, shape and variant in common"):
        compare(one(), suite())


def test_suites_name_models_that_exist():
    for offered in SUITES:
        for name in (*offered.models, *offered.controls):
            # MONAI is no dependency: its rows say so where it is missing.
            assert name.startswith("monai:") or callable(find_builder(name))
        assert {*offered.models, *offered.controls} <= set(GFLOP)
        assert len(set(offered.models)) == len(offered.models)
    assert {s.name: len(s.models) for s in SUITES} == {
        "volta": 28,
        "icelake": 29,
        "blog": 29,
        "fusion": 1,
        "apex": 1,
        "deploy": 45,
        "volumes": 10,
    }


def test_suites_make_cases():
    by_name = {suite.name: suite for suite in SUITES}
    tasks = by_name["icelake"].tasks(("optimized",), batches=(1, 4), threads=(1, 2))
    assert len(tasks) == 29 * 2 * 2
    assert tasks[0].variants == ("eager", "channels_last", "optimized")
    sides = {task.case.model: task.case.shapes[0][-1] for task in tasks}
    assert (sides["inception_v3"], sides["resnet18"]) == (299, 224)
    blog = by_name["blog"].tasks((), threads=(1,))
    assert blog[0].case.batch % 2 == 0
    assert by_name["apex"].tasks(())[0].case.train
    clips = by_name["volumes"].tasks((), models=["r3d_18"], threads=(1,))
    shapes = [task.case.shapes for task in clips]
    assert shapes == [((1, 3, 16, 112, 112),), ((2, 3, 16, 112, 112),)]
    assert clips[0].published is None
    assert clips[0].variants == ("eager",)


def test_a_row_says_how_near_its_floor_it_comes():
    # 4 GFLOP at 400 GFLOP/s take 10 ms; the optimized model's calls take 20.
    near = row(CASE, floor=Floor(4e9, 4e11))
    assert near.share_of_peak("optimized") == pytest.approx(0.5, rel=0.01)
    assert row(CASE).share_of_peak("optimized") is None
    result = Benchmark(HERE, (near, row(dataclasses.replace(CASE, model="other"))))
    again = Benchmark.from_dict(json.loads(json.dumps(result.to_dict())))
    assert [r.floor for r in again.rows] == [Floor(4e9, 4e11), None]
    words = bench_text(result)
    assert "floor ms  of the peak" in words
    assert re.search(r"net .* 10\.0 +50%", words)
    assert "4 GFLOP take 10.0 ms at the 400 GFLOP/s" in bench_text(Benchmark(HERE, (near,)))
    far = [row(CASE, floor=Floor(4e9, 4e11, one)) for one in (52e-9, 335e-9, 60e-9)]
    assert "cores, 52 to 335 ns apart," in bench_words.environment(Benchmark(HERE, (near, *far)))
    assert "cores, 52 ns apart," in bench_words.environment(Benchmark(HERE, (*far[:1], near)))
    old = result.to_dict()
    for plain in old["rows"]:
        del plain["floor"]
    assert Benchmark.from_dict(old).rows[0].floor is None


def test_attention_counts_however_torch_runs_it():
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    x = torch.zeros(1, 5, 8)
    products = 2 * 5 * 8 * (24 + 8 + 16 + 16) + 2 * 2 * 5 * 5 * 8
    assert count_flop(layer, [x]) == products


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"shape": 3}, "3 is no shape. Give one: shape="),
        ({"shape": "1x3x8x8"}, "'1x3x8x8' is no shape"),
        ({"shape": (1, 3, 0, 8)}, "is no shape"),
        ({"seconds": 0}, "seconds 0 is no time to measure for"),
        ({"seconds": "1"}, "seconds '1' is no time"),
        ({"seconds": float("nan")}, "seconds nan is no time"),
    ],
)
def test_what_cannot_be_measured_is_told_before_processes_start(given, says):
    with pytest.raises(InputError) as raised:
        bench(nn.ReLU(), **{"shape": (1, 3, 8, 8), "seconds": 0.01, "variants": ["eager"], **given})
    assert says in str(raised.value)
