"""The paired runner on real processes, with networks small enough to run in no time."""

import contextlib
import dataclasses
import math
import textwrap

import numpy
import pytest
import torch
from torch import nn

import nhwc
from nhwc._bench import Benchmark, Case, Task, paired, run, runner, worker
from nhwc._bench.engines import ENGINES, find_engine
from nhwc._bench.engines.engine import Engine
from nhwc._bench.results import Measurement
from nhwc._bench.runner import left_to_do
from nhwc._bench.truth import Truth, arrays_of, find_truth
from nhwc.machine.workers import Nurseries, Nursery

SHAPE = (2, 3, 16, 16)
PLAIN = ("eager", "channels_last")


@pytest.fixture(scope="module", autouse=True)
def _warm_once():
    """Let all tests here have the same nurseries: to import torch takes most of a short case."""
    with pytest.MonkeyPatch.context() as patch, Nurseries(paired.WORKER) as nurseries:
        patch.setattr(runner, "Nurseries", lambda module: contextlib.nullcontext(nurseries))
        yield


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    """A file of models; `zoo("name")` is how a user would name one."""
    path = tmp_path_factory.mktemp("zoo") / "nets.py"
    path.write_text(
        textwrap.dedent(
            """
            import os, signal, torch
            from torch import nn

            def net():
                return nn.Sequential(
                    nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5),
                    nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
                )

            class Talks(nn.Module):
                def forward(self, x):
                    print("to stdout, where the answers go")
                    return {"out": x * 2, "aux": [x + 1]}

            class Random(nn.Module):
                def forward(self, x):
                    return torch.randn(4)

            class Strided(nn.Module):
                def forward(self, x):
                    return x * x.stride(1)

            class Raises(nn.Module):
                def forward(self, x):
                    raise KeyError("no such thing")

            class Counts(nn.Module):
                def forward(self, x):
                    assert torch.get_num_threads() == 1
                    return x + 1

            class Dies(nn.Module):
                def forward(self, x):
                    if torch.jit.is_tracing():
                        os.kill(os.getpid(), signal.SIGKILL)
                    return x + 1
            """
        )
    )
    return lambda name: f"{path}:{name}"


def measure(*args, **kwargs):
    return nhwc.bench(*args, shape=SHAPE, threads=(1,), seconds=0.1, **kwargs)


def test_every_variant_is_measured_in_the_same_turns(zoo):
    heard = []
    result = measure(zoo("net"), variants=PLAIN, progress=heard.append)
    (row,) = result.rows
    assert [m.variant for m in row.measured] == list(PLAIN)
    assert {len(m.turns) for m in row.measured} == {len(row.measured[0].turns)}
    assert len(row.measured[0].turns) >= 9
    for m in row.measured:
        assert all(second > 0 for second in m.samples.seconds)
        assert m.error < 1e-4
        assert m.setup_s > 0
    assert row.propagation == "clean"
    assert not result.interrupted
    assert [p.share for p in heard] == sorted(p.share for p in heard)
    assert heard[-1].remaining_s is not None


def test_one_row_per_model_batch_and_thread_count(zoo):
    names = [zoo("net"), zoo("Counts")]
    result = measure(names, variants=("eager",), batches=(1, 3))
    cases = [(row.case.model.split(":")[-1], row.case.shapes[0][0]) for row in result.rows]
    assert cases == [("net", 1), ("net", 3), ("Counts", 1), ("Counts", 3)]
    assert all(row.measured for row in result.rows)


def test_a_module_is_sent_and_left_as_it_was():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    (row,) = measure(net, variants=PLAIN).rows
    assert row.case.model == "Sequential"
    assert len(row.measured) == 2
    torch.testing.assert_close(net.state_dict(), before, rtol=0, atol=0)
    assert nhwc.format_of(net[0].weight) is nhwc.Format.CONTIGUOUS


def test_a_module_that_cannot_be_sent():
    net = nn.Sequential(nn.ReLU())
    net.hidden = lambda: None
    with pytest.raises(nhwc.InputError, match="cannot be sent to another process"):
        measure(net)


def test_what_a_model_prints_disturbs_nobody(zoo):
    (row,) = measure(zoo("Talks"), variants=("eager",)).rows
    assert row.measured


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Raises", "KeyError: 'no such thing'"),
        ("none", "has no callable 'none'"),
    ],
)
def test_a_failing_model_is_a_row_that_says_why(zoo, name, message):
    result = measure([zoo(name), zoo("Counts")], variants=("eager",))
    assert message in result.rows[0].failure
    assert result.rows[1].measured


def test_a_wrong_answer_is_not_timed(zoo):
    (row,) = measure(zoo("Strided"), variants=("eager", "channels_last")).rows
    right, wrong = row.measurements
    assert right.turns
    assert wrong.failure.startswith("wrong output: error ")
    assert not wrong.turns


def test_a_model_whose_answers_are_chance_has_no_rivals(zoo):
    (row,) = measure(zoo("Random"), variants=("eager", "jit")).rows
    assert "eager's own answer is " in row.failure
    assert not row.measurements


def test_an_engine_that_dies_takes_nobody_along(zoo):
    (row,) = measure(zoo("Dies"), variants=("eager", "jit")).rows
    alive, dead = row.measurements
    assert alive.turns
    assert dead.failure.startswith("the process died (SIGKILL), out of memory?")


def test_ctrl_c_keeps_whole_turns(zoo):
    def interrupt(progress):
        if "channels_last, turn 4" in progress.doing:
            raise KeyboardInterrupt

    result = measure([zoo("net"), zoo("Counts")], variants=PLAIN, progress=interrupt)
    assert result.interrupted
    (row,) = result.rows
    assert {len(m.turns) for m in row.measured} == {3}


def test_ctrl_c_before_anything_is_measured(zoo):
    def interrupt(progress):
        raise KeyboardInterrupt

    result = measure(zoo("net"), variants=PLAIN, progress=interrupt)
    assert result.interrupted
    assert result.rows == ()


@pytest.mark.parametrize(
    ("answer", "other", "error"),
    [
        ([1.0, -math.inf], [1.0, -math.inf], 0.0),
        ([1.0, math.nan], [1.0, math.nan], 0.0),
        ([1.0, -math.inf], [1.0, math.inf], math.inf),
        ([1.0, -math.inf], [1.0, math.nan], math.inf),
        ([1.0, 2.0], [1.0, math.nan], math.inf),
        ([1.0, math.inf], [1.0, 2.0], math.inf),
        ([1 + 1j], [1 - 5j], 6.0),
        ([1 + 1j], [1 + 1j], 0.0),
    ],
)
def test_what_is_not_finite_or_complex_is_compared_number_by_number(answer, other, error):
    for made in (torch.tensor, numpy.array):
        assert Truth(arrays_of(made(answer)), 0.0).error_of(made(other)) == error


def test_training_steps(zoo):
    (row,) = measure(zoo("net"), variants=(*PLAIN, "fused"), train=True).rows
    assert [m.variant for m in row.measured] == list(PLAIN)
    assert row.measurements[2].failure == "inference only"
    assert all(m.error < 1e-3 for m in row.measured)


@pytest.mark.parametrize(
    ("train", "remedy"), [(True, "step .*Give more images"), (False, "answer .*trained weights")]
)
def test_what_is_mostly_rounding_has_no_rivals(train, remedy, monkeypatch):
    monkeypatch.setattr("nhwc._bench.truth.ROUGH", 0.0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 2))
    with pytest.raises(nhwc.InputError, match=rf"off its float64 run: no {remedy}"):
        find_truth(net, [torch.randn(2, 3, 2, 2)], train=train)


def test_mixed_precision(zoo):
    for train in (False, True):
        (row,) = measure(zoo("net"), variants=(*PLAIN, "jit"), amp=True, train=train).rows
        assert len(row.measured) == 2, row
        assert row.measurements[2].failure in ("inference only", "does not follow torch.autocast")


def test_folding_is_measured_in_each_layout_and_counted(zoo):
    variants = ("eager", "fused_nchw", "fused_script", "channels_last", "fused")
    (row,) = measure(zoo("net"), variants=variants).rows
    assert [m.failure for m in row.measurements] == [""] * 5
    counts = {m.variant: (m.folded, m.left) for m in row.measured}
    assert counts["fused"] == counts["fused_nchw"] == (1, 0)
    assert counts["eager"] == counts["fused_script"] == (None, None)
    for variant, before in (
        ("fused_nchw", "eager"), ("fused_script", "fused_nchw"), ("fused", "channels_last"),
    ):  # fmt: skip
        assert row.gain(variant) == row.comparison(variant, before) is not None
    assert row.gain("eager") is None


@pytest.mark.parametrize(("seconds", "untimed"), [(0.0, 1), (2.0, 0)])
def test_a_slow_call_is_not_made_for_warmth(seconds, untimed, monkeypatch):
    calls = []
    monkeypatch.setattr(worker, "timer_for", lambda device: lambda call: call() or seconds)
    running = worker.Running(lambda: calls.append(1), "cpu", None)
    assert running.pace() == seconds
    assert running.warm_calls == untimed
    calls.clear()
    assert running.burst(2) == [seconds] * 2
    assert len(calls) == 2 + untimed


def made_rows(monkeypatch):
    """Replace the measuring by something instant; return the list of cases it was asked for."""
    asked = []

    def instant(task, nursery, **_):
        from ..made_up import row

        asked.append(task.case)
        return row(task.case, dict.fromkeys(task.variants, 1.0)), False

    monkeypatch.setattr("nhwc._bench.runner.measure", instant)
    return asked


def tasks(*batches):
    return [Task(Case("resnet18", ((n, 3, 8, 8),), 2), PLAIN) for n in batches]


def test_resume_measures_only_what_is_missing(monkeypatch):
    asked = made_rows(monkeypatch)
    kept = []
    first = run(tasks(1, 2), checkpoint=kept.append)
    assert [len(result.rows) for result in kept] == [1, 2]
    assert [result.interrupted for result in kept] == [True, False]
    asked.clear()
    again = run(tasks(1, 2, 4), done=Benchmark.from_dict(first.to_dict()))
    assert [case.batch for case in asked] == [4]
    assert [row.case.batch for row in again.rows] == [1, 2, 4]
    asked.clear()
    wider = [dataclasses.replace(task, variants=(*PLAIN, "jit")) for task in tasks(1)]
    assert [row.case.batch for row in run(wider, done=again).rows] == [2, 4, 1]
    assert len(asked) == 1


def test_a_case_is_measured_once(monkeypatch):
    asked = made_rows(monkeypatch)
    assert [row.case.batch for row in run(tasks(1, 2, 1)).rows] == [1, 2]
    assert len(asked) == 2


def test_resume_measures_what_was_there_again_beside_what_is_new(monkeypatch):
    made_rows(monkeypatch)
    done = run(tasks(1))
    wider = [dataclasses.replace(task, variants=("jit",)) for task in tasks(1)]
    (left,) = left_to_do(wider, done)
    assert set(left.variants) == {*PLAIN, "jit"}


def test_resume_measures_what_has_been_installed_since(monkeypatch):
    asked = made_rows(monkeypatch)
    jit = find_engine("jit")
    done = run([dataclasses.replace(tasks(1)[0], variants=(*PLAIN, "jit"))])
    row = done.rows[0]
    for failure, again in ((jit.not_installed, [1]), ("it raised", [])):
        failed = (*row.measurements[:-1], Measurement("jit", failure=failure))
        before = dataclasses.replace(done, rows=(dataclasses.replace(row, measurements=failed),))
        asked.clear()
        run([dataclasses.replace(tasks(1)[0], variants=(*PLAIN, "jit"))], done=before)
        assert [case.batch for case in asked] == again
    missing = property(lambda engine: ("nothing",))
    monkeypatch.setattr(type(jit), "missing", missing)
    failed = (*row.measurements[:-1], Measurement("jit", failure=jit.not_installed))
    before = dataclasses.replace(done, rows=(dataclasses.replace(row, measurements=failed),))
    assert left_to_do([dataclasses.replace(tasks(1)[0], variants=(*PLAIN, "jit"))], before) == []


def test_what_ctrl_c_cut_short_replaces_nothing_whole(monkeypatch):
    made_rows(monkeypatch)
    done = run(tasks(1, 2))
    cut = dataclasses.replace(
        done.rows[0],
        measurements=tuple(
            dataclasses.replace(m, turns=m.turns[:1]) for m in done.rows[0].measurements
        ),
    )
    monkeypatch.setattr(runner, "measure", lambda task, nursery, **more: (cut, True))
    wider = [dataclasses.replace(task, variants=(*PLAIN, "jit")) for task in tasks(1)]
    assert {*run(wider, done=done).rows} == {*done.rows}
    # Wherever a row is that was cut short, it is measured again.
    interrupted = dataclasses.replace(done, rows=(cut, done.rows[1]), interrupted=True)
    assert [task.case.batch for task in left_to_do(tasks(1, 2), interrupted)] == [1]


def test_resume_on_another_machine_is_refused(monkeypatch):
    made_rows(monkeypatch)
    done = run(tasks(1))
    moved = dataclasses.replace(done.environment, processor="Abacus")
    with pytest.raises(nhwc.InputError, match="cannot resume: that was measured on Abacus"):
        run(tasks(1, 2), done=dataclasses.replace(done, environment=moved))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"variants": ("warp",)}, "no variant is called 'warp'. There are: eager, channels_last"),
        ({"threads": (0,)}, "0 threads cannot run anything"),
        ({"batches": (0,)}, "a batch of 0 is empty"),
    ],
)
def test_bad_requests(arguments, message):
    with pytest.raises(nhwc.InputError, match=message):
        nhwc.bench("resnet18", **arguments)


def test_an_engine_that_is_not_installed_names_the_pip_line():
    engine = Engine("x", "X", find_engine("eager").prepare, packages=("no_such_package", "torch"))
    obstacle = engine.obstacle(train=False, amp=False, device="cpu")
    assert obstacle == "not installed: pip install no_such_package torch"
    assert find_engine("openvino").obstacle(train=False, amp=False, device="cuda") == (
        "runs on the CPU only"
    )


def test_engines_are_known_by_one_name_each():
    names = [engine.name for engine in ENGINES]
    assert len(set(names)) == len(names)
    assert set(nhwc._bench.engines.QUICK) <= set(names)


@pytest.mark.slow
@pytest.mark.parametrize(
    "variants",
    [
        ("jit", "fx", "onnxruntime", "openvino"),
        ("compile", "compile_frozen"),
        ("opencv", "ncnn", "mnn", "executorch", "litert"),
    ],
)
def test_the_peers_answer_right(zoo, variants):
    able = [v for v in variants if not find_engine(v).missing]
    if not able:
        pytest.skip(f"none of {', '.join(variants)} is installed")
    (row,) = measure(zoo("net"), variants=("eager", *able)).rows
    assert [m.failure for m in row.measurements] == [""] * (len(able) + 1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("train", [False, True])
def test_on_cuda(zoo, train):
    result = measure(
        zoo("net"), variants=(*PLAIN, "openvino"), device="cuda", amp=True, train=train
    )
    (row,) = result.rows
    assert [m.variant for m in row.measured] == list(PLAIN)
    assert all(m.peak_bytes > 0 for m in row.measured)
    assert result.environment.device == torch.cuda.get_device_name()


def test_a_worker_that_hangs_is_ended(zoo, monkeypatch):
    monkeypatch.setattr(paired, "PATIENCE_S", 0.01)
    task = Task(Case(zoo("net"), (SHAPE,), 1), ("eager",))
    with Nursery(paired.WORKER, threads=1) as nursery:
        row, interrupted = paired.measure(task, nursery, seconds=0.1)
    assert not interrupted
    assert row.failure.startswith("it took longer than 0 s")
