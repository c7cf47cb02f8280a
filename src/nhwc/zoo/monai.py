"""MONAI's networks of volumes, each as its own tutorials and tests make it for one channel."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from ..errors import MissingPackage, ModelNotFound

_SIDES = (2, 2, 2, 2)

_NETWORKS: dict[str, dict[str, Any]] = {
    "UNet": {
        "spatial_dims": 3,
        "in_channels": 1,
        "out_channels": 2,
        "channels": (16, 32, 64, 128, 256),
        "strides": _SIDES,
        "num_res_units": 2,
        "norm": "batch",
    },
    "SegResNet": {
        "spatial_dims": 3,
        "in_channels": 1,
        "out_channels": 2,
        "init_filters": 16,
        "blocks_down": (1, 2, 2, 4),
        "blocks_up": (1, 1, 1),
    },
    "DynUNet": {
        "spatial_dims": 3,
        "in_channels": 1,
        "out_channels": 2,
        "kernel_size": [3, 3, 3, 3, 3],
        "strides": [1, *_SIDES],
        "upsample_kernel_size": list(_SIDES),
    },
    "SwinUNETR": {"in_channels": 1, "out_channels": 2, "feature_size": 24},
}


def monai_builder(name: str) -> Callable[..., object]:
    """Return the function of no arguments that builds MONAI's network called `name`."""
    if name not in _NETWORKS:
        raise ModelNotFound(f"monai:{name} is not known here. Try {', '.join(_NETWORKS)}.")
    try:
        networks = importlib.import_module("monai.networks.nets")
    except ImportError:
        said = f"monai, which {name} is from, is not installed: pip install monai."
        raise MissingPackage(said) from None
    return partial(getattr(networks, name), **_NETWORKS[name])
