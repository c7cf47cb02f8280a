"""ONNX Runtime: the exported model, all graph optimizations, as many threads as torch has."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from .engine import Engine, Prepared


def prepare(model: nn.Module, inputs: tuple[Tensor, ...]) -> Prepared:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    wanted = "CUDAExecutionProvider" if inputs[0].is_cuda else "CPUExecutionProvider"
    if wanted not in onnxruntime.get_available_providers():
        raise RuntimeError("this onnxruntime has no CUDA: pip install onnxruntime-gpu")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        torch.onnx.export(model, inputs, path, dynamo=True, verbose=False)
        session = onnxruntime.InferenceSession(path, options, providers=[wanted])
    names = [node.name for node in session.get_inputs()]
    feed = {name: x.cpu().numpy() for name, x in zip(names, inputs, strict=True)}
    return lambda: session.run(None, feed), ()


ENGINE = Engine(
    "onnxruntime", "ONNX Runtime", prepare, packages=("onnxruntime", "onnx", "onnxscript")
)
