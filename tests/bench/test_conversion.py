"""Engines that read files of their own: converted in another process, under a time limit."""

import os
import runpy
import textwrap
import time
from pathlib import Path

import pytest

import nhwc
from nhwc._bench import engines, paired
from nhwc._bench.engines import ENGINES, chosen, find_engine

MODULE = """
import os, signal, subprocess, sys, time
from pathlib import Path

import numpy, torch
from torch import nn

from nhwc._bench import engines
from nhwc._bench.engines import Engine

HERE = Path(__file__).parent

def net():
    return nn.Sequential(nn.Flatten(), nn.Linear(48, 4))

def convert(model, inputs, folder):
    numpy.savez(folder / "weights.npz", *[p.numpy() for p in model.parameters()])
    (folder / "maker").write_text(str(os.getpid()))
    Path("left behind").write_text("by a converter, where it stands")
    (HERE / "folder").write_text(str(folder))
    time.sleep(0.2)

def prepare(folder, inputs):
    assert (folder / "left behind").exists()
    assert (folder / "maker").read_text() != str(os.getpid())
    with numpy.load(folder / "weights.npz") as file:
        weight, bias = file["arr_0"], file["arr_1"]
    x = inputs[0].flatten(1).numpy()
    return lambda: x @ weight.T + bias, ()

def refuses(model, inputs, folder):
    raise ValueError("no such operator")

def dies(model, inputs, folder):
    os.kill(os.getpid(), signal.SIGKILL)

def hangs(model, inputs, folder):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (HERE / "child").write_text(str(child.pid))
    time.sleep(600)

def writes_nothing(model, inputs, folder):
    pass

kinds = (convert, refuses, dies, hangs, writes_nothing)
made = tuple(Engine(kind.__name__, kind.__name__, prepare, kind) for kind in kinds)
engines.ENGINES = (*engines.ENGINES, *made)
"""


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    """A model whose file brings engines along, into every process that builds it."""
    path = tmp_path / "nets.py"
    path.write_text(textwrap.dedent(MODULE))
    monkeypatch.setattr(engines, "ENGINES", ENGINES)
    runpy.run_path(str(path))
    return path


def lives(number):
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_conversion_that_fails_is_a_row_and_leaves_nothing(made_up, monkeypatch):
    monkeypatch.setattr(paired, "CONVERSION_S", 3.0)
    names = ("eager", "convert", "refuses", "dies", "hangs", "writes_nothing")
    result = nhwc.bench(
        f"{made_up}:net", shape=(2, 3, 4, 4), variants=names, threads=(1,), seconds=0.1
    )
    eager, converted, *failed = result.rows[0].measurements
    assert eager.turns
    assert converted.failure == ""
    assert converted.error < 1e-5
    assert converted.setup_s >= 0.2
    words = {m.variant: m.failure for m in failed}
    assert words["refuses"] == "conversion failed: ValueError: no such operator"
    assert words["dies"].startswith("conversion failed: the process died (SIGKILL)")
    assert words["hangs"].startswith("conversion failed: it took longer than 3 s")
    assert words["writes_nothing"].startswith("AssertionError")
    assert not Path((made_up.parent / "folder").read_text()).exists()
    child = int((made_up.parent / "child").read_text())
    deadline = time.monotonic() + 60
    while lives(child):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert os.getcwd() != str(made_up.parent)


def test_all_are_those_that_are_installed(monkeypatch):
    absent = engines.Engine("x", "X", print, packages=("no_such_package",))
    monkeypatch.setattr(engines, "ENGINES", (*ENGINES, absent))
    everything = chosen(["all"])
    assert "x" not in everything
    assert chosen(["x", "all", "eager"]) == ("x", *everything)
    assert chosen("all") == everything
    with pytest.raises(nhwc.InputError, match="no variant is called 'warp'"):
        chosen(["all", "warp"])
    with pytest.raises(nhwc.InputError, match=r"no variant is named\. There are: eager,"):
        chosen([])


def test_versions_are_of_the_package_whatever_it_is_called():
    """`PIL` comes from pillow, as `cv2` comes from one of four packages."""
    import PIL

    engine = engines.Engine("x", "X", print, packages=("PIL",), requirements=("pillow>=9",))
    assert engine.version == PIL.__version__
    assert engine.pip == "pip install 'pillow>=9'"
    assert engines.Engine("x", "X", print, packages=("no_such_package",)).version == ""


@pytest.mark.parametrize("name", ["ncnn", "mnn", "opencv", "executorch", "litert", "zentorch"])
def test_the_extra_of_an_engine_installs_what_its_pip_line_does(name):
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    engine = find_engine(name)
    assert project["optional-dependencies"][name] == list(engine.requirements or engine.packages)


@pytest.mark.parametrize("name", ["ncnn", "mnn", "opencv", "executorch", "litert", "zentorch"])
def test_engines_that_are_not_installed_say_so(name):
    engine = find_engine(name)
    if not engine.missing:
        pytest.skip(f"{name} is installed")
    obstacle = engine.obstacle(train=False, amp=False, device="cpu")
    assert obstacle == f"not installed: {engine.pip}"
