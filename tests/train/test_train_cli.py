"""The command: what it prints where, what it writes, and how it refuses."""

import json
import os
import re
import shlex
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch

from nhwc._train import load_checkpoint
from nhwc.cli import main

from .training_nets import FILE, command, environment, image_set

NET = f"{FILE}:plain"
QUICK = ["-a", NET, "-b", "6", "--size", "12", "--workers", "0", "--lr", "0.01"]
LINE = re.compile(
    r"Epoch: \[\d+\]\[\d+/\d+\] Time \d+\.\d{3} \(\d+\.\d{3}\) Speed \d+\.\d \(\d+\.\d\) "
    r"Loss \d+\.\d\d \(\d+\.\d\d\) Prec@1 \d+\.\d \(\d+\.\d\) Prec@5 \d+\.\d \(\d+\.\d\)"
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return image_set(tmp_path / "images")


def run(*words):
    return main(["train", *map(str, words)])


def test_synthetic_batches_print_the_line_and_write_nothing(folder, capsys):
    words = [*QUICK, "--classes", 10, "--max-batches", 12, "--amp", "--channels-last"]
    assert run("--synthetic", *words) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert len(lines) == 2
    assert all(LINE.fullmatch(line) for line in lines)
    assert lines[0].startswith("Epoch: [0][10/12] ")
    assert "channels last, bfloat16, batch 6; " in err
    assert [path.name for path in folder.parent.iterdir()] == ["images"]


def test_classes_that_a_callable_does_not_take_are_refused(folder, capsys):
    assert run(folder, *QUICK, "--classes", 5) == 2
    assert f"{NET} takes no num_classes" in capsys.readouterr().err


def test_workers_leave_nothing_behind():
    words = [*QUICK, "--synthetic", "--classes", 10, "--max-batches", 2, "--workers", 1]
    # Workers name sockets in it, whose names may have 107 letters.
    with tempfile.TemporaryDirectory() as temporary:
        settings = environment(TMPDIR=temporary)
        subprocess.run(command(*words), env=settings, check=True, capture_output=True)
        assert list(Path(temporary).glob("pymp-*")) == []


# The words of the channels-last tutorial, which are those of apex's main_amp.py: DIR last.
PUBLISHED = ["--b", "6", "--workers", "0", "--opt-level", "O2", "--channels-last", "true"]


@pytest.mark.parametrize(
    ("words", "layout"),
    [
        (PUBLISHED, "channels last, bfloat16"),
        (PUBLISHED[:-1], "channels last, bfloat16"),
        ([*PUBLISHED[:-1], "False"], "contiguous, bfloat16"),
        ([*PUBLISHED[:5], "O0"], "contiguous, float32"),
        ([*PUBLISHED[:5], "O1"], "contiguous, bfloat16"),
    ],
)
def test_the_published_command_is_understood(words, layout, folder, capsys):
    tiny = ["-a", NET, "--size", "12", "--lr", "0.01", "--max-batches", "1", "--epochs", "1"]
    assert run(*tiny, "-o", "out", *words, folder) == 0
    err = capsys.readouterr().err
    assert f"{layout}, batch 6; " in err
    level = words[5]
    assert f"note: --opt-level {level} of apex means " in err
    assert ("means --amp: " in err) is (level != "O0")


def test_a_folder_of_images_trains_evaluates_and_saves(folder, capsys):
    assert run(folder, *QUICK, "--epochs", 2, "--plot", "run.svg") == 0
    out, err = capsys.readouterr()
    kinds = [line.split()[0] for line in out.splitlines()]
    assert kinds == ["Epoch:", "Test:", "Epoch:", "Test:"]
    output = next(folder.parent.glob("train-*"))
    assert {path.name for path in output.iterdir()} >= {"checkpoint.pt", "metrics.csv"}
    assert load_checkpoint(output / "checkpoint.pt")["classes"] == ["blue", "green", "red"]
    assert (folder.parent / "run.svg").read_text().startswith("<?xml")
    assert "wrote run.svg" in err

    assert run(folder, *QUICK, "--evaluate", "--resume", output / "checkpoint.pt") == 0
    evaluated = capsys.readouterr().out.split()
    trained = out.splitlines()[-1].split()
    assert evaluated[6:] == trained[6:]  # From the loss on: the rest is time.


def test_evaluation_writes_nothing_and_needs_no_folder_to_write_to(folder, monkeypatch, capsys):
    assert run(folder, *QUICK, "--epochs", 1, "-o", "out") == 0
    monkeypatch.setattr("nhwc.cli.outputs.os.access", lambda *args: False)
    assert run(folder, *QUICK, "--evaluate", "--resume", "out/checkpoint.pt") == 0
    assert run(folder, *QUICK, "--epochs", 2, "--resume", "out/checkpoint.pt") == 2
    assert "out may not be written to" in capsys.readouterr().err


def test_an_earlier_run_is_not_overwritten(folder, capsys):
    assert run(folder, *QUICK, "--epochs", 1, "-o", "out") == 0
    before = (folder.parent / "out" / "checkpoint.pt").read_bytes()
    assert run(folder, *QUICK, "--epochs", 1, "-o", "out") == 2
    assert "Go on from it with --resume out/checkpoint.pt" in capsys.readouterr().err
    assert (folder.parent / "out" / "checkpoint.pt").read_bytes() == before
    assert run(folder, *QUICK, "--epochs", 2, "--resume", "out/checkpoint.pt") == 0
    assert load_checkpoint("out/checkpoint.pt")["epoch"] == 2
    for epochs in (1, 2):
        again = ["--epochs", epochs, "--resume", "out/checkpoint.pt", "-o", "nowhere"]
        assert run(folder, *QUICK, *again) == 0
        done = f"has 2 epochs, and {epochs} are asked for: there is nothing to train"
        assert done in capsys.readouterr().err
    assert not (folder.parent / "nowhere").exists()
    table = (folder.parent / "out" / "metrics.csv").read_text().splitlines()
    assert [row.split(",")[:2] for row in table[1:]] == [
        ["train", "0"], ["val", "0"], ["train", "1"], ["val", "1"]
    ]  # fmt: skip


def test_json_is_the_result_alone(folder, capsys):
    assert run("--synthetic", *QUICK, "--classes", 10, "--max-batches", 2, "--format", "json") == 0
    content = json.loads(capsys.readouterr().out)
    assert content["schema"] == 1
    assert content["points"][0]["batch"] == 2


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_the_result_is_there_if_the_picture_cannot_be_written(folder, capsys):
    (folder.parent / "run.svg").symlink_to("/dev/full")
    words = ["--classes", 10, "--max-batches", 2, "--format", "json", "--plot", "run.svg"]
    assert run("--synthetic", *QUICK, *words) == 2
    out, err = capsys.readouterr()
    assert json.loads(out)["points"]
    assert "cannot write run.svg: No space left on device" in err


def test_a_model_is_trained_though_the_reader_of_its_log_has_gone(folder):
    words = ["--synthetic", *QUICK, "--classes", "10", "--max-batches", "22", "-o", "out"]
    line = shlex.join(command(*words))
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"{line} | true"],
        capture_output=True, text=True, env=environment(), check=True,
    )  # fmt: skip
    assert "wrote out/checkpoint.pt" in done.stderr
    assert load_checkpoint("out/checkpoint.pt")["epoch"] == 1


def test_the_head_follows_the_classes(folder):
    # 36 training images; SqueezeNet's head is a convolution, its name says nothing.
    words = ["-a", "squeezenet1_1", "-b", 4, "--size", 32, "--workers", 0, "--lr", 0.001]
    assert run(folder, *words, "--epochs", 1, "--max-batches", 1, "-o", "out") == 0
    state = load_checkpoint("out/checkpoint.pt")["state_dict"]
    assert state["classifier.1.weight"].shape[0] == 3


def test_volumes(folder, capsys):
    words = ["-a", f"{FILE}:volume", "-b", 2, "--size", "4x8x8", "--workers", 0, "--lr", 0.01]
    assert run("--synthetic", *words, "--classes", 10, "--max-batches", 2, "--channels-last") == 0
    assert LINE.fullmatch(capsys.readouterr().out.strip())


def test_skipped_images_are_named_once(folder, capsys):
    (folder / "train" / "red" / "0.png").write_bytes(b"")
    assert run(folder, *QUICK, "--epochs", 3, "--skip-corrupt", "-o", "out") == 0
    err = capsys.readouterr().err
    assert err.count("red/0.png is not a readable image") == 1


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such names")
@pytest.mark.parametrize("words", [["--skip-corrupt"], []])
def test_a_name_with_an_end_of_line_stays_in_one(folder, capsys, words):
    (folder / "train" / "red" / "new\nline.png").write_bytes(b"")
    # All 37 images in one batch.
    run(folder, *QUICK, "-b", 37, "--epochs", 1, "-o", "out", *words)
    err = capsys.readouterr().err
    assert "red/new\\nline.png is not a readable image" in err


def test_a_corrupt_image_ends_the_command(folder, capsys):
    (folder / "train" / "red" / "0.png").write_bytes(b"")
    assert run(folder, *QUICK, "-o", "out") == 2
    err = capsys.readouterr().err.splitlines()[-1]
    assert err.startswith("error: ")
    assert "red/0.png is not a readable image" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give either DATA"),
        (["images", "--synthetic"], "give either DATA"),
        (["nowhere"], "no such folder: nowhere"),
        ([__file__], "test_train_cli.py is no folder. It should hold train/ and val/"),
        (
            ["images", "-a", f"{FILE}:lazy"],
            "0.weight, 0.bias and 2 more of Sequential has no shape",
        ),
        (["images/train"], "Pass images: train/ and val/"),
        (["images", "-b", "999"], "has 36 images, less than one batch of 999"),
        (["images", "--size", "tiny"], "size 'tiny' is no size"),
        (["images", "--size", "8x8x8"], "DATA holds images"),
        (["images", "--device", "gpu"], "device 'gpu' is not usable"),
        (["images", "--amp", "--amp-dtype", "float16", "--device", "cpu"], "Use bfloat16"),
        (["images", "--lr", "-1"], "lr -1.0 is too small"),
        (["images", "--epochs", "0"], "--epochs: 0 is too small"),
        (["images", "--resume", "gone.pt"], "cannot read checkpoint gone.pt: No such file"),
        (["images", "--evaluate", "--resume", "gone.pt"], "cannot read checkpoint gone.pt"),
        (["images", "--resume", __file__, "-o", "."], "test_train_cli.py is no checkpoint"),
        (["images", "--evaluate"], "give --resume or --weights"),
        (["images", "--plot", "run.jpeg"], "Use .svg or .png"),
        (["images", "--checkpoint-every", "0"], "--checkpoint-every: 0 is too small"),
        (["images", "--workers", "-1"], "--workers: -1 is too small"),
        (["images", "--max-batches", "0"], "--max-batches: 0 is too small"),
        (["images", "--channels-last", "maybe"], "--channels-last 'maybe' is neither true nor"),
        (["images", "--opt-level", "O3"], "invalid choice: 'O3'"),
        (["images", "--opt-level", "O0", "--amp"], "--opt-level O0 is float32, and --amp is not"),
        (
            ["images", "--optimizer", "adamw", "--momentum", "0.5"],
            "--momentum is of sgd; adamw has",
        ),
        (["images", "--amp-dtype", "bfloat16"], "--amp-dtype bfloat16 is the type of --amp. Add"),
        (["images", "--evaluate", "--plot", "run.svg"], "--plot does not go with --evaluate"),
        (["images", "--evaluate", "--resume", "a.pt", "--weights", "b.pt"], "Leave one of them"),
        (["images", "--resume", "a.pt", "--weights", "b.pt"], "would replace those of --weights"),
        (["--synthetic", "--checkpoint-every", "5"], "needs a folder beside --synthetic. Add -o"),
    ],
)
def test_what_cannot_work_is_one_line_and_status_2(folder, capsys, words, said):
    assert run("-a", NET, *([] if "-b" in words else ["-b", "6"]), *words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err.splitlines()[-1]
    assert err.splitlines()[-1].startswith("error: ")
    assert "million parameters" not in err
    assert [path.name for path in folder.parent.iterdir()] == ["images"]


def test_python_m_nhwc_is_nhwc(folder):
    done = subprocess.run(
        command("--synthetic", *QUICK, "--classes", 10, "--max-batches", 1),
        env=environment(), check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert LINE.fullmatch(done.stdout.strip())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_resnet50_on_a_gpu(folder, capsys):
    words = ["-a", "resnet50", "-b", 16, "--max-batches", 10, "--amp", "--channels-last"]
    assert run("--synthetic", *words, "--lr", 0.001) == 0
    out, err = capsys.readouterr()
    assert "float16" in err
    assert LINE.fullmatch(out.strip())
