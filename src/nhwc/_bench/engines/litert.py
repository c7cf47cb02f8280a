"""LiteRT: converted by litert-torch, on XNNPACK, through the compiled model's interface."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .engine import Engine, Prepared

SIGNATURE = "serving_default"


def convert(model: nn.Module, inputs: tuple[Tensor, ...], folder: Path) -> None:
    import litert_torch

    # LiteRT's documentation advises NHWC inputs for images, so that nothing is transposed.
    images = [index for index, x in enumerate(inputs) if x.ndim == 4]
    given = litert_torch.to_channel_last_io(model, args=images) if images else model
    litert_torch.convert(given.eval(), _images_last(inputs)).export(str(folder / "model.tflite"))


def prepare(folder: Path, inputs: tuple[Tensor, ...]) -> Prepared:
    from ai_edge_litert.compiled_model import (
        CompiledModel,
        CpuOptions,
        HardwareAccelerator,
        Options,
    )

    # LiteRT's documentation prefers this interface to the interpreter's. Its default is one thread.
    options = Options(
        hardware_accelerators=HardwareAccelerator.CPU,
        cpu_options=CpuOptions(num_threads=torch.get_num_threads()),
    )
    model = CompiledModel.from_file(str(folder / "model.tflite"), options=options)
    names = model.get_signature_list()[SIGNATURE]
    details = model.get_output_tensor_details(SIGNATURE)
    given = {name: model.create_input_buffer_by_name(SIGNATURE, name) for name in names["inputs"]}
    made = {name: model.create_output_buffer_by_name(SIGNATURE, name) for name in names["outputs"]}
    arrays = [x.numpy() for x in _images_last(inputs)]
    shapes = {name: tuple(details[name]["shape"]) for name in made}

    def run() -> list[Any]:
        for buffer, array in zip(given.values(), arrays, strict=True):
            buffer.write(array)
        model.run_by_name(SIGNATURE, given, made)
        return [_read(made[name], shape) for name, shape in shapes.items()]

    return run, ()


def _read(buffer: Any, shape: tuple[int, ...]) -> Any:
    import numpy

    return buffer.read(int(numpy.prod(shape)), numpy.float32).reshape(shape)


def _images_last(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.permute(0, 2, 3, 1).contiguous() if x.ndim == 4 else x for x in inputs)


ENGINE = Engine(
    "litert",
    "LiteRT",
    prepare,
    convert,
    cuda=False,
    packages=("ai_edge_litert", "litert_torch"),
    requirements=("litert-torch",),
    typical_setup_s=20.0,
)
