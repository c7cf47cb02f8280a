"""Train a small net on handwritten digits in NCHW and in NHWC, in turns, and say which was faster.

    python benchmarks/train_digits.py [-o benchmarks/results/train_digits.json]

The digits are scikit-learn's (1797 images of 8x8 pixels, part of that package), written as an image
folder. Both nets start from the same weights and see the same batches; every batch is loaded,
normalised and learnt first by one, then by the other, so that what disturbs one disturbs both.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import nn

from nhwc import Environment
from nhwc._train import Data, ImageFolder, Loader, Recipe, Trainer
from nhwc.machine.timing import Comparison, Samples

EPOCHS, BATCH, SIZE, GOAL = 6, 64, 32, 97.0
WARMUP = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_digits(Path(folder))
        result = compare(Path(folder))
    show(result)
    if args.output:
        args.output.write_text(json.dumps(result, indent=1) + "\n")


def write_digits(root: Path) -> None:
    """An image folder with every fifth digit held out."""
    digits = load_digits()
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        folder = root / ("val" if number % 5 == 0 else "train") / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        # The pixels count from 0 to 16.
        image = Image.fromarray((pixels * 255 / 16).astype(np.uint8))
        image.save(folder / f"{number}.png")


def convnet() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for wide, narrow, stride in ((3, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1)):
        layers += [
            nn.Conv2d(wide, narrow, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(narrow),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


def trainer(root: Path, *, channels_last: bool) -> Trainer:
    # Digits must not be mirrored, so nothing is augmented.
    train = ImageFolder.find(root / "train", size=SIZE)
    val = ImageFolder.find(root / "val", size=SIZE, classes=train.classes)
    data = Data(Loader(train, BATCH), Loader(val, BATCH, train=False), train.classes)
    recipe = Recipe(epochs=EPOCHS, lr=0.05, warmup_epochs=1, channels_last=channels_last)
    return Trainer(convnet(), data, recipe, torch.device("cpu"))


def compare(root: Path) -> dict[str, object]:
    runs = {name: trainer(root, channels_last=name == "NHWC") for name in ("NCHW", "NHWC")}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(EPOCHS):
        epochs = {name: run.batches(lambda point: None) for name, run in runs.items()}
        for turn in range(len(runs["NCHW"].data.train)):
            for name in list(runs)[:: 1 if turn % 2 else -1]:
                start = time.perf_counter()
                next(epochs[name])
                seconds[name].append(time.perf_counter() - start)
        for run in runs.values():
            run.finish_epoch(lambda point: None)
    accuracy = {
        name: [point.mean_prec1 for point in run.points if point.phase == "val"]
        for name, run in runs.items()
    }
    taken = {name: Samples(tuple(values[WARMUP:])) for name, values in seconds.items()}
    comparison = Comparison(taken["NCHW"], taken["NHWC"])
    return {
        "schema": 1,
        "environment": Environment.here().to_dict(),
        "images_per_s": {name: BATCH / samples.median_s for name, samples in taken.items()},
        "ratio": comparison.ratio,
        "interval": comparison.interval,
        "verdict": comparison.verdict,
        "accuracy_after_epoch": accuracy,
        "goal": GOAL,
        "goal_reached": {name: max(values) >= GOAL for name, values in accuracy.items()},
        "batch_seconds": {name: samples.seconds for name, samples in taken.items()},
    }


def show(result: dict) -> None:
    print(f"{'':6}{'images/s':>10}  right on held-out digits after each epoch, %")
    for name, speed in result["images_per_s"].items():
        steps = " ".join(f"{value:5.1f}" for value in result["accuracy_after_epoch"][name])
        print(f"{name:6}{speed:10.0f}  {steps}")
    low, high = result["interval"]
    print(f"NHWC is {result['ratio']:.2f}x as fast ({low:.2f} to {high:.2f}): {result['verdict']}")


if __name__ == "__main__":
    main()
