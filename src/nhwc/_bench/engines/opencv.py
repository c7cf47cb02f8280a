"""OpenCV's DNN module, version 5: its new engine, which runs on the CPU and fuses attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ._onnx import export_onnx, input_names
from .engine import Engine, Prepared


def convert(model: nn.Module, inputs: tuple[Tensor, ...], folder: Path) -> None:
    export_onnx(model, inputs, folder, one_file=True)


def prepare(folder: Path, inputs: tuple[Tensor, ...]) -> Prepared:
    import cv2

    cv2.setNumThreads(torch.get_num_threads())
    # Unless the engine is named, OpenCV silently falls back to the classic one on failure.
    net = cv2.dnn.readNetFromONNX(str(folder / "model.onnx"), cv2.dnn.ENGINE_NEW)
    outputs = net.getUnconnectedOutLayersNames()
    arrays = [(x.numpy(), name) for x, name in zip(inputs, input_names(inputs), strict=True)]

    def run() -> Any:
        for array, name in arrays:
            net.setInput(array, name)
        return net.forward(outputs)

    return run, ()


ENGINE = Engine(
    "opencv",
    "OpenCV DNN",
    prepare,
    convert,
    cuda=False,
    packages=("cv2", "onnx", "onnxscript"),
    requirements=("opencv-python-headless>=5", "onnx", "onnxscript"),
    typical_setup_s=5.0,
)
