"""The peak memory of audit and optimize, against that of the model itself.

    python -m benchmarks.memory [MODEL ...]

Each is measured in a process of its own: the highest resident size, less that of the process with
everything imported and no model. The model's own peak is one call of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "memory.json"
MODELS = ("vgg19", "wide_resnet101_2", "densenet161")
SHAPE = (1, 3, 224, 224)
WORK = ("run", "audit", "optimize")


def main(models: list[str]) -> None:
    found = {}
    for model in models or MODELS:
        found[model] = {work: round(peak_of(work, model) / 1e6) for work in WORK}
        own = found[model]["run"]
        shares = ", ".join(f"{w} {mb} MB ({mb / own:.1f}x)" for w, mb in found[model].items())
        print(f"{model}: {shares}", flush=True)
    RESULTS.write_text(json.dumps({"shape": SHAPE, "megabytes": found}, indent=1) + "\n")


def peak_of(work: str, model: str) -> int:
    # Kernels are measured anew: from memory it would be too easy.
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.memory", "--child", work, model],
            env={**os.environ, "NHWC_CACHE": cache},
            capture_output=True,
            text=True,
            check=True,
        )
    return int(done.stdout.split()[-1])


def child(work: str, name: str) -> None:
    import torch

    import nhwc
    from nhwc.vision import import_torchvision
    from nhwc.zoo import load_model

    import_torchvision()
    verbs = {"audit": nhwc.audit, "optimize": nhwc.optimize, "run": lambda m, x: m(x)}
    before = highest()
    model = load_model(name)
    with torch.inference_mode(work == "run"):
        result = verbs[work](model, torch.rand(SHAPE))
    print(highest() - before)
    del result


def highest() -> int:
    """The highest resident size so far, in bytes."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


if __name__ == "__main__":
    if "--child" in sys.argv:
        child(*sys.argv[2:4])
    else:
        main(sys.argv[1:])
