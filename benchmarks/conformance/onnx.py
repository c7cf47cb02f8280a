"""ONNX's backend tests, as models that onnx2torch makes of them.

A test has a case if onnx2torch can read it and eager PyTorch then answers as the test says.
Wants `pip install onnx onnx2torch`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nhwc.models.vision import mend_torchvision

from .judging import Case, answer

VERBS = ("audit", "fuse", "optimize", "load", "compile", "audit backwards", "gradients")

_KINDS = ("node", "simple", "pytorch-operator", "pytorch-converted")


def groups() -> list[str]:
    _onnx2torch()
    return sorted(_tests())


def cases(group: str) -> Iterator[Case]:
    test = _tests()[group]
    try:
        model = _made(test)
    except Exception:
        # onnx2torch has no such operator, or not with these attributes.
        return
    for number, (given, wanted) in enumerate(_data(test)):
        inputs = tuple(torch.from_numpy(np.array(value)) for value in given)
        found = answer(model, inputs)
        if found.error is None and _as_wanted(found.value, wanted, test):
            yield Case(f"{group} {number}", model, inputs)


@cache
def _tests() -> dict[str, Any]:
    loader = importlib.import_module("onnx.backend.test.loader")
    return {test.name: test for kind in _KINDS for test in loader.load_model_tests(kind=kind)}


def _made(test: Any) -> nn.Module:
    model = test.model
    if model is None:
        model = importlib.import_module("onnx").load(Path(test.model_dir) / "model.onnx")
    made: nn.Module = _onnx2torch().convert(model)
    return made.eval()


def _onnx2torch() -> Any:
    # It imports torchvision.
    mend_torchvision()
    return importlib.import_module("onnx2torch")


def _data(test: Any) -> Iterator[tuple[list[Any], list[Any]]]:
    """The inputs and the outputs of each data set, those made here or those in files."""
    if test.data_sets is not None:
        sets = test.data_sets
    else:
        folders = sorted(Path(test.model_dir).glob("test_data_set_*"))
        sets = [(_stored(folder, "input"), _stored(folder, "output")) for folder in folders]
    for given, wanted in sets:
        if all(isinstance(value, (np.ndarray, np.generic)) for value in (*given, *wanted)):
            yield given, wanted


def _stored(folder: Path, kind: str) -> list[Any]:
    onnx = importlib.import_module("onnx")
    files = sorted(folder.glob(f"{kind}_*.pb"), key=lambda file: int(file.stem.split("_")[1]))
    return [
        onnx.numpy_helper.to_array(onnx.TensorProto.FromString(file.read_bytes())) for file in files
    ]


def _as_wanted(value: Any, wanted: list[Any], test: Any) -> bool:
    found = [value] if isinstance(value, Tensor) else list(value)
    return len(found) == len(wanted) and all(
        isinstance(mine, Tensor)
        and mine.shape == its.shape
        and np.allclose(mine.numpy(), its, test.rtol, max(test.atol, 1e-6), equal_nan=True)
        for mine, its in zip(found, wanted, strict=True)
    )
