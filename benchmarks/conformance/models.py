"""What torchvision and timm test about their models, with an optimized model in their place.

Forward, the features in between, `torch.jit.script` and a second trace by FX, at small sizes.
Wants `pip install timm`.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from nhwc.models.vision import import_torchvision, mend_torchvision

from .judging import Case

VERBS = ("audit", "fuse", "optimize", "load", "script", "trace", "compile")

_LARGEST = 60_000_000
"""No model of torchvision has more parameters than this."""

_MOST_MILLIONS = 200
"""No model of timm whose name tells its millions of parameters has more: one of 412 takes minutes
and 7 GB to be answered once and once in float64."""

_SMALL = (
    *("test_", "femto", "atto", "zepto", "pico", "nano", "xxs", "xxxs", "_005", "_002", "_050"),
    *("tiny", "xs", "_b0", "18", "small", "mini", "_s", "light", "26", "32", "50", ""),
)
"""What marks the small models of a family, the smallest first."""

_SIZES = (64, 96, 128, 160, 192, 224, 256)
"""A model is asked at the first of these that it takes."""


def groups() -> list[str]:
    """Each model of torchvision that is not too large; the smallest ones of each file of timm."""
    return [*(f"torchvision:{name}" for name in _of_torchvision()), *_of_timm()]


def cases(group: str) -> Iterator[Case]:
    library, name = group.split(":")
    make = _from_torchvision if library == "torchvision" else _from_timm
    torch.manual_seed(0)
    for what, model in make(name):
        _settle(model)
        x = _accepted(model)
        if x is not None:
            yield Case(f"{group} {what}", model, (x,), strides=False, wide=True)


def _of_torchvision() -> list[str]:
    models = import_torchvision().models
    names = models.list_models(exclude=["quantized_*", "raft_*", "*rcnn*", "*retina*", "fcos*"])
    names = [name for name in names if "ssd" not in name]
    return [name for name in names if _parameters(models, name) <= _LARGEST]


def _parameters(models: Any, name: str) -> int:
    weights = models.get_model_weights(name)
    return min(int(weight.meta["num_params"]) for weight in weights)


def _of_timm() -> list[str]:
    mend_torchvision()
    timm = importlib.import_module("timm")
    chosen: dict[str, None] = {}
    for module in timm.list_modules():
        names = [name for name in timm.list_models(module=module) if not is_large(name)]
        for mark in _SMALL:
            marked = [name for name in names if mark in name]
            if marked:
                chosen |= dict.fromkeys(f"timm:{name}" for name in marked[:2])
                break
    return list(chosen)


def is_large(name: str) -> bool:
    """Whether the name of a model tells of too many parameters."""
    return any(int(found) > _MOST_MILLIONS for found in re.findall(r"_(\d+)m(?:_|$)", name))


def _from_torchvision(name: str) -> Iterator[tuple[str, nn.Module]]:
    torchvision = import_torchvision()
    options: dict[str, Any] = {"weights": None}
    if "vit_b" in name:
        options["image_size"] = 64
    if (
        "weights_backbone"
        in inspect.signature(torchvision.models.get_model_builder(name)).parameters
    ):
        options["weights_backbone"] = None
    model = torchvision.models.get_model(name, **options).eval()
    yield "forward", model
    extraction = importlib.import_module("torchvision.models.feature_extraction")
    _, nodes = extraction.get_graph_node_names(model)
    inner = nodes[1:-1]
    wanted = inner[:: max(1, len(inner) // 4)]
    yield "features", extraction.create_feature_extractor(model, wanted).eval()


def _from_timm(name: str) -> Iterator[tuple[str, nn.Module]]:
    mend_torchvision()
    timm = importlib.import_module("timm")
    for what, options in (
        ("forward", {}),
        ("no pooling", {"num_classes": 0, "global_pool": ""}),
        ("features", {"features_only": True}),
    ):
        try:
            model = timm.create_model(name, exportable=True, **options)
        except (RuntimeError, AssertionError, TypeError, AttributeError, ValueError):
            # Not every family has this.
            continue
        yield what, model.eval()


def _settle(model: nn.Module) -> None:
    """Give norms statistics and scales that a fold must see, and no layer a scale of zero."""
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if name.endswith("running_var"):
            nn.init.uniform_(value, 0.5, 2.0)
        elif name.endswith("running_mean"):
            nn.init.uniform_(value, -0.2, 0.2)
        elif value.dim() == 1 and value.is_floating_point() and bool((value.abs() < 1e-4).all()):
            nn.init.uniform_(value, 0.1, 0.3)


def _accepted(model: nn.Module) -> torch.Tensor | None:
    """An image that the model takes; None if there is none."""
    settings = getattr(model, "default_cfg", None) or getattr(model, "pretrained_cfg", None) or {}
    fixed = settings.get("input_size") if settings.get("fixed_input_size") else None
    channels, *_ = settings.get("input_size", (3,))
    for size in (fixed[1],) if fixed else _SIZES:
        x = torch.rand(2, channels, size, size)
        try:
            with torch.no_grad():
                model(x)
        except Exception:
            continue
        return x
    return None
