"""All that needs a GPU, in nine minutes: `python -m benchmarks.gpu -o DIR`, in a clone.

Wants one GPU, torch, torchvision and timm; nothing is installed and nothing downloaded. Each step
has a process, a time limit and a file DIR/STEP.json of its own, which is written anew after every
row, so that a run that is cut leaves what it has. Copied to benchmarks/results/gpu, the files
become the GPU section of docs/performance.md (`python -m benchmarks.performance`).

`--rehearse` does the same steps on the CPU with next to nothing to compute.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

from nhwc.machine.environment import available_cores  # noqa: E402
from nhwc.machine.workers import Ended, Nursery  # noqa: E402

from .gpu_rows import Rows  # noqa: E402
from .gpu_steps import STEPS  # noqa: E402

WHOLE_S = 535.0
"""The limit of all steps together: nine minutes, less the start of this process."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--rehearse", action="store_true", help="on the CPU, with tiny sizes")
    parser.add_argument("--only", nargs="*", choices=[step.name for step in STEPS], default=None)
    args = parser.parse_args(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + WHOLE_S
    chosen = [step for step in STEPS if args.only is None or step.name in args.only]
    path = os.pathsep.join(map(str, (ROOT / "src", ROOT, os.environ.get("PYTHONPATH", ""))))
    threads = 1 if args.rehearse else available_cores()
    with Nursery(
        "benchmarks.gpu_steps", threads=threads, environment={"PYTHONPATH": path}
    ) as nursery:
        for step in chosen:
            limit_s = min(step.limit_s, deadline - time.monotonic())
            run(nursery, step.name, limit_s, args.output.resolve(), rehearse=args.rehearse)
    return 0


def run(nursery: Nursery, name: str, limit_s: float, folder: Path, *, rehearse: bool) -> None:
    """Run one step in a process of its own; its file says how it ended."""
    rows = Rows(folder / f"{name}.json", name)
    rows.write()
    start = time.monotonic()
    try:
        with nursery.worker() as worker:
            worker.send({"step": name, "file": str(rows.path), "rehearse": rehearse})
            ended = str(worker.hear(max(limit_s, 0.1)))
    except Ended as error:
        ended = str(error)
    rows = Rows.read(rows.path)
    rows.end(ended, time.monotonic() - start)
    print(f"{name}: {len(rows.rows)} rows in {rows.seconds:.0f} s, {ended}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
