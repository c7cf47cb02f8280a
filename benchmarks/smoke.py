"""Does the installed nhwc work here? The verbs, forty models, files of other versions.

    python -m benchmarks.smoke -o result.json --files FOLDER

`benchmarks.matrix` runs it in one environment after the other, each with another Python or torch.
Models are small images of many families: the question is whether they work, not how fast. Each
environment leaves a few saved models in FOLDER with what they answer, and loads those that the
others left.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import nhwc

MODELS = (
    *("alexnet", "densenet121", "efficientnet_b0", "efficientnet_v2_s", "googlenet"),
    *("inception_v3", "mnasnet0_5", "mobilenet_v2", "mobilenet_v3_small", "regnet_x_400mf"),
    *("regnet_y_400mf", "resnet18", "resnet50", "resnext50_32x4d", "shufflenet_v2_x0_5"),
    *("shufflenet_v2_x1_0", "squeezenet1_1", "vgg11_bn", "convnext_tiny", "wide_resnet50_2"),
    *("torchvision:deeplabv3_mobilenet_v3_large", "torchvision:lraspp_mobilenet_v3_large"),
    *("timm:cspresnet50", "timm:darknet53", "timm:dla34", "timm:edgenext_xx_small"),
    *("timm:fbnetc_100", "timm:ghostnet_100", "timm:hardcorenas_a", "timm:hrnet_w18_small"),
    *("timm:lcnet_050", "timm:mixnet_s", "timm:mobileone_s0", "timm:repvgg_a0"),
    *("timm:res2net50_14w_8s", "timm:resnest14d", "timm:selecsls42b", "timm:skresnet18"),
    *("timm:spnasnet_100", "timm:tinynet_e"),
)
"""Families that differ in what their layers do: groups, shuffles, cats, squeezes, resizes."""

_SIZES = {"inception_v3": 96, "googlenet": 64, "timm:edgenext_xx_small": 64}
_SIDE = 64

PACKAGES = ("torch", "numpy", "numba", "llvmlite", "torchvision", "timm")

RIGHT = "right"
"""The outcome of all that went as it should; anything else says what went wrong."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, required=True, help="write JSON here")
    parser.add_argument("--files", type=Path, required=True, help="saved models of all versions")
    parser.add_argument("--models", type=int, default=len(MODELS), help="only the first of them")
    parser.add_argument(
        "--only-files", action="store_true", help="keep what OUTPUT says of the rest"
    )
    args = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    args.files.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        saving = RIGHT if args.only_files else _said("saving", partial(save_files, args.files))
        asked = questions(args.files, MODELS[: args.models])
        if args.only_files:
            found: dict[str, Any] = json.loads(args.output.read_text())
            asked = {"files": asked["files"]}
        else:
            found = {"python": platform.python_version(), "packages": packages()}
            found |= {kind: {} for kind in asked}
        if saving != RIGHT:
            found["files"]["saving"] = saving
        for kind, calls in asked.items():
            for name, call in calls.items():
                found[kind][name] = _said(name, call)
                # A run that is cut short leaves what it found.
                args.output.write_text(json.dumps(found, indent=1) + "\n")
    every = [outcome for kind in asked for outcome in found[kind].values()]
    return 0 if all(outcome == RIGHT for outcome in every) else 1


def questions(files: Path, models: Sequence[str]) -> dict[str, dict[str, Callable[[], None]]]:
    """All that is asked, by kind and name; the quick ones first."""
    return {
        "verbs": VERBS,
        "files": {path.stem: partial(file_is_right, path) for path in sorted(files.glob("*.nhwc"))},
        "models": {name: partial(model_is_right, name) for name in models},
    }


def packages() -> dict[str, str]:
    """The version of each package that matters, where it is installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _said(name: str, call: Callable[[], None]) -> str:
    """Call, and say what went wrong if anything did."""
    print(name, file=sys.stderr, flush=True)
    try:
        call()
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        print(f"  {said}", file=sys.stderr, flush=True)
        return said
    return RIGHT


# The verbs, as they are typed.


def _command(*words: str, writes: str = "") -> None:
    """Run `nhwc` with these words in a new folder; `writes` is a file that must be there then."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", "nhwc", *words],
            cwd=folder, env=os.environ | {"NO_COLOR": "1"}, capture_output=True, text=True,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"exit {done.returncode}: {done.stderr.strip()[-250:]}")
        if writes and not (Path(folder) / writes).stat().st_size:
            raise RuntimeError(f"{writes} is empty")


def _compiled() -> None:
    """The backend of torch.compile, found by its name."""
    torch.manual_seed(0)
    net, x = small_models()["tower"]
    torch.testing.assert_close(torch.compile(net, backend="nhwc")(x), net(x), rtol=1e-3, atol=1e-4)


def _exported() -> None:
    """A program of torch.export's, optimized."""
    net, x = small_models()["tower"]
    fast = nhwc.optimize(torch.export.export(net, (x,)), x)
    torch.testing.assert_close(fast(x), net(x), rtol=1e-3, atol=1e-4)


_IMAGE = ("--input", "1x3x64x64")

VERBS: dict[str, Callable[[], None]] = {
    "audit": lambda: _command(
        "audit", "shufflenet_v2_x0_5", *_IMAGE, "-o", "a.html", writes="a.html"
    ),
    "optimize": lambda: _command("optimize", "resnet18", *_IMAGE, "-o", "m.nhwc", writes="m.nhwc"),
    "bench": lambda: _command(
        *("bench", "squeezenet1_1", *_IMAGE, "--variants", "eager,channels_last,optimized"),
        *("--seconds", "0.1", "-o", "b.json"),
        writes="b.json",
    ),
    "ops": lambda: _command(
        *("ops", "instance_norm", "max_pool2d", "--no-timing", "--dtype", "float32"),
        *("-o", "o.json"),
        writes="o.json",
    ),
    "ops --rules": lambda: _command("ops", "--rules", "-o", "r.html", writes="r.html"),
    "train": lambda: _command(
        *("train", "--synthetic", "-a", "mobilenet_v2", "-b", "4", "--max-batches", "2"),
        *("--workers", "0", "--epochs", "1", "--channels-last"),
    ),
    "torch.compile": _compiled,
    "torch.export": _exported,
}


# Forty models.


def model_is_right(name: str) -> None:
    """Optimize a model, and hold its answer against its own."""
    model = nhwc.load_model(name)
    side = _SIZES.get(name, _SIDE)
    x = torch.randn(1, 3, side, side, generator=torch.Generator().manual_seed(1))
    fast = nhwc.optimize(model, x)
    torch.testing.assert_close(fast(x), model(x), rtol=1e-2, atol=1e-3)


# Files of other versions.


class Mixed(nn.Module):
    """Steps of all kinds that a file can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.scale = nn.Parameter(torch.ones(8, 1, 1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = F.silu(self.norm(self.conv(x)) * self.scale) + 2.0
        y = F.interpolate(y, scale_factor=2.0, mode="nearest")[:, :, 1:, ...]
        return {"flat": torch.flatten(y, start_dim=1).sum(1), "rest": y.mean(dim=(2, 3))}


def small_models() -> dict[str, tuple[nn.Module, Tensor]]:
    """A few networks, the same in every version, each with an image."""
    torch.manual_seed(0)
    tower = nn.Sequential(
        *(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Conv2d(16, 16, 3, groups=16, padding=1), nn.BatchNorm2d(16), nn.Hardswish()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4)),
    )
    # None of these can be folded: a file has them as layers, with the arguments of this torch.
    norms = nn.Sequential(
        *(nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.PReLU(8)),
        *(nn.InstanceNorm2d(8, affine=True), nn.ReLU(), nn.BatchNorm2d(8), nn.Sigmoid()),
        *(nn.Flatten(2), nn.LayerNorm(196), nn.GRU(196, 4, batch_first=True)),
    )
    x = torch.randn(1, 3, 16, 16)
    models = {"tower": tower, "mixed": Mixed(), "norms": norms}
    models["mnasnet0_5"] = nhwc.load_model("mnasnet0_5")
    images = {"mnasnet0_5": torch.randn(1, 3, 64, 64)}
    return {name: (model.eval(), images.get(name, x)) for name, model in models.items()}


def save_files(folder: Path) -> None:
    """Leave each of the small models in `folder`, with an image and the answer to it."""
    for name, (model, x) in small_models().items():
        stem = f"{name}-torch-{torch.__version__.partition('+')[0]}-py{platform.python_version()}"
        nhwc.save(nhwc.optimize(model, x), folder / f"{stem}.nhwc")
        torch.save({"x": x, "answer": model(x)}, folder / f"{stem}.pt")


def file_is_right(path: Path) -> None:
    """Load a file, and hold what it answers against what was answered where it was saved."""
    known = torch.load(path.with_suffix(".pt"), weights_only=True)
    answer = nhwc.load(path)(known["x"])
    torch.testing.assert_close(answer, known["answer"], rtol=1e-2, atol=1e-3)


if __name__ == "__main__":
    sys.exit(main())
