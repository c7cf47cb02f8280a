"""The table on disk, TensorBoard, the log line and the picture."""

import csv
import subprocess
import sys
import types
from dataclasses import replace

import pytest

from nhwc import Environment, InputError
from nhwc._train import MetricsLog, Point, Recipe, Training
from nhwc.render.train_plot import training_plot
from nhwc.render.train_text import log_line

from .training_nets import environment

POINT = Point(
    phase="train", epoch=0, batch=10, batches=125, step=10, time_s=0.1979, mean_time_s=0.3116,
    images_per_s=1010.52, mean_images_per_s=641.86, loss=1.712, mean_loss=0.958, prec1=51.0,
    mean_prec1=52.55, prec5=100.0, mean_prec5=100.0, lr=0.1,
)  # fmt: skip
VAL = replace(POINT, phase="val", batch=4, batches=4, step=125)


def test_the_log_line():
    assert log_line(POINT) == (
        "Epoch: [0][10/125] Time 0.198 (0.312) Speed 1010.5 (641.9) Loss 1.71 (0.96) "
        "Prec@1 51.0 (52.5) Prec@5 100.0 (100.0)"
    )
    assert log_line(VAL) == "Test: [0] Time 0.312 Speed 641.9 Loss 0.96 Prec@1 52.5 Prec@5 100.0"


@pytest.fixture
def board(monkeypatch):
    """A TensorBoard that notes what it is told."""
    told = []

    class SummaryWriter:
        def __init__(self, folder):
            told.append(("open", folder))

        def add_scalar(self, name, value, step):
            told.append((name, value, step))

        def close(self):
            told.append("close")

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    return told


@pytest.fixture
def no_board(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)


@pytest.mark.usefixtures("no_board")
def test_points_are_in_the_table_as_soon_as_they_are_known(tmp_path):
    file = tmp_path / "deep" / "metrics.csv"
    with MetricsLog(file.parent, earlier=[POINT]) as log:
        log.add(VAL)
        rows = list(csv.DictReader(file.read_text().splitlines()))
    assert [row["phase"] for row in rows] == ["train", "val"]
    assert Point(**{key: type(getattr(VAL, key))(value) for key, value in rows[1].items()}) == VAL


@pytest.mark.usefixtures("no_board")
def test_a_run_that_never_had_a_point_leaves_nothing(tmp_path):
    with MetricsLog(tmp_path / "out"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_is_told_where_it_is_installed(tmp_path, board):
    with MetricsLog(tmp_path) as log:
        log.add(POINT)
        log.add(VAL)
    assert board == [
        ("open", str(tmp_path)),
        ("train/loss", 1.712, 10),
        ("train/prec1", 51.0, 10),
        ("train/lr", 0.1, 10),
        ("train/images_per_s", 1010.52, 10),
        ("val/loss", 0.958, 125),
        ("val/prec1", 52.55, 125),
        "close",
    ]


@pytest.mark.usefixtures("no_board")
def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(InputError, match=r"cannot write to .*file"),
        MetricsLog(tmp_path / "file") as log,
    ):
        log.add(POINT)


@pytest.mark.parametrize(("format", "start"), [("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_the_picture_is_the_same_for_the_same_run(format, start):
    points = tuple(replace(POINT, epoch=e, batch=b) for e in range(2) for b in (10, 60, 125))
    run = Training(Recipe(amp=True), (*points, VAL), Environment.here())
    picture = training_plot(run, format)
    assert picture.startswith(start)
    if format == "svg":
        assert training_plot(run, format) == picture


def test_a_run_without_evaluation_has_a_picture_too():
    assert training_plot(Training(Recipe(), (POINT,), Environment.here()), "png")


def test_nothing_optional_is_imported_with_the_package():
    optional = ("PIL", "matplotlib", "torchvision", "tensorboard")
    code = f"import sys, nhwc._train; print([m for m in {optional} if m in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
