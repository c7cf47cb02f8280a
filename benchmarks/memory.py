"""The peak memory of audit, optimize and bench, and of a call of what optimize returns.

    python -m benchmarks.memory [MODEL ...]

Each is measured in a process of its own: the highest resident size, less that of the process with
everything imported and no model. The model's own peak is one call of it, weights included. A bench
has a process for each engine: the largest counts, less that of a bench of one small layer. The
optimized model is called alone, when the model it was made from and all that making it took are
gone, and once more in a process that has loaded it from its file.

malloc is told to give back what a large tensor leaves (MALLOC_MMAP_THRESHOLD_=131072). As it is by
default it keeps what lies below something small that stays, and that is a matter of luck: one call
of densenet161 takes 150 MB in one process and 215 in the next.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "memory.json"
MODELS = ("vgg19", "wide_resnet101_2", "densenet161", "resnet50", "mobilenet_v2")
SHAPE = (1, 3, 224, 224)
WORK = ("run", "audit", "optimize", "bench", "optimized run", "loaded run")


def main(models: list[str]) -> None:
    found = json.loads(RESULTS.read_text())["megabytes"] if RESULTS.exists() else {}
    with tempfile.TemporaryDirectory() as cache:
        for model in models or MODELS:
            found[model] = {}
            for first in ("run", "audit", "optimize", "bench", "loaded run"):
                for work, peak in peaks_of(first, model, Path(cache)).items():
                    found[model][work] = round(peak / 1e6)
                    print(f"{model} {work}: {found[model][work]} MB", flush=True)
            print(" | ".join(row(model, found[model])), flush=True)
            RESULTS.write_text(json.dumps({"shape": SHAPE, "megabytes": found}, indent=1) + "\n")
            RESULTS.with_suffix(".md").write_text(table(found))


def table(found: dict[str, dict[str, int]]) -> str:
    head = ["model", "own, MB", *(f"{work}, MB" for work in WORK[1:])]
    lines = [head, ["---"] * len(head), *(row(model, peaks) for model, peaks in found.items())]
    said = "\n\n".join((__doc__ or "").split("\n\n")[2:])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + f"\n\n{said}"


def row(model: str, peaks: dict[str, int]) -> list[str]:
    own = peaks["run"]
    return [model, str(own), *(f"{peaks[w]} ({peaks[w] / own:.1f}x)" for w in WORK[1:])]


def peaks_of(work: str, model: str, cache: Path) -> dict[str, int]:
    # Forget plans, so that kernels are measured anew, which takes memory.
    shutil.rmtree(cache / "plans", ignore_errors=True)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory", "--child", work, model],
        env={**os.environ, "NHWC_CACHE": str(cache), "MALLOC_MMAP_THRESHOLD_": "131072"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    peaks: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return peaks


def child(work: str, name: str) -> None:
    import torch

    import nhwc
    from nhwc._bench.peak import peak_bytes, reset_peak
    from nhwc.models.vision import import_torchvision
    from nhwc.zoo import load_model

    import_torchvision()
    x, path = torch.rand(SHAPE), Path(os.environ["NHWC_CACHE"]) / f"{name}.nhwc"
    # Threads, oneDNN and the kernels' compiler are no part of the model.
    nhwc.optimize(torch.nn.Conv2d(3, 8, 3).eval(), x)
    reset_peak()
    before = peak_bytes() or 0
    if work == "bench":
        layer = torch.nn.Conv2d(3, 8, 3).eval()
        bench_peak(nhwc, layer)  # Compiling its kernels takes memory too.
        before = bench_peak(nhwc, layer)
        peaks = {work: bench_peak(nhwc, name)}
    else:
        peaks = {}
        model: Any = nhwc.load(path) if work == "loaded run" else load_model(name)
        if work == "audit":
            nhwc.audit(model, x)
        elif work == "optimize":
            model = nhwc.optimize(model, x)
            peaks[work] = peak_bytes() or 0
            work = "optimized run"
        if work.endswith("run"):
            if work != "run":
                reset_peak()
            with torch.inference_mode():
                model(x)
        peaks[work] = peak_bytes() or 0
        if work == "optimized run":
            nhwc.save(model, path)
    print(json.dumps({work: peak - before for work, peak in peaks.items()}))


def bench_peak(nhwc: Any, model: Any) -> int:
    """Return the size of the largest process of a bench of `model`."""
    sizes, over = [0], threading.Event()

    def look() -> None:
        while not over.wait(0.02):
            sizes.append(largest_descendant())

    watcher = threading.Thread(target=look)
    watcher.start()
    nhwc.bench([model], variants=["eager", "fused", "optimized"], seconds=1)
    over.set()
    watcher.join()
    return max(sizes)


def largest_descendant() -> int:
    """Return the peak size so far of the largest among this process's descendants."""
    sizes, parents = {}, {}
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError, KeyError):
            fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines())
            sizes[int(fields["Pid"])] = int(fields["VmHWM"].split()[0]) * 1024
            parents[int(fields["Pid"])] = int(fields["PPid"])
    ours = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    return max((sizes[pid] for pid in ours - {os.getpid()}), default=0)


if __name__ == "__main__":
    if "--child" in sys.argv:
        child(*sys.argv[2:4])
    else:
        main(sys.argv[1:])
