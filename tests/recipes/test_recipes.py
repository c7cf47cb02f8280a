"""The recipes with small networks: they run, and what they print says that all is well."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from nhwc.models.vision import mend_torchvision

RECIPES = Path(__file__).parents[2] / "recipes"

CASES = [
    ("classify", "timm", "loaded, it answers alike: True"),
    ("detect", "torchvision", "from its file, the boxes are the same: True"),
    ("diffusion", "diffusers", "U-Net: a graph of"),
    ("hugging_face", "transformers", "DetrObjectDetectionOutput with"),
    ("language", "transformers", "another, without a plan: the same features in the model: True"),
    ("segment", "segmentation_models_pytorch", "100.00% of the pixels have the same class"),
    ("video", "torchvision", "a clip, as it was decoded: CHANNELS_LAST_3D"),
    ("volumes", "monai", "from the file, window by window: same True"),
    ("yolo", "ultralytics", "in YOLO's own predict: 5 boxes, the same: True"),
]
"""Each recipe with the package that it needs, and a line that it must print."""


@pytest.mark.parametrize(("name", "package", "line"), CASES)
def test_recipe(name, package, line, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("YOLO_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("YOLO_OFFLINE", "true")
    monkeypatch.syspath_prepend(RECIPES)
    monkeypatch.chdir(tmp_path)
    mend_torchvision()
    pytest.importorskip(package)
    assert importlib.import_module(name).main(["--small"]) == 0
    assert line in capsys.readouterr().out


def test_web_service():
    """It forks, which a process must not that has run models on threads."""
    pytest.importorskip("onnxruntime")
    done = subprocess.run(
        [sys.executable, RECIPES / "web_service.py", "--small"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split()[:3] for line in done.stdout.splitlines() if line[-1:].isdigit()]
    engines = ("nhwc", "onnxruntime")
    assert rows == [[one, *how] for how in ("11", "12", "21") for one in engines]
    assert "all gave the same classes: True" in done.stdout


def test_every_recipe_is_tried_and_described():
    scripts = {file.stem for file in RECIPES.glob("*.py")} - {"telling"}
    assert scripts == {name for name, *_ in CASES} | {"web_service"}
    page = (RECIPES.parent / "docs" / "recipes.md").read_text()
    assert [name for name in sorted(scripts) if f"python recipes/{name}.py" not in page] == []
