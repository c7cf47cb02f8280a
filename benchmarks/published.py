"""Record the suites blog, fusion and apex in a few minutes: `python -m benchmarks.published`.

Writes benchmarks/results/NAME.json of each, which `python -m benchmarks.performance` puts into
docs/performance.md. Beside `nhwc bench --suite NAME` it leaves out all variants but those that the
source compares, measures each case for half a second (nine turns at the least), and begins no case
that would end after the limit. The shortest suite comes first, and of its models one of each
family; a second run goes on where the first one stopped.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

from nhwc._bench import SUITES, Benchmark, Row, Suite, Task, load_benchmark, run
from nhwc._bench.forecast import forecast
from nhwc._bench.runner import left_to_do
from nhwc.machine.disk import replace_file
from nhwc.render.bench_words import environment, folding

RESULTS = Path(__file__).parent / "results"
NAMES = ("apex", "fusion", "blog")
SECONDS = 0.5

FAMILIES = (
    *("resnet50", "mnasnet1_0", "squeezenet1_1", "shufflenet_v2_x1_0", "densenet121", "googlenet"),
    *("alexnet", "resnext50_32x4d", "inception_v3", "vgg11_bn", "wide_resnet50_2", "resnet18"),
)
"""One of each family, the quicker ones of a large one."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="the limit (10)")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS, help="a folder")
    args = parser.parse_args(argv)
    deadline = time.monotonic() + 60 * args.minutes
    suites = [suite for suite in SUITES if suite.name in NAMES]
    for suite in sorted(suites, key=lambda suite: len(suite.tasks(()))):
        record(suite, args.output / f"{suite.name}.json", deadline)


def record(suite: Suite, path: Path, deadline: float) -> None:
    """Measure the cases of a suite that `path` does not hold, until the deadline."""
    done = load_benchmark(path) if path.exists() else None
    tasks = sorted(suite.tasks(()), key=_place)
    left = forecast(left_to_do(tasks, done), seconds=SECONDS)
    print(f"{suite.name}: {len(left)} of {len(tasks)} cases, about {_sum(left):.0f} s", flush=True)
    for task in left:
        if time.monotonic() + task.expected_s > deadline:
            print(f"  no time for {task.case.model}", flush=True)
            continue
        start = time.monotonic()
        title = suite.title(task.case.amp)
        done = run([task], title=title, seconds=SECONDS, done=done)
        replace_file(path, [json.dumps(done.to_dict(), separators=(",", ":")).encode() + b"\n"])
        taken_s = time.monotonic() - start
        print(f"  {task.case.model}: {taken_s:.0f} s, {_said(done.rows[-1])}", flush=True)
        if done.interrupted:
            raise SystemExit(130)


def table(result: Benchmark) -> str:
    """Each model's gain beside the published range, for a page."""
    suite = next(suite for suite in SUITES if result.title.startswith(f"{suite.name}:"))
    rows = sorted(result.rows, key=lambda row: _order(suite, row.case.model))
    shown = _fusion(rows) if suite.name == "fusion" else _layout(rows)
    case = rows[0].case
    setting = f"Batch {case.batch}, {case.threads} threads" + ", training step" * case.train
    precision = "mixed precision" if case.amp else "float32"
    missing = set(suite.chosen_models(())) - {row.case.model for row in rows}
    parts = [f"{setting}, {precision}. {environment(result)}.", shown]
    if missing:
        names = ", ".join(sorted(missing, key=lambda name: _order(suite, name)))
        parts.append(f"Not recorded yet: {names}.")
    return "\n\n".join(parts)


def _layout(rows: Sequence[Row]) -> str:
    lines = [
        "| model | eager NCHW ms | channels last ms | gain (99 % interval) | published | here |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        gain = row.comparison("channels_last", "eager")
        if gain is None:
            lines.append(f"| {row.case.model} | {_said(row)} |")
            continue
        lines.append(
            f"| {row.case.model} | {_ms(row, 'eager')} | {_ms(row, 'channels_last')} "
            f"| {_gain(row, 'channels_last', 'eager')} | {row.published} | {row.judgement} |"
        )
    return "\n".join(lines)


def _fusion(rows: Sequence[Row]) -> str:
    lines = [
        "| model | unfused ms | fused ms | jit.script(fused) ms | folding gains | jit.script "
        "gains | channels last: unfused ms | fused ms | folding gains | published | here | |",
        "|---" * 12 + "|",
    ]
    for row in rows:
        fused = row.measurement("fused_nchw")
        if fused is None:
            lines.append(f"| {row.case.model} | {_said(row)} |")
            continue
        lines.append(
            f"| {row.case.model} | {_ms(row, 'eager')} | {_ms(row, 'fused_nchw')} "
            f"| {_ms(row, 'fused_script')} | {_gain(row, 'fused_nchw', 'eager')} "
            f"| {_gain(row, 'fused_script', 'fused_nchw')} | {_ms(row, 'channels_last')} "
            f"| {_ms(row, 'fused')} | {_gain(row, 'fused', 'channels_last')} "
            f"| {row.published or 'control'} | {row.judgement} | {folding(fused)} |"
        )
    return "\n".join(lines)


def _ms(row: Row, variant: str) -> str:
    found = row.measurement(variant)
    return f"{found.median_s * 1e3:.1f}" if found else "-"


def _gain(row: Row, variant: str, baseline: str) -> str:
    found = row.comparison(variant, baseline)
    if found is None:
        return "-"
    return f"{found.ratio:.2f} ({found.interval[0]:.2f}-{found.interval[1]:.2f})"


def _said(row: Row) -> str:
    reasons = [row.failure, *(m.failure for m in row.measurements)]
    return next((reason for reason in reasons if reason), row.judgement or "measured")


def _place(task: Task) -> int:
    return FAMILIES.index(task.case.model) if task.case.model in FAMILIES else len(FAMILIES)


def _order(suite: Suite, model: str) -> int:
    models = suite.chosen_models(())
    return models.index(model) if model in models else len(models)


def _sum(tasks: Sequence[Task]) -> float:
    return sum(task.expected_s for task in tasks)


if __name__ == "__main__":
    main()
