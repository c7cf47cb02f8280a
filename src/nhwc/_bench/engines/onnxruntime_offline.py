"""ONNX Runtime after its optimizer for transformers, which fuses what a session does not.

The documentation says to run this optimizer once, before the session, on families it knows.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor, nn

from ._onnx import export_onnx
from .engine import Engine
from .onnxruntime import ENGINE as ONNXRUNTIME

FAMILIES = {"swin": "swin", "visiontransformer": "vit", "vit": "vit", "deit": "vit"}
"""The optimizer's name for a family of models, by a part of the class's name."""


def convert(model: nn.Module, inputs: tuple[Tensor, ...], folder: Path) -> None:
    from onnxruntime.transformers.optimizer import optimize_model

    name = type(model).__name__.lower()
    family = next((kind for part, kind in FAMILIES.items() if part in name), None)
    if family is None:
        raise RuntimeError(f"its offline optimizer knows no family like {type(model).__name__}")
    path = export_onnx(model, inputs, folder)
    optimized = optimize_model(str(path), model_type=family)
    if not any(optimized.get_fused_operator_statistics().values()):
        raise RuntimeError("its offline optimizer found nothing to fuse")
    optimized.save_model_to_file(str(path), use_external_data_format=True)


ENGINE = Engine(
    "onnxruntime_offline",
    "ONNX Runtime, optimized offline",
    ONNXRUNTIME.prepare,
    convert,
    packages=ONNXRUNTIME.packages,
    typical_setup_s=6.0,
)
