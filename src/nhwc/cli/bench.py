"""nhwc bench: ways to run a model, side by side."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .._bench import SUITES, Benchmark, Changes, Progress, Suite, Task, compare, load_benchmark
from .._bench.engines import ALL, ENGINES, QUICK, Engine, chosen, find_engine
from .._bench.forecast import forecast
from .._bench.results import Case
from .._bench.runner import SECONDS, left_to_do
from .._bench.runner import run as measure
from ..errors import InputError
from ..machine.bfloat16 import emulates_bfloat16
from ..machine.environment import available_cores, usable_device
from ..render.bench_csv import bench_csv
from ..render.bench_engines_text import engines_text, missing_text
from ..render.bench_html import bench_html
from ..render.bench_plot import bench_plot
from ..render.bench_text import bench_text, changes_text
from ..render.text import duration, plural
from ..zoo.sources import find_builder
from ..zoo.weights import read_weights
from .common import MODEL, add_input, add_seed, aside, check_alone, check_fits, parse_shapes
from .interrupt import ends_as_ctrl_c
from .outputs import (
    add_output_arguments,
    check_outputs,
    check_plot,
    chosen_format,
    write_file,
    write_output,
)
from .progress import ProgressLine, note
from .values import MOST, Names, number

FORMATS = ("text", "json", "csv", "html")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _epilog()
    parser.add_argument(
        "models",
        metavar="MODEL",
        nargs="*",
        help=f"{MODEL}; or a FILE.json that -o wrote, to show it again",
    )
    words = "models to measure together, beside published figures where there are any; see below"
    parser.add_argument("--suite", choices=[s.name for s in SUITES], help=words)
    parser.add_argument(
        "--variants",
        metavar="A,B,...",
        type=Names((*(engine.name for engine in ENGINES), ALL)),
        help=f"default: {', '.join(QUICK)}; all: every one that is installed",
    )
    parser.add_argument(
        "--engines", action="store_true", help="what is installed here, and how to get the rest"
    )
    add_input(parser, "shape of the input", "1x3x224x224; 4x3x224x224 with --train")
    words = "batch sizes of all inputs, one after the other"
    parser.add_argument("--batch", metavar="N,...", help=words)
    parser.add_argument("--threads", metavar="N,...", help="thread counts (default: all cores)")
    parser.add_argument("--train", action="store_true", help="a training step, not inference")
    parser.add_argument(
        "--amp",
        action=argparse.BooleanOptionalAction,
        help="in mixed precision, or not (default: as the suite was published, else not)",
    )
    parser.add_argument("--weights", metavar="FILE", help="a state dict; random weights otherwise")
    parser.add_argument("--device", help="cpu (default), cuda, cuda:1, ...")
    add_seed(parser)
    parser.add_argument(
        "--seconds",
        metavar="S",
        type=number(0.001, 86_400),
        help=f"measuring time per case, set-up apart (default {SECONDS:.0f})",
    )
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw FILE.svg or FILE.png")
    parser.add_argument("--resume", action="store_true", help="keep what -o FILE.json already has")
    parser.add_argument(
        "--compare",
        nargs=2,
        metavar=("OLD", "NEW"),
        type=Path,
        help="two results that -o FILE.json wrote: what got faster, what slower",
    )
    parser.add_argument("--fail-on", choices=["slower"], help="with --compare: exit 1 if any is")
    add_output_arguments(parser, FORMATS)


def run_compare(args: argparse.Namespace) -> int:
    """Compare two results; with `--fail-on slower`, the exit status is 1 if anything got slower."""
    changes = compare(*(load_benchmark(path) for path in args.compare))
    format = chosen_format(args, FORMATS)
    if format not in ("text", "json"):
        raise InputError(f"--compare has no {format} output. Use --format text or json.")
    write_output(_changes(changes, format), args.output)
    return 1 if args.fail_on == "slower" and changes.slower else 0


def show(args: argparse.Namespace, result: Benchmark) -> None:
    """Write the result in the chosen format; draw it, too, if there is a `--plot`."""
    write_output(_text(result, chosen_format(args, FORMATS)), args.output)
    if args.plot:
        write_file(args.plot, bench_plot(result, args.plot.suffix.lstrip(".")))
        note(f"wrote {args.plot}")


def run_bench(args: argparse.Namespace) -> int:
    """Measure, keeping on disk what is done, and show the result."""
    args.seconds = args.seconds or SECONDS
    tasks, title = _tasks(args)
    format = chosen_format(args, FORMATS)
    line = ProgressLine()

    def tell(progress: Progress) -> None:
        text = f"{progress.case}: {progress.doing}"
        line.update(text, progress.share, progress.remaining_s)

    def keep(result: Benchmark) -> None:
        # Called after every case, so that nothing measured is lost.
        if args.output and format == "json" and _is_measured(result):
            # A full disk must not end the measurement; the last write reports it.
            with contextlib.suppress(InputError):
                write_file(args.output, _json(result.to_dict()).encode())

    done = _done(args, format)
    if args.suite:
        tasks = forecast(tasks, seconds=args.seconds)
        _told_how_long(args, tasks, done)
    if args.amp and args.device == "cpu" and emulates_bfloat16():
        note("bfloat16 is emulated on this processor, which takes about ten times as long.")
    if missing := _missing(args, tasks):
        note(missing_text(missing))
    try:
        with ends_as_ctrl_c():
            result = measure(
                tasks,
                title=title,
                seconds=args.seconds,
                done=done,
                progress=tell,
                checkpoint=keep,
            )
    finally:
        line.clear()
    if not _is_measured(result):
        if result.interrupted:
            raise KeyboardInterrupt
        raise InputError(f"nothing could be measured. {_first_reason(result)}")
    show(args, result)
    return 130 if result.interrupted else 0


def run(args: argparse.Namespace) -> int:
    check_plot(args.plot)
    reads = (*args.models, args.weights, *(args.compare or ()))
    check_outputs(args.output, args.plot, reads=reads)
    if args.fail_on and not args.compare:
        raise InputError(f"--fail-on {args.fail_on} goes with --compare OLD NEW. Add two results.")
    if args.engines:
        check_alone(args, "--engines", "models", "suite", "compare", *_OF_RUNS)
        if chosen_format(args, FORMATS) != "text":
            raise InputError("--engines has text output alone. Use --format text.")
        write_output(engines_text(ENGINES), args.output)
        return 0
    if args.compare:
        check_alone(args, "--compare", "models", "suite", *_OF_RUNS)
        return run_compare(args)
    results = [name for name in args.models if name.endswith(".json")]
    if len(args.models) > 1 and results:
        raise InputError(
            f"{results[0]} is a result, which is shown alone. Show two with --compare OLD NEW."
        )
    if results:
        check_alone(args, results[0], "suite", *(name for name in _OF_RUNS if name != "plot"))
        show(args, load_benchmark(Path(results[0])))
        return 0
    return run_bench(args)


_OF_RUNS = (
    *("variants", "input", "batch", "threads", "train", "amp", "weights", "device", "seed"),
    *("seconds", "resume", "plot"),
)
"""Options that mean nothing where nothing is measured."""


def _tasks(args: argparse.Namespace) -> tuple[list[Task], str]:
    if not args.models and not args.suite:
        raise InputError(
            "name models, a suite, or models of a suite. Try: nhwc bench resnet50, "
            "or: nhwc bench --suite icelake"
        )
    args.device = str(usable_device(args.device or "cpu"))
    batches = _numbers(args.batch, "--batch")
    threads = _numbers(args.threads, "--threads", most=MOST)
    if args.suite:
        suite = next(suite for suite in SUITES if suite.name == args.suite)
        return _suite_tasks(args, suite, batches, threads)
    shapes = parse_shapes(args.input or ["4x3x224x224" if args.train else "1x3x224x224"])
    chosen = _variants(args, ("eager", "channels_last") if args.train else QUICK)
    sets = [tuple((batch, *shape[1:]) for shape in shapes) for batch in batches] or [tuple(shapes)]
    for shape in itertools.chain(*sets):
        check_fits(shape, "input")
    tasks = [
        Task(
            Case(
                model=model,
                shapes=inputs,
                threads=count,
                train=args.train,
                amp=bool(args.amp),
                device=args.device,
                seed=args.seed,
                weights=args.weights,
            ),
            chosen,
        )
        for count in threads or (available_cores(),)
        for inputs in sets
        for model in args.models
    ]
    _check_models(args.models, args.weights)
    return tasks, ""


def _suite_tasks(
    args: argparse.Namespace, suite: Suite, batches: tuple[int, ...], threads: tuple[int, ...]
) -> tuple[list[Task], str]:
    for option in ("input", "weights", "train"):
        if getattr(args, option):
            raise InputError(f"--{option} does not go with --suite, which says so itself.")
    models = suite.chosen_models(args.models)
    amp = suite.precision(args.amp, args.device)
    quick = () if suite.train or suite.also else QUICK
    chosen = _variants(args, tuple(v for v in quick if not amp or find_engine(v).autocasts))
    _check_models(models)
    tasks = suite.tasks(
        chosen,
        models=models,
        batches=batches,
        threads=threads,
        amp=amp,
        device=args.device,
        seed=args.seed,
    )
    if args.amp is None and amp is not suite.amp:
        note(
            f"{suite.name} was published in mixed precision; this processor emulates bfloat16, so "
            "float32 is measured. --amp measures bfloat16 all the same."
        )
    return tasks, suite.title(amp)


def _check_models(names: Iterable[str], weights: str | None = None) -> None:
    """Refuse, before processes are started, what none of them could find."""
    with aside():
        for name in names:
            find_builder(name)
    if weights is not None:
        read_weights(weights)


def _told_how_long(args: argparse.Namespace, tasks: list[Task], done: Benchmark | None) -> None:
    """Say how long a suite will take."""
    left = left_to_do(tasks, done)
    expected_s = sum(task.expected_s for task in left)
    cases = plural(len(left), "case")
    note(f"{args.suite}: {cases}, about {duration(expected_s)}. Ctrl-C keeps what was measured.")


def _variants(args: argparse.Namespace, default: tuple[str, ...]) -> tuple[str, ...]:
    if args.variants is None:
        return default
    return chosen([name for name in args.variants.split(",") if name])


def _missing(args: argparse.Namespace, tasks: list[Task]) -> list[Engine]:
    """The engines that were asked for and are not installed."""
    wanted = {variant for task in tasks for variant in task.variants}
    if args.variants is not None and ALL in args.variants.split(","):
        wanted = {engine.name for engine in ENGINES}
    return [engine for engine in ENGINES if engine.name in wanted and engine.missing]


def _numbers(text: str | None, option: str, most: int = 1 << 20) -> tuple[int, ...]:
    if text is None:
        return ()
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"{option} {text!r} is no list of numbers. Try {option} 1,4.") from None
    if min(numbers) < 1:
        raise InputError(f"{option} {text} has a number below 1. Try {option} 1,4.")
    if max(numbers) > most:
        raise InputError(f"{option} {text} has a number above {most}. Try {option} 1,4.")
    return numbers


def _done(args: argparse.Namespace, format: str) -> Benchmark | None:
    if not args.resume:
        return None
    if args.output is None or format != "json":
        raise InputError("--resume needs the file to go on with. Add -o FILE.json.")
    return load_benchmark(args.output) if args.output.exists() else None


def _is_measured(result: Benchmark) -> bool:
    return any(row.measured for row in result.rows)


def _first_reason(result: Benchmark) -> str:
    for row in result.rows:
        for reason in (row.failure, *(m.failure for m in row.measurements)):
            if reason:
                return f"{row.case.model}: {reason}"
    return ""


def _text(result: Benchmark, format: str) -> str:
    if format == "json":
        return _json(result.to_dict())
    return {"text": bench_text, "csv": bench_csv, "html": bench_html}[format](result)


def _changes(changes: Changes, format: str) -> str:
    return changes_text(changes) if format == "text" else _json(changes.to_dict())


def _json(plain: dict[str, Any]) -> str:
    return json.dumps(plain, indent=None, separators=(",", ":")) + "\n"


def _epilog() -> str:
    lines = ["variants:"]
    wide = max(len(engine.name) for engine in ENGINES)
    lines += [f"  {engine.name:{wide}}  {engine.label}" for engine in ENGINES]
    lines += ["", "suites:"]
    lines += [f"  {suite.name:{wide}}  {suite.about}" for suite in SUITES]
    return "\n".join(lines)
