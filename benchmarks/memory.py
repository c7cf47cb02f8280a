"""The peak memory of audit, optimize and bench, and of a call of what optimize returns.

    python -m benchmarks.memory [MODEL ...]
    python -m benchmarks.memory --trade [MODEL ...]

Each is measured in a process of its own: the highest resident size, less that of the process with
everything imported and no model. The model's own peak is one call of it, weights included. A bench
has a process for each engine: the largest counts, less that of a bench of one small layer. The
optimized model is called alone, when the model it was made from and all that making it took are
gone, and once more in a process that has loaded it from its file, with its kernels known. Volumes
have neither audit nor bench here. `weights` are the model's own; `packed` is what the kernels hold
of them instead, and `arena` the memory of a call, of which `live` is used at one time: no arena is
smaller.

malloc is told to give back what a large tensor leaves (MALLOC_MMAP_THRESHOLD_=131072). As it is by
default it keeps what lies below something small that stays, and that is a matter of luck: one call
of densenet161 takes 150 MB in one process and 215 in the next.

`--trade` prints how long a call takes, and how much is packed, for several limits of what
Winograd's kernels may hold beyond one copy of all weights, timed in turns in one process.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "memory.json"
PAGE = Path(__file__).parents[1] / "docs" / "memory.md"
IMAGE, VIDEO, SCAN = (1, 3, 224, 224), (1, 3, 8, 112, 112), (1, 1, 64, 64, 64)
MODELS = {
    **dict.fromkeys(
        ("vgg19", "wide_resnet101_2", "densenet161", "resnet50", "mobilenet_v2"), IMAGE
    ),
    **dict.fromkeys(("r3d_18", "r2plus1d_18"), VIDEO),
    **dict.fromkeys(("monai:UNet", "monai:SegResNet", "monai:DynUNet"), SCAN),
}
WORK = ("run", "audit", "optimize", "bench", "optimized run", "loaded run")
PARTS = ("weights", "packed", "arena", "live")
LIMITS = (0.0, 0.05, 0.1, 0.2, 0.4)


def main(models: list[str]) -> None:
    found = json.loads(RESULTS.read_text())["megabytes"] if RESULTS.exists() else {}
    with tempfile.TemporaryDirectory() as cache:
        for model in models or MODELS:
            found[model] = {}
            volume = len(MODELS.get(model, IMAGE)) == 5
            first = ("run", "optimize", "loaded run")
            for work in first if volume else ("audit", "bench", *first):
                for name, peak in peaks_of(work, model, Path(cache)).items():
                    found[model][name] = round(peak / 1e6)
                    print(f"{model} {name}: {found[model][name]} MB", flush=True)
            print(" | ".join(row(model, found[model])), flush=True)
            shapes = {name: MODELS.get(name, IMAGE) for name in found}
            RESULTS.write_text(json.dumps({"shapes": shapes, "megabytes": found}, indent=1) + "\n")
            head, mark, _ = PAGE.read_text().partition("## Measured\n")
            PAGE.write_text(f"{head}{mark}\n{table(found)}")


def table(found: dict[str, dict[str, int]]) -> str:
    head = ["model", "own, MB", *(f"{work}, MB" for work in (*WORK[1:], *PARTS))]
    lines = [head, ["---"] * len(head), *(row(model, peaks) for model, peaks in found.items())]
    said = "\n\n".join((__doc__ or "").split("\n\n")[1:-1])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + f"\n\n{said}\n"


def row(model: str, peaks: dict[str, int]) -> list[str]:
    own = peaks["run"]
    ratios = [f"{peaks[w]} ({peaks[w] / own:.1f}x)" if w in peaks else "" for w in WORK[1:]]
    return [model, str(own), *ratios, *(str(peaks.get(part, "")) for part in PARTS)]


def peaks_of(work: str, model: str, cache: Path) -> dict[str, int]:
    # Forget plans, so that kernels are measured anew, which takes memory.
    if work != "loaded run":
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
    x = torch.rand(MODELS.get(name, IMAGE))
    path = Path(os.environ["NHWC_CACHE"]) / f"{name.replace(':', '.')}.nhwc"
    # Threads, oneDNN, the kernels' compiler and the package of a model are no part of it.
    small = torch.nn.Conv3d if x.ndim == 5 else torch.nn.Conv2d
    nhwc.optimize(small(x.shape[1], 8, 3).eval(), x)
    if ":" in name:
        load_model(name)
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
    taken = {work: peak - before for work, peak in peaks.items()}
    if work == "optimized run":
        taken |= parts_of(model)
    print(json.dumps(taken))


def parts_of(model: Any) -> dict[str, int]:
    """Bytes of the weights of an optimized model, of what is packed of them, and of its arena."""
    import torch

    from nhwc.kernels.programs.program import Program
    from nhwc.kernels.tape.arena import least

    threads = torch.get_num_threads()
    packed = {id(one): one for shelf in model._pool.shelves for one in shelf.pieces}
    schedules = [one.schedule for one in gc.get_objects() if type(one) is Program]
    lives = [[*schedule.lives(threads).values()] for schedule in schedules]
    return {
        "weights": sum(weight.nbytes for weight in model.parameters()),
        "packed": sum(4 * one.numel() for one in packed.values()),
        "arena": max((schedule.places(threads)[1] for schedule in schedules), default=0),
        "live": max(map(least, lives), default=0),
    }


def trade(models: list[str]) -> None:
    """Print what Winograd's kernels save where they may hold more or less."""
    import torch

    import nhwc
    from nhwc.models.vision import import_torchvision
    from nhwc.plan import weighing
    from nhwc.zoo import load_model

    import_torchvision()
    for name in models or MODELS:
        x, made = torch.rand(MODELS.get(name, IMAGE)), {}
        torch.manual_seed(0)
        model: Any = load_model(name)
        for limit in LIMITS:
            weighing._LIMIT, weighing._ALWAYS = limit, 0
            made[limit] = nhwc.optimize(model, x)
        least: dict[float, list[float]] = {limit: [] for limit in LIMITS}
        with torch.inference_mode():
            for _ in range(40):
                for limit, fast in made.items():
                    start = time.perf_counter()
                    fast(x)
                    least[limit].append(time.perf_counter() - start)
        for limit, fast in made.items():
            packed = parts_of(fast)["packed"] / 1e6
            took = 1e3 * min(least[limit])
            print(f"{name} limit {limit}: {packed:.0f} MB packed, {took:.2f} ms", flush=True)


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
    elif "--trade" in sys.argv:
        trade(sys.argv[2:])
    else:
        main(sys.argv[1:])
