"""Two real processes against one: same losses, whole values, clear words when one is lost."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nhwc import InputError, ProcessLost
from nhwc._train import distributed, load_checkpoint
from nhwc.cli import main

from .training_nets import FILE, command, environment, image_set, launched, plain, torchrun

HERE = Path(__file__).parent
WORDS = ["-b", 12, "--epochs", 2, "--size", 16, "--lr", 0.05, "--workers", 0, "--channels-last"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return image_set(tmp_path_factory.mktemp("images"), train=20, val=7)


@pytest.fixture(scope="module")
def alone(folder, tmp_path_factory):
    """The points of the run in one process."""
    output = tmp_path_factory.mktemp("alone")
    words = command(folder, "-a", f"{FILE}:plain", *WORDS, "-o", output)
    subprocess.run(words, env=environment(), check=True, capture_output=True)
    return load_checkpoint(output / "checkpoint.pt")["points"]


def installed_script(folder):
    """What pip makes of the entry point in pyproject.toml."""
    script = folder / "nhwc"
    script.write_text(
        f"#!{sys.executable}\nimport sys\nfrom nhwc.cli import main\nsys.exit(main())\n"
    )
    return [script]


@pytest.mark.parametrize("start", [lambda folder: ["-m", "nhwc"], installed_script])
def test_two_processes_lose_what_one_loses(folder, alone, tmp_path, start):
    output = tmp_path / "out"
    done = torchrun(*start(tmp_path), "train", folder, "-a", f"{FILE}:plain", *WORDS, "-o", output)
    assert done.returncode == 0, done.stderr
    assert "Grad strides" not in done.stderr
    assert "on 2 processes" in done.stderr
    # Both processes run; one speaks.
    assert len(re.findall(r"^Epoch: \[0\]\[5/5\]", done.stdout, re.MULTILINE)) == 1
    points = load_checkpoint(output / "checkpoint.pt")["points"]
    assert len(points) == len(alone) == 4
    for expected, found in zip(alone, points, strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        assert found["mean_loss"] == pytest.approx(expected["mean_loss"], rel=1e-4)
        assert found["mean_prec1"] == pytest.approx(expected["mean_prec1"])


def test_a_lost_process_ends_the_run_with_its_reason(tmp_path):
    done = torchrun(
        "-m", "nhwc", "train", "--synthetic", "-a", f"{FILE}:dies", "-b", 4, "--size", 16,
        "--workers", 0, "--max-batches", 20, "--classes", 10, "-o", tmp_path, "--lr", 0.01,
    )  # fmt: skip
    assert done.returncode != 0
    assert "error: process 0 of 2 lost another one and stops" in done.stderr
    assert "Traceback" not in done.stderr.partition("error: process 0")[0]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["no/such/folder"], "no/such/folder"),
        (["--synthetic", "--momentum", "-3"], "momentum"),
        (["--synthetic", "-a", f"{FILE}:unlucky", "--size", 16], "no luck here"),
        (
            ["--synthetic", "-a", f"{FILE}:synchronized", "--size", 16],
            "1 is a SyncBatchNorm, which torch has for several processes on GPUs alone. Train in",
        ),
        (
            ["--synthetic", "-a", f"{FILE}:idle", "--size", 16, "--max-batches", 1],
            "2.spare.weight, 2.spare.bias got no gradient",
        ),
    ],
)
def test_an_error_is_said_once_by_whoever_has_it(words, says):
    done = torchrun("-m", "nhwc", "train", *words, "-b", 4, "--classes", 10, "--workers", 0)
    assert done.returncode != 0
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len([line for line in errors if says in line]) == 1, done.stderr


@pytest.mark.parametrize(("error", "said"), [(InputError, ""), (ProcessLost, "error: gone\n")])
def test_only_what_others_may_say_waits_for_them(error, said, monkeypatch, capsys):
    def ends(_):
        raise error("gone")

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(distributed, "said_by_first", lambda line, wait: wait)
    monkeypatch.setattr("nhwc.cli.train.run", ends)
    assert main(["train", "--synthetic"]) == 2
    assert capsys.readouterr().err == said


def test_torchrun_restarts_from_the_checkpoint(tmp_path):
    words = ["--synthetic", "-b", 4, "--size", 16, "--workers", 0, "--max-batches", 20]
    words += ["--classes", 10, "--lr", 0.01, "--checkpoint-every", 1]
    done = torchrun(
        "-m", "nhwc", "train", "-a", f"{FILE}:dies", *words, "-o", tmp_path / "torn", restarts=1
    )
    assert done.returncode == 0, done.stderr
    torn = load_checkpoint(tmp_path / "torn" / "checkpoint.pt")
    subprocess.run(
        command("-a", f"{FILE}:dies", *words, "-o", tmp_path / "whole"),
        env=environment(), check=True, capture_output=True,
    )  # fmt: skip
    whole = load_checkpoint(tmp_path / "whole" / "checkpoint.pt")
    assert torn["epoch"] == whole["epoch"] == 1
    for a, b in zip(torn["points"], whole["points"], strict=True):
        assert (a["batch"], a["loss"]) == (b["batch"], pytest.approx(b["loss"], rel=1e-4))


def test_no_thread_outlives_the_group():
    done = torchrun(HERE / "group_ends.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("during: gloo") == 2
    assert done.stdout.count("after: none") == 2


def test_torchrun_told_to_end_leaves_a_checkpoint(tmp_path):
    words = ["-a", f"{FILE}:plain", "--synthetic", "-b", 4, "--size", 16, "--workers", 0]
    words += ["--max-batches", 100_000, "--classes", 10, "--lr", 0.001, "-o", tmp_path]
    process = subprocess.Popen(
        launched("-m", "nhwc", "train", *words),
        env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    process.stdout.readline()
    process.terminate()
    _, said = process.communicate()
    batch = load_checkpoint(tmp_path / "checkpoint.pt")["batch"]
    assert f"stopped in epoch 0 after batch {batch}" in said
    assert batch >= 10


def test_fsdp_keeps_the_values_of_channels_last_weights_in_all_processes(tmp_path):
    done = torchrun(HERE / "fsdp_steps.py", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    results = [torch.load(tmp_path / f"out.{rank}", weights_only=True) for rank in (0, 1)]
    for result in results:
        assert max(result["errors"]) < 1e-5
        assert result["kept"]
    # Each process holds a part only, and together they hold all.
    sizes = [a + b for a, b in zip(results[0]["local"], results[1]["local"], strict=True)]
    assert sizes == [parameter.shape[0] for parameter in plain().parameters()]


def test_only_errors_about_peers_are_put_down_to_them(monkeypatch):
    monkeypatch.setattr(distributed, "rank_and_world", lambda: (1, 4))
    with pytest.raises(ProcessLost, match="process 1 of 4"), distributed.lost_processes_named():
        raise RuntimeError("[gloo/pair.cc:537] Connection closed by peer")
    with pytest.raises(RuntimeError, match=r"^mat1"), distributed.lost_processes_named():
        raise RuntimeError("mat1 and mat2 cannot be multiplied")
