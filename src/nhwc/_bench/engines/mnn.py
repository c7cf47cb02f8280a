"""MNN: converted from ONNX for speed, in high precision, which is float32 throughout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ._onnx import export_onnx, input_names
from .engine import Engine, Prepared


def convert(model: nn.Module, inputs: tuple[Tensor, ...], folder: Path) -> None:
    import MNN  # noqa: F401 - the converter's library is found through it

    # MNN.tools is avoided: it installs a logger with pip and reports each conversion to its makers.
    from _tools import mnnconvert

    # Opset 20 has an operator for GELU, which MNN computes by its approximation.
    source, target = folder / "model.onnx", folder / "model.mnn"
    export_onnx(model, inputs, folder, one_file=True, opset=18)
    names = {"-f": "ONNX", "--modelFile": source, "--MNNModel": target, "--bizCode": "nhwc"}
    words = [str(word) for pair in names.items() for word in pair]
    mnnconvert(["mnnconvert", *words, "--optimizePrefer", "2"])
    if not target.exists():
        raise RuntimeError("MNN's converter made no model of it")


def prepare(folder: Path, inputs: tuple[Tensor, ...]) -> Prepared:
    from MNN import expr
    from MNN import nn as mnn

    threads = torch.get_num_threads()
    config = {"backend": "CPU", "precision": "high", "numThread": threads}
    # MNN's documentation: `rearrange` packs the weights while loading, and shapes declared
    # immutable spare each call the work of planning for them again.
    module = mnn.load_module_from_file(
        str(folder / "model.mnn"),
        input_names(inputs),
        [],
        runtime_manager=mnn.create_runtime_manager((config,)),
        shape_mutable=False,
        rearrange=True,
    )
    given = [expr.const(x.numpy(), list(x.shape), expr.data_format.NCHW) for x in inputs]

    def run() -> list[Any]:
        return [output.read() for output in module.forward(given)]

    return run, ()


ENGINE = Engine(
    "mnn",
    "MNN",
    prepare,
    convert,
    cuda=False,
    packages=("MNN", "onnx", "onnxscript"),
    requirements=("mnn", "onnx", "onnxscript"),
    typical_setup_s=5.0,
)
