"""Is the ruler straight? A variant against itself must show no difference; one that is slowed down
by a tenth must be found.

    python benchmarks/aa.py -o benchmarks/results/aa.json

Each trial is a run of its own, as `nhwc bench` makes it: two processes, the same turns. What the
file already holds is kept, so it can be run in pieces (`--minutes 1`).
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from nhwc._bench import Case, Task
from nhwc._bench.paired import WORKER, measure
from nhwc.machine.environment import Environment, available_cores
from nhwc.machine.timing import Comparison, verdict_of
from nhwc.machine.workers import Nursery

SLOWED = """
import time
import torch
from nhwc.zoo import load_model

class Slowed(torch.nn.Module):
    # In a list, so that converting this module converts nothing: both formats run the same model.
    def __init__(self):
        super().__init__()
        self.hidden = [load_model("MODEL")]

    def forward(self, x):
        start = time.perf_counter()
        y = self.hidden[0](x.contiguous())
        if x.stride(1) == 1:
            end = start + 1.1 * (time.perf_counter() - start)
            while time.perf_counter() < end:
                pass
        return y
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--trials", type=int, default=20, help="of either kind (default 20)")
    parser.add_argument("--seconds", type=float, default=3.0, help="of turns in a trial")
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after so long")
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args()
    end = time.monotonic() + 60 * args.minutes
    for result in trials(args):
        args.output.write_text(json.dumps(result, indent=1) + "\n")
        if time.monotonic() > end:
            break
    print(summary(json.loads(args.output.read_text())))


def trials(args: argparse.Namespace) -> Iterator[dict]:
    """Yield the result after every trial, the two kinds by turns."""
    result = {"same": [], "slowed": []}
    if args.output.exists():
        result |= json.loads(args.output.read_text())
    result |= {"model": args.model, "environment": Environment.here().to_dict()}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "slowed.py"
        path.write_text(SLOWED.replace("MODEL", args.model))
        kinds = {
            "same": (args.model, ("eager", "eager")),
            "slowed": (f"{path}:Slowed", ("eager", "channels_last")),
        }
        while min(len(result[kind]) for kind in kinds) < args.trials:
            kind = min(kinds, key=lambda kind: len(result[kind]))
            result[kind].append(trial(*kinds[kind], args.seconds))
            yield result
    yield result


def trial(model: str, variants: tuple[str, ...], seconds: float) -> dict[str, object]:
    case = Case(model, ((1, 3, 224, 224),), available_cores())
    with Nursery(WORKER, threads=case.threads) as nursery:
        row, interrupted = measure(Task(case, variants), nursery, seconds=seconds)
    if interrupted:
        raise KeyboardInterrupt
    if len(row.measured) < 2:
        raise SystemExit(f"not measured: {row.failure} {[m.failure for m in row.measurements]}")
    before, after = row.measured
    comparison = Comparison(before.per_turn, after.per_turn)
    return {
        "ratio": round(comparison.ratio, 4),
        "interval": [round(bound, 4) for bound in comparison.interval],
        "turns": len(before.turns),
    }


def summary(result: dict) -> str:
    same, slowed = result["same"], result["slowed"]
    silent = sum(verdict_of(*t["interval"]) in ("same", "too noisy to tell") for t in same)
    found = sum(verdict_of(*t["interval"]) == "slower" for t in slowed)
    return (
        f"the same twice: no difference in {silent} of {len(same)} trials\n"
        f"a tenth slower: found in {found} of {len(slowed)} trials"
    )


if __name__ == "__main__":
    main()
