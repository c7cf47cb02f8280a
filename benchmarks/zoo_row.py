"""One model through audit, fuse, optimize, save and load, held against float64 at every step.

    python -m benchmarks.zoo_row resnet18

prints the row as JSON. `zoo_sweep.py` has a process for every model.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import json
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import nhwc
from nhwc._optimize.parts import verify_or_parts
from nhwc.models.trees import tensors_of
from nhwc.models.vision import import_torchvision
from nhwc.verify import Answers, observe
from nhwc.verify.inputs import random_inputs
from nhwc.zoo import load_model, randomize_batchnorm_, randomize_constants_

# Imported once, in the process from which rows are forked, instead of in each row.
import_torchvision()
timm: Any = importlib.import_module("timm")

SIDE = 64
SIDES = (SIDE, 96, 128, 224, 256, 299, 384, 448)
CLIPS = ((8, 64), (16, 64), (16, 112), (32, 64), (16, 224))


@dataclass(frozen=True)
class Limits:
    """Limits on what the process of a row may use."""

    bytes: int
    processor_s: int
    threads: int


def say_row(name: str, said: str, limits: Limits) -> None:
    """Write the row of a model as the last line of the file `said`, within the limits."""
    resource.setrlimit(resource.RLIMIT_DATA, (limits.bytes, limits.bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (limits.processor_s, limits.processor_s + 5))
    torch.set_num_threads(limits.threads)
    with open(said, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    print(json.dumps(row_of(name)), flush=True)


def row_of(name: str) -> dict[str, Any]:
    row: dict[str, Any] = {"outcome": "failed", "reason": ""}
    start = time.perf_counter()
    step = "build"
    try:
        for step in fill(row, name):  # noqa: B007 - the last one done is named
            pass
    except Exception as error:
        text = " ".join(str(error).split())
        refused = isinstance(error, nhwc.NhwcError)
        row["outcome"] = "refused" if refused else "failed"
        row["reason"] = f"after {step}: {type(error).__name__}: {text}"[:300]
    return row | {"seconds": round(time.perf_counter() - start, 1)}


def fill(row: dict[str, Any], name: str) -> Iterator[str]:
    """Fill `row` step by step; yields the name of the step that is done."""
    model = randomize_constants_(small_model(name))
    wake_(model)
    shrink_(model)
    family, inputs = smallest_inputs(name, model)
    randomize_batchnorm_(model, inputs=inputs)
    row |= {"family": family, "input": [list(x.shape) for x in tensors_of(inputs)]}
    yield "build"
    before = digest(model)
    truth = observe(model, random_inputs(inputs, 2))
    row["in_float64"] = truth.exact is not None
    yield "observe"
    row["lost_before"] = lost(model, inputs)
    yield "audit"
    fused = nhwc.fuse(model)
    report = fused.report
    row["folded"] = len(report.applied)
    row["left"] = sorted({site.reason for site in report.skipped})[:3]
    row["left_count"] = len(report.skipped)
    row["opaque"] = [f"{part.path or 'the model'}: {part.reason}" for part in report.opaque][:5]
    row["fused"] = judged(truth, model, fused)
    del fused
    yield "fuse"
    fast = nhwc.optimize(model, *inputs)
    said = fast.report
    row |= {"chosen": said.chosen, "why": said.reason, "optimize_s": round(said.setup_s, 1)}
    row |= {"ratio": round(said.comparison.ratio, 3), "verdict": said.comparison.verdict}
    row["optimized"] = judged(truth, model, fast)
    yield "optimize"
    sized = (recipe.graph for recipe in fast.recipes if recipe.graph is not None)
    row["lost_after"] = lost(next(sized, fast.portable), inputs)
    row["other_batch"] = other_batch(model, fast, inputs)
    yield "other batch size"
    row["loaded"] = saved_and_loaded(truth, model, fast)
    yield "save and load"
    row["untouched"] = digest(model) == before
    kinds = ("fused", "optimized", "other_batch", "loaded")
    wrong = [kind for kind in kinds if str(row[kind]).startswith("WRONG")]
    if not row["untouched"]:
        wrong.append("the model was changed")
    row["outcome"] = "WRONG" if wrong else "right"
    row["reason"] = "; ".join(wrong)


def small_model(name: str) -> nn.Module:
    """Build the model; a model of timm's with a fixed image size gets a small one if it can."""
    in_timm = name.removeprefix("timm:")
    if in_timm == name or not timm.get_pretrained_cfg(in_timm).fixed_input_size:
        return load_model(name)
    try:
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(0)
            model: nn.Module = timm.create_model(in_timm, img_size=SIDE).eval()
            # Some keep what a call computed of weights, and these are drawn anew after it.
            copy.deepcopy(model)(torch.zeros(1, model.default_cfg["input_size"][0], SIDE, SIDE))
            return model
    except Exception:  # whatever a model raises that has no such parameter, or on such a size
        return load_model(name)


def wake_(model: nn.Module) -> None:
    """Replace zeros and score thresholds, which would hide everything before them."""
    for module in model.modules():
        if hasattr(module, "score_thresh"):
            module.score_thresh = 0.0  # type: ignore[assignment]
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point() and not parameter.any() and parameter.ndim:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.02)


def shrink_(model: nn.Module) -> None:
    """Have detectors scale images to 128 pixels, not 800: that is enough here."""
    for module in model.modules():
        if hasattr(module, "min_size") and hasattr(module, "image_mean"):
            module.min_size = (128,)  # type: ignore[assignment]


def smallest_inputs(name: str, model: nn.Module) -> tuple[str, tuple[Any, ...]]:
    """Return the family of the model, and the smallest input tried that it accepts."""
    error: Exception | None = None
    family = family_of(name)
    for inputs in candidates(family, name, model):
        try:
            with torch.no_grad():
                model(*inputs)
        except Exception as raised:  # whatever a forward raises on a size it does not take
            error = raised
        else:
            return family, inputs
    raise nhwc.InputError(f"it takes none of the inputs tried; the last: {error}")


def family_of(name: str) -> str:
    if name.startswith("timm:"):
        return "timm"
    models = import_torchvision().models
    for kind in ("segmentation", "detection", "video", "optical_flow"):
        if name in models.list_models(module=getattr(models, kind)):
            return kind
    return "classification"


def candidates(family: str, name: str, model: nn.Module) -> Iterator[tuple[Any, ...]]:
    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(0))

    if family == "video":
        yield from ((draw(1, 3, frames, side, side),) for frames, side in CLIPS)
    elif family == "optical_flow":
        yield draw(1, 3, 128, 128), draw(1, 3, 128, 128)
    elif family == "detection":
        yield ([draw(3, 128, 128).sigmoid()],)
    elif family == "timm":
        channels, *sides = model.default_cfg["input_size"]  # type: ignore[index,union-attr]
        # Patches of 14 pixels, or three by three of 16, fill no image of 64.
        for side in (SIDE, 56, 48, 128, 112):
            yield (draw(1, channels, side, side),)
        yield (draw(1, channels, *sides),)
    else:
        yield from ((draw(1, 3, side, side),) for side in SIDES)


def lost(model: nn.Module, inputs: tuple[Any, ...]) -> int | str:
    """Return how many calls lose channels last, or why the audit failed."""
    try:
        return sum(len(finding.calls) for finding in nhwc.audit(model, *inputs).lost)
    except nhwc.NhwcError as error:
        return str(error)[:160]


def judged(truth: Answers, model: nn.Module, after: nn.Module) -> str:
    found = verify_or_parts(truth, model, after)
    worst = found.worst
    if worst is None:
        return "nothing to compare"
    errors = f"{worst.error:.1e} ({worst.eager_error:.1e})"
    return errors if found.passed else f"WRONG: {worst.output} {errors} {worst.reason}"


def other_batch(model: nn.Module, fast: nn.Module, inputs: tuple[Any, ...]) -> str:
    more = tuple(torch.cat((x, x.flip(-1))) if isinstance(x, Tensor) else x * 2 for x in inputs)
    try:
        truth = observe(model, [more])
    except Exception:  # a model for batches of one
        return "the model takes none"
    return judged(truth, model, fast)


def saved_and_loaded(truth: Answers, model: nn.Module, fast: nn.Module) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.nhwc"
        try:
            nhwc.save(fast, path)
        except nhwc.InputError as error:
            return f"not saved: {error}"[:200]
        return judged(truth, model, nhwc.load(path))


def digest(model: nn.Module) -> str:
    """Hash values, strides and flags: an equal hash means that the model was not changed."""
    found = hashlib.sha256()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            said = (name, id(tensor), tensor.stride(), tensor.requires_grad, tensor.dtype)
            found.update(repr(said).encode())
            found.update(tensor.detach().contiguous().view(-1).numpy().tobytes())
    modes = [(n, id(m), m.training, len(m._forward_hooks)) for n, m in model.named_modules()]
    found.update(repr(modes).encode())
    return found.hexdigest()


if __name__ == "__main__":
    print(json.dumps(row_of(sys.argv[1])))
