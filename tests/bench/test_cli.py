"""nhwc bench, as it is typed."""

import json
import re
import signal
from pathlib import Path

import pytest
import torch

import nhwc._bench.engines
from nhwc._bench import Benchmark, Case, Row
from nhwc.cli import main
from nhwc.machine.environment import available_cores

from ..made_up import one, suite

TINY = ["--input", "1x3x8x8", "--variants", "eager", "--seconds", "0.1", "--threads", "1"]


@pytest.fixture
def net(tmp_path):
    path = tmp_path / "nets.py"
    path.write_text("from torch import nn\n\ndef net():\n    return nn.Conv2d(3, 8, 3)\n")
    return f"{path}:net"


@pytest.fixture
def saved(tmp_path):
    def save(result, name):
        path = tmp_path / name
        path.write_text(json.dumps(result.to_dict()))
        return str(path)

    return save


def test_from_a_model_to_a_table_a_file_and_a_picture(net, tmp_path, capsys):
    path, picture = tmp_path / "out.json", tmp_path / "out.svg"
    line = ["bench", net, *TINY, "-o", str(path), "--plot", str(picture)]
    assert main(line) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert f"wrote {path}" in err
    assert picture.read_bytes().lstrip().startswith(b"<?xml")
    result = Benchmark.from_dict(json.loads(path.read_text()))
    assert [m.variant for m in result.rows[0].measured] == ["eager"]

    # A second run has nothing to do: what it holds is what it was.
    before = path.read_text()
    assert main([*line, "--resume"]) == 0
    assert path.read_text() == before


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (["resnet51"], r"no model named 'resnet51': .*did you mean resnet\d+"),
        (["{net}", "{net}x"], r".*nets\.py has no callable 'netx'\. Check the part after"),
        (["{net}", "--weights", "none.pt"], r"no such weights file: none\.pt$"),
    ],
)
def test_a_model_or_file_that_does_not_exist_is_told_before_processes_start(
    line, says, net, monkeypatch, capsys
):
    monkeypatch.setattr("nhwc._bench.runner.measure", lambda *_, **__: pytest.fail("it started"))
    assert main(["bench", *(word.format(net=net) for word in line), *TINY]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.match(f"error: {says}", err)
    assert err.count("\n") == 1


def test_why_a_model_failed_is_told_without_the_kind_of_our_error(net, tmp_path, capsys):
    torch.save({"weight": torch.zeros(2)}, tmp_path / "w.pt")
    assert main(["bench", net, *TINY, "--weights", str(tmp_path / "w.pt")]) == 2
    says = (
        rf"error: nothing could be measured\. \S*:net: {re.escape(str(tmp_path))}/w.pt does not fit"
    )
    assert re.match(says, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ([], "name models, a suite, or models of a suite"),
        (["resnet81", "--suite", "volta"], "the suite volta has no model 'resnet81'. Did you mean"),
        (["--suite", "volta", "--train"], "--train does not go with --suite"),
        (["--suite", "fusion", "--amp"], "does not follow torch.autocast. Leave --amp out"),
        (["resnet18", "--batch", "1,x"], "--batch '1,x' is no list of numbers"),
        (["resnet18", "--threads", "0"], "--threads 0 has a number below 1"),
        (["resnet18", "--variants", "warp"], "no variant is called 'warp'"),
        (["resnet18", "--input", "3x224x224"], "has 3 dimensions"),
        (["old.json", "new.json"], "old.json is a result, which is shown alone. Show two with --c"),
        (["resnet18", "--plot", "x.pdf"], "--plot x.pdf has no known ending"),
        (["resnet18", "--resume"], "--resume needs the file to go on with"),
        (["resnet18", "--device", "abacus"], "device 'abacus' is not usable"),
        (["resnet18", "--device", "privateuseone"], "device 'privateuseone' is not usable"),
        (["--compare", "a.json", "b.json", "--plot", "p.svg"], "--plot does not go with --compare"),
        (["old.json", "--suite", "volta"], "--suite does not go with old.json"),
        (["old.json", "--seconds", "10"], "--seconds does not go with old.json"),
        (["old.json", "--amp"], "--amp does not go with old.json"),
        (["--engines", "--device", "cpu"], "--device does not go with --engines"),
        (["--compare", "a.json", "b.json", "--seed", "1"], "--seed does not go with --compare"),
        (["--engines", "--batch", "4"], "--batch does not go with --engines"),
        (["resnet18", "-o", f"{'x' * 5000}.json"], "is longer than a name of a file may be"),
        (["resnet18", "--seed", "+-5"], "'+-5' is no whole number"),
        (["--compare", "none.json", "none.json"], "no such result of nhwc bench: none.json"),
    ],
)
def test_bad_input_gets_one_line_and_exit_2(line, message, capsys):
    assert main(["bench", *line]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


def test_compare_and_its_exit_status(saved, capsys):
    old = one()
    plain = old.to_dict()
    for m in plain["rows"][0]["measurements"]:
        if m["variant"] == "optimized":
            m["turns"] = [[second * 1.1 for second in turn] for turn in m["turns"]]
    slower = Benchmark.from_dict(plain)
    files = [saved(old, "old.json"), saved(slower, "new.json")]
    assert main(["bench", "--compare", *files]) == 0
    assert main(["bench", "--compare", *files, "--fail-on", "slower"]) == 1
    assert "1 of 5 slower" in capsys.readouterr().out
    assert main(["bench", "--compare", *files[::-1], "--fail-on", "slower"]) == 0
    assert main(["bench", "--compare", *files, "--format", "json"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    verdicts = {c["variant"]: c["verdict"] for c in json.loads(last)["changes"]}
    assert verdicts["optimized"] == "slower"
    assert main(["bench", "--compare", *files, "--format", "csv"]) == 2


def test_a_saved_result_is_shown_again(saved, tmp_path, capsys):
    path = saved(one(), "old.json")
    picture = tmp_path / "old.png"
    assert main(["bench", path, "--plot", str(picture)]) == 0
    assert "nhwc optimize is fastest" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"kind": "bench", "schema": 2}'])
def test_files_that_are_no_results(text, tmp_path, capsys):
    path = tmp_path / "x.json"
    path.write_text(text)
    assert main(["bench", "--compare", str(path), str(path)]) == 2
    err = capsys.readouterr().err
    assert str(path) in err
    assert err.count("\n") == 1


def test_ctrl_c_writes_what_there_is_and_exits_130(monkeypatch, tmp_path, capsys):
    import dataclasses

    part = dataclasses.replace(suite(), interrupted=True)
    monkeypatch.setattr("nhwc.cli.bench.measure", lambda *args, **kwargs: part)
    path = tmp_path / "part.json"
    assert main(["bench", "resnet18", "-o", str(path)]) == 130
    assert Benchmark.from_dict(json.loads(path.read_text())).interrupted


@pytest.mark.parametrize("interrupted", [True, False])
def test_where_nothing_was_measured_an_earlier_result_stays(interrupted, saved, monkeypatch):
    failed = Row(Case("resnet18", ((1, 3, 8, 8),), 1), failure="ModelFailed: it is broken")
    nothing = Benchmark(one().environment, (failed,), interrupted=interrupted)

    def measured(*args, checkpoint, **kwargs):
        checkpoint(nothing)
        return nothing

    monkeypatch.setattr("nhwc.cli.bench.measure", measured)
    path = Path(saved(one(), "old.json"))
    before = path.read_bytes()
    assert main(["bench", "resnet18", "-o", str(path)]) == (130 if interrupted else 2)
    assert path.read_bytes() == before


def test_formats_follow_the_ending(monkeypatch, tmp_path):
    monkeypatch.setattr("nhwc.cli.bench.measure", lambda *args, **kwargs: one())
    for name, start in (("a.csv", "model,"), ("a.html", "<!doctype"), ("a.txt", "resnet50 4x3")):
        assert main(["bench", "resnet50", "-o", str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_text().startswith(start)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_does_what_ctrl_c_does_and_handlers_are_put_back(monkeypatch, number):
    def measure(*args, **kwargs):
        signal.raise_signal(number)

    monkeypatch.setattr("nhwc.cli.bench.measure", measure)
    before = signal.signal(number, lambda *_: pytest.fail("nobody else hears it"))
    try:
        mine = signal.getsignal(number)
        assert main(["bench", "resnet50"]) == 130
        assert signal.getsignal(number) is mine
    finally:
        signal.signal(number, before)


def test_what_nohup_ignores_stays_ignored(monkeypatch):
    def measure(*args, **kwargs):
        signal.raise_signal(signal.SIGHUP)
        return one()

    monkeypatch.setattr("nhwc.cli.bench.measure", measure)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert main(["bench", "resnet50"]) == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_engines_are_listed_with_their_version_or_their_pip_line(monkeypatch, capsys):
    from nhwc._bench.engines import find_engine
    from nhwc._bench.engines.engine import Engine

    absent = Engine("x", "Engine X", print, packages=("no_such",), requirements=("x-dist>=5", "y"))
    monkeypatch.setattr("nhwc.cli.bench.ENGINES", (find_engine("eager"), absent))
    assert main(["bench", "--engines"]) == 0
    installed, missing = capsys.readouterr().out.split("\n\n")
    assert re.search(r"^installed\n  eager +eager NCHW +torch 2", installed)
    assert re.search(r"^not installed\n  x +Engine X +pip install 'x-dist>=5' y$", missing.strip())
    assert main(["bench", "--engines", "--format", "csv"]) == 2


def test_what_is_not_installed_is_named_once_before_any_work(monkeypatch, capsys):
    from nhwc._bench.engines.engine import Engine

    absent = Engine("x", "Engine X", print, packages=("no_such_package",))
    engines = (*nhwc._bench.engines.ENGINES, absent)
    asked = []

    def measure(tasks, **_):
        asked.extend(tasks)
        return one()

    for place in ("nhwc.cli.bench", "nhwc._bench.engines"):
        monkeypatch.setattr(f"{place}.ENGINES", engines)
    monkeypatch.setattr("nhwc.cli.bench.measure", measure)
    assert main(["bench", "resnet18", "resnet34", "--variants", "all"]) == 0
    err = capsys.readouterr().err
    assert err.count("Engine X (pip install no_such_package)") == 1
    assert {"eager", "optimized", "jit"} <= set(asked[0].variants)
    assert "x" not in asked[0].variants

    # Who is asked for by name has a row that says why.
    assert main(["bench", "resnet18", "--variants", "eager,x"]) == 0
    assert "Engine X" in capsys.readouterr().err
    assert asked[-1].variants == ("eager", "x")


@pytest.fixture
def asked(monkeypatch):
    """The tasks that a command would measure, with its title; nothing is measured."""
    seen = []

    def measure(tasks, **settings):
        seen.append((tasks, settings["title"]))
        return one()

    monkeypatch.setattr("nhwc.cli.bench.measure", measure)
    return seen


def test_a_model_of_several_inputs_has_a_shape_for_each(net, asked):
    words = ["bench", net, "--input", "1x3x8x8", "--input", "1x16"]
    assert main([*words, "--threads", "1"]) == 0
    assert main([*words, "--threads", "1", "--batch", "2,4"]) == 0
    shapes = [task.case.shapes for tasks, _ in asked for task in tasks]
    assert shapes == [((n, 3, 8, 8), (n, 16)) for n in (1, 2, 4)]


def test_one_model_of_a_suite_and_how_long_it_takes(asked, capsys):
    assert main(["bench", "resnet18", "vgg11", "--suite", "blog", "--threads", "1"]) == 0
    ((tasks, title),) = asked
    assert [task.case.model for task in tasks] == ["resnet18", "vgg11"]
    assert tasks[0].case.batch == 2 * available_cores()
    assert str(tasks[0].published) == "1.30-1.80x"
    assert title.startswith("blog: ")
    # Four times the arithmetic takes longer, and the command says so before it begins.
    assert tasks[1].expected_s > tasks[0].expected_s > 0
    assert re.search(r"blog: 2 cases, about \d+ (s|min|h)", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("words", "emulated", "amp", "said"),
    [
        ([], True, False, "so float32 is measured"),
        ([], False, True, ""),
        (["--amp"], True, True, "about ten times as long"),
        (["--no-amp"], False, False, ""),
    ],
)
def test_a_suite_says_its_precision(words, emulated, amp, said, asked, monkeypatch, capsys):
    for place in ("nhwc._bench.suites", "nhwc.cli.bench"):
        monkeypatch.setattr(f"{place}.emulates_bfloat16", lambda: emulated)
    assert main(["bench", "mnasnet0_5", "--suite", "volta", "--threads", "1", *words]) == 0
    ((tasks, title),) = asked
    assert [task.case.amp for task in tasks] == [amp]
    assert ("measured in float32" in title) is not amp
    assert said in capsys.readouterr().err
    # Only engines that follow autocast are asked to.
    assert ("onnxruntime" in tasks[0].variants) is not amp


def test_the_fusion_suite_compares_in_one_layout_at_a_time(asked):
    assert main(["bench", "--suite", "fusion", "--threads", "1"]) == 0
    ((tasks, _),) = asked
    published, control = tasks
    assert (published.published.before, published.published.after) == ("eager", "fused_nchw")
    assert published.variants == ("eager", "fused_nchw", "fused_script", "channels_last", "fused")
    assert (control.case.model, control.published) == ("vgg11", None)
