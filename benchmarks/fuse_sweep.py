"""Fuse every classification model of torchvision, and some of timm's, and compare with float64.

    python benchmarks/fuse_sweep.py                 # all that has no row yet
    python benchmarks/fuse_sweep.py resnet18 timm:lcnet_050

Rows are kept in benchmarks/results/fuse_sweep.json, and the table is written beside it as Markdown.
A model is `right` if the error of the rewritten model against float64 is no more than four times
eager's own. Batch norms get random statistics first: with the defaults folding is trivially right.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path

import torch
from torch import nn

from nhwc import convert_, fuse, load_model
from nhwc.passes import PASSES
from nhwc.zoo import import_torchvision, randomize_batchnorm_

RESULTS = Path(__file__).parent / "results" / "fuse_sweep.json"
SIZES = {"inception_v3": 96, "googlenet": 64, "alexnet": 64, "swin": 64, "vit": 224, "maxvit": 224}
TIMM = (
    *("lcnet_050", "efficientnet_lite0", "tf_efficientnet_b0", "mobilenetv3_small_050"),
    *("resnet26d", "resnetv2_50", "nf_resnet26", "seresnet18", "ecaresnet26t", "skresnet18"),
    *("regnetx_002", "regnety_002", "dla34", "hrnet_w18_small", "densenet121", "ese_vovnet19b_dw"),
    *("ghostnet_050", "fbnetc_100", "mixnet_s", "convnext_atto", "convmixer_768_32", "repvgg_a0"),
    *("mobileone_s0", "xception41", "inception_v4", "dpn48b", "res2net50_14w_8s", "vgg11_bn"),
    *("cspresnet50", "darknet53", "mobilevit_xxs", "edgenext_xx_small", "levit_128s"),
    *("poolformer_s12", "fastvit_t8", "starnet_s1", "efficientformer_l1", "tinynet_e"),
    *("rexnet_100", "selecsls42b", "hardcorenas_a", "resnest14d", "gernet_s", "halonet26t"),
)


def names() -> list[str]:
    torchvision = import_torchvision()
    models = torchvision.models.list_models(module=torchvision.models)
    return [*models, *(f"timm:{name}" for name in TIMM)]


def size_of(name: str, model: nn.Module) -> int:
    if name.startswith("timm:"):
        return int(model.default_cfg["input_size"][-1])  # type: ignore[index,union-attr]
    return next((size for start, size in SIZES.items() if name.startswith(start)), 64)


def row(name: str) -> dict[str, object]:
    model = randomize_batchnorm_(load_model(name))
    torch.manual_seed(0)
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and not layer.weight.any():
            nn.init.normal_(layer.weight, std=0.02)  # a head of zeros would hide everything
    x = torch.randn(2, 3, *[size_of(name, model)] * 2)
    with torch.inference_mode():
        eager = model(x)
    model.double()  # and back again: exact, and less memory than a second model
    with torch.inference_mode():
        truth = model(x.double())
    model.float()
    scale = truth.abs().max().item()
    start = time.perf_counter()
    fused = fuse(model)
    seconds = time.perf_counter() - start
    report = fused.report
    result: dict[str, object] = {
        "folded": len(report.applied),
        "left": len(report.skipped),
        "why": sorted({_short(site.reason) for site in report.skipped}),
        "opaque": [f"{part.path or 'the model'}: {part.reason}" for part in report.opaque],
        "seconds": round(seconds, 2),
        "eager_error": (eager - truth).abs().max().item() / scale,
    }
    with torch.inference_mode():
        result["fused_error"] = (fused(x) - truth).abs().max().item() / scale
    del fused
    gc.collect()
    rewritten = convert_(fuse(model, passes=PASSES))
    last = x.contiguous(memory_format=torch.channels_last)
    with torch.inference_mode():
        result["rewritten_error"] = (rewritten(last) - truth).abs().max().item() / scale
    worst = max(result["fused_error"], result["rewritten_error"])  # type: ignore[call-overload]
    result["outcome"] = "right" if worst <= 4 * max(result["eager_error"], 1e-7) else "WRONG"  # type: ignore[call-overload]
    return result


def _short(reason: str) -> str:
    """The kind of reason, without the names of one model's layers."""
    for sign in ("not from a convolution", "also used by", "called at", "pads with zeros"):
        if sign in reason:
            return sign
    return reason.split(":")[0]


def main(chosen: list[str]) -> None:
    rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in chosen or [name for name in names() if name not in rows]:
        try:
            rows[name] = row(name)
        except Exception as error:
            rows[name] = {"outcome": f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"}
        print(name, rows[name]["outcome"], flush=True)
        gc.collect()
        RESULTS.write_text(json.dumps(dict(sorted(rows.items())), indent=1) + "\n")
        RESULTS.with_suffix(".md").write_text(table(rows))


def table(rows: dict[str, dict[str, object]]) -> str:
    lines = [
        "Written by `python benchmarks/fuse_sweep.py`. Errors are the largest difference from a",
        "float64 run, relative to its largest output.",
        "",
        "| model | batch norms folded | left, why | parts not traced | eager error | fused error "
        "| all passes, channels last | outcome |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, found in sorted(rows.items()):
        if "folded" not in found:
            lines.append(f"| {name} | | | | | | | {found['outcome']} |")
            continue
        left = f"{found['left']}: {', '.join(found['why'])}" if found["left"] else "0"  # type: ignore[arg-type]
        errors = " | ".join(
            f"{found[key]:.1e}" for key in ("eager_error", "fused_error", "rewritten_error")
        )
        opaque = len(found["opaque"])  # type: ignore[arg-type]
        lines.append(
            f"| {name} | {found['folded']} | {left} | {opaque} | {errors} | {found['outcome']} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(sys.argv[1:])
