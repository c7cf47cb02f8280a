"""A model as an ONNX file, for the engines that read one."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn


def export_onnx(
    model: nn.Module,
    inputs: tuple[Tensor, ...],
    folder: Path,
    *,
    one_file: bool = False,
    opset: int | None = None,
) -> Path:
    """Write `model.onnx` into `folder`; its inputs are called `input_0` and so on."""
    path = folder / "model.onnx"
    torch.onnx.export(
        model,
        inputs,
        path,
        input_names=input_names(inputs),
        opset_version=opset,
        dynamo=True,
        verbose=False,
        external_data=not one_file,
    )
    return path


def input_names(inputs: tuple[Tensor, ...]) -> list[str]:
    return [f"input_{index}" for index in range(len(inputs))]
