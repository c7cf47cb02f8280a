"""The order in which the sweep takes models: every family early, then the rest, small ones first.

    python -m benchmarks.zoo_names      # count parameters anew, after an update of timm, say

Counts are kept in benchmarks/results/zoo_sizes.json: building every model takes minutes.
"""

from __future__ import annotations

import argparse
import json
import math
from functools import cache
from pathlib import Path

import torch

from nhwc.models.vision import import_torchvision
from nhwc.zoo import load_model

SIZES = Path(__file__).parent / "results" / "zoo_sizes.json"


def main() -> None:
    """Count the parameters of every model, without allocating them."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    with torch.device("meta"):
        counts = {n: sum(p.numel() for p in load_model(n).parameters()) for n in every_name()}
    SIZES.write_text(json.dumps(counts, indent=0) + "\n")


def names() -> list[str]:
    """All of torchvision, then the smallest of each file of timm, then the rest of timm."""
    sizes = sizes_known()
    by_size = sorted(every_name(), key=lambda name: sizes.get(name, math.inf))
    first: dict[str, str] = {}
    for name in by_size:
        first.setdefault(home(name), name)
    early = {*first.values()}
    return sorted(by_size, key=lambda name: (name.startswith("timm:"), name not in early))


@cache
def sizes_known() -> dict[str, int]:
    """Return the number of parameters of each model."""
    counts: dict[str, int] = json.loads(SIZES.read_text())
    return counts


def home(name: str) -> str:
    """Return the module of timm that a model is in; all of torchvision's models count as one."""
    if not name.startswith("timm:"):
        return "torchvision"
    import timm

    return str(timm.model_entrypoint(name.removeprefix("timm:")).__module__)


def every_name() -> list[str]:
    found = [n for n in import_torchvision().models.list_models() if not n.startswith("quantized_")]
    import timm

    return [*found, *(f"timm:{name}" for name in timm.list_models())]
