"""ONNX Runtime: the exported model, all graph optimizations, as many threads as torch has."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from ._onnx import export_onnx, input_names
from .engine import Engine, Prepared


def convert(model: nn.Module, inputs: tuple[Tensor, ...], folder: Path) -> None:
    export_onnx(model, inputs, folder)


def prepare(folder: Path, inputs: tuple[Tensor, ...]) -> Prepared:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    wanted = "CUDAExecutionProvider" if inputs[0].is_cuda else "CPUExecutionProvider"
    if wanted not in onnxruntime.get_available_providers():
        raise RuntimeError("this onnxruntime has no CUDA: pip install onnxruntime-gpu")
    path = folder / "model.onnx"
    session = onnxruntime.InferenceSession(path, options, providers=[wanted])
    feed = {name: x.cpu().numpy() for name, x in zip(input_names(inputs), inputs, strict=True)}
    return lambda: session.run(None, feed), ()


ENGINE = Engine(
    "onnxruntime",
    "ONNX Runtime",
    prepare,
    convert,
    packages=("onnxruntime", "onnx", "onnxscript"),
    typical_setup_s=4.0,
)
