"""OpenVINO: converted from the torch model, float32 throughout, tuned for latency."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .engine import Engine, Prepared


def prepare(model: nn.Module, inputs: tuple[Tensor, ...]) -> Prepared:
    import openvino

    core = openvino.Core()
    converted = openvino.convert_model(model, example_input=inputs)
    converted.reshape({i: list(x.shape) for i, x in enumerate(inputs)})
    compiled = core.compile_model(
        converted,
        "CPU",
        {
            "INFERENCE_PRECISION_HINT": "f32",
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        },
    )
    request = compiled.create_infer_request()
    arrays = [x.numpy() for x in inputs]

    def run() -> list[Any]:
        request.infer(arrays, share_inputs=True, share_outputs=True)
        return [request.get_output_tensor(i).data for i in range(len(compiled.outputs))]

    return run, ()


ENGINE = Engine(
    "openvino",
    "OpenVINO",
    prepare,
    cuda=False,
    packages=("openvino",),
    typical_setup_s=3.0,
)
