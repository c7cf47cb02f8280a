"""How long `optimize` takes on a machine that has seen nothing: `python -m benchmarks.first_use`.

Each model is optimized in a process of its own, one after the other. They share a folder for what
is kept, which begins empty: the first model compiles kernels that the next ones find. Then each is
optimized once more, when all is known of it, and saved; and its file is loaded twice, as programs
do that serve it, of which the second is told. What is imported before is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from nhwc.machine.environment import Environment

RESULTS = Path(__file__).parent / "results" / "first-use.json"
MODELS = ("resnet18", "mobilenet_v2", "resnet50", "densenet121", "timm:deit_tiny_patch16_224")

OPTIMIZE = """
import sys, time, torch, nhwc
model, x = nhwc.load_model(sys.argv[1]), torch.rand(1, 3, 224, 224)
start = time.perf_counter()
fast = nhwc.optimize(model, x)
print(time.perf_counter() - start)
nhwc.save(fast, sys.argv[2])
"""

LOAD = """
import sys, time
from nhwc import load
start = time.perf_counter()
load(sys.argv[2])
print(time.perf_counter() - start)
"""

STEPS = (OPTIMIZE, OPTIMIZE, LOAD, LOAD)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", default=MODELS, metavar="MODEL")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        turns = [{name: seconds(step, name, cache) for name in args.models} for step in STEPS]
    found = {name: [turn[name] for turn in turns] for name in args.models}
    result = {"environment": Environment.here().to_dict(), "seconds": found}
    args.output.write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))


def seconds(step: str, model: str, cache: str) -> float:
    """How long one process takes to optimize or to load a model."""
    file = Path(cache, f"{model.replace(':', '-')}.nhwc")
    done = subprocess.run(
        [sys.executable, "-c", step, model, file],
        env={**os.environ, "NHWC_CACHE": cache},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    taken = round(float(done.stdout.split()[-1]), 1)
    print(f"{model}: {taken} s", flush=True)
    return taken


def table(result: dict[str, Any]) -> str:
    here = result["environment"]
    lines = ["| model, in this order | first, s | again, s | loaded, s |", "|---|---|---|---|"]
    for name, (first, again, _, loaded) in result["seconds"].items():
        lines.append(f"| {name} | {first} | {again} | {loaded} |")
    machine = f"{here['processor']} {here['instruction_set']}, {here['cores']} cores"
    return f"{machine}, torch {here['torch']}.\n\n" + "\n".join(lines)


if __name__ == "__main__":
    main()
