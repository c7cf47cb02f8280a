"""ExecuTorch: exported, delegated to XNNPACK where possible, on as many threads as torch has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .engine import Engine, Prepared


def convert(model: nn.Module, inputs: tuple[Tensor, ...], folder: Path) -> None:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    exported = torch.export.export(model, inputs)
    lowered = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()])
    (folder / "model.pte").write_bytes(lowered.to_executorch().buffer)


def prepare(folder: Path, inputs: tuple[Tensor, ...]) -> Prepared:
    from executorch.extension.pybindings import portable_lib
    from executorch.runtime import Runtime

    # ExecuTorch's documentation: the thread count matters most; the default is one per core.
    portable_lib._unsafe_reset_threadpool(torch.get_num_threads())
    method = Runtime.get().load_program(folder / "model.pte").load_method("forward")
    if method is None:
        raise RuntimeError("the program has no method forward")

    def run() -> Any:
        return method.execute(inputs)

    return run, ()


ENGINE = Engine(
    "executorch",
    "ExecuTorch, XNNPACK",
    prepare,
    convert,
    cuda=False,
    packages=("executorch", "torchao"),
    requirements=("executorch", "torchao<0.19"),
    typical_setup_s=20.0,
)
