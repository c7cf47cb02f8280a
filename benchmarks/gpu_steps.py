"""The steps of benchmarks.gpu, each in a process that ends with it.

Every step takes the `Size` of its work and the `Rows` that it fills. A row holds `seconds`, a list
for each way that was timed in turns with the others, or `failure`, why there are none.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import nhwc
from nhwc._bench import SUITES
from nhwc._bench.step import StepCall, autocast
from nhwc._bench.worker import reason_of
from nhwc.machine.environment import Environment
from nhwc.machine.timing import interleave
from nhwc.models.vision import mend_torchvision
from nhwc.zoo import load_model, randomize_batchnorm_

from .gpu_rows import WHOLE, Rows

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
VOLTA = next(suite for suite in SUITES if suite.name == "volta")

Way = Callable[[], object]


@dataclass(frozen=True)
class Size:
    """How much a step computes, and where."""

    device: str = "cuda"
    image: int = 224
    rounds: int = 15
    volta: tuple[str, ...] = VOLTA.models
    volta_batch: int = 64
    compiled: tuple[str, ...] = ("resnet50", "mobilenet_v2", "shufflenet_v2_x1_0", "vgg16_bn")
    trained: str = "resnet50"
    train_batch: int = 200
    optimized: tuple[str, ...] = (
        *("resnet50", "mobilenet_v3_large", "convnext_tiny", "efficientnet_b0", "densenet121"),
        *("regnet_y_400mf", "mobilenet_v2", "shufflenet_v2_x1_0", "vgg16", "resnet18"),
    )
    optimize_batch: int = 8
    mobilenet: str = "mobilenet_v3_large"
    mobilenet_batch: int = 128
    backend: str = "inductor"
    operators: tuple[tuple[str, ...], ...] = (
        ("nn.functional.*conv*", "nn.functional.*pool*", "nn.functional.*norm*"),
        ("nn.functional.*",),
        (),
    )
    tests: tuple[str, ...] = ()


TINY = "benchmarks.gpu_steps:tiny"
REHEARSAL = Size(
    device="cpu",
    image=16,
    rounds=2,
    volta=(TINY,),
    volta_batch=2,
    compiled=(TINY,),
    trained=TINY,
    train_batch=2,
    optimized=(TINY,),
    optimize_batch=1,
    mobilenet=TINY,
    mobilenet_batch=2,
    backend="aot_eager",
    operators=(("nn.functional.grid_sample",),),
    tests=("train/test_step.py",),
)


def tiny() -> nn.Module:
    """The model of the rehearsal."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 10),
    )


def run_tests(size: Size, rows: Rows) -> None:
    """The tests that need a GPU, each a row."""
    marked = sorted(p for p in TESTS.rglob("test_*.py") if "pytest.mark.gpu" in p.read_text())
    files = [TESTS / name for name in size.tests] or marked
    # The project's own settings ask for plugins that may not be here.
    options = ["-c", os.devnull, "--rootdir", str(ROOT), "--confcutdir", str(ROOT)]
    command = [sys.executable, "-m", "pytest", *options, "-p", "no:cacheprovider", "-v", "-rfE"]
    running = subprocess.Popen(
        [*command, "-m", "gpu", *map(str, files)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said = []
    for line in running.stdout or ():
        said.append(line.rstrip())
        found = re.match(r"(\S+::\S.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)", line)
        if found:
            rows.add(test=found[1].removeprefix("tests/"), outcome=found[2].lower())
    status = running.wait()
    reasons = [line for line in said if line.startswith(("FAILED", "ERROR", "E  "))]
    rows.add(exit_status=status, said=reasons[:60] or said[-3:])


def compare_volta(size: Size, rows: Rows) -> None:
    """The volta suite in mixed precision, NCHW against NHWC: eager, then some compiled."""
    for how, names in (("eager", size.volta), ("compile", size.compiled)):
        for name in names:
            prepare = (lambda model: model) if how == "eager" else _compiler(size)

            def ways(name: str = name, prepare: Any = prepare) -> dict[str, Way]:
                image = _image(size, size.volta_batch)
                return {
                    "nchw": _inference(prepare(_model(name, size)), image, size),
                    "nhwc": _inference(
                        prepare(nhwc.convert_(_model(name, size))), _nhwc(image), size
                    ),
                }

            _timed(rows, size, ways, model=name, how=how, batch=size.volta_batch)


def compare_training(size: Size, rows: Rows) -> None:
    """A training step in mixed precision on a batch that stays on the device."""
    batch = size.train_batch
    while batch:
        failure = _compare_steps(size, rows, size.trained, batch, how="eager")
        if "OutOfMemory" not in failure:
            return
        batch //= 2


def compare_mobilenet(size: Size, rows: Rows) -> None:
    """A training step of MobileNetV3, eager and compiled."""
    for how in ("eager", "compile"):
        _compare_steps(size, rows, size.mobilenet, size.mobilenet_batch, how=how)


def compare_optimize(size: Size, rows: Rows) -> None:
    """`optimize` in float32 against eager and torch.compile; then against max-autotune."""
    default, most = ("default", "max-autotune")
    first, rest = size.optimized[:2], size.optimized[2:]
    # Searching takes long, so some are searched early, the others if there is time.
    order = [(name, how) for how in (default, most) for name in first]
    order += [(name, how) for how in (default, most) for name in rest]
    for name, how in order:

        def ways(name: str = name, how: str = how) -> dict[str, Way]:
            image = _image(size, size.optimize_batch)
            last = _nhwc(image)
            compiled = _compiler(size, how)(nhwc.convert_(_model(name, size)))
            found = {
                "eager": _inference(_model(name, size), image, None),
                "compile": _inference(compiled, last, None),
            }
            try:
                fast = nhwc.optimize(_model(name, size), last)
            except Exception as error:
                # The others are still worth a row.
                rows.add(model=name, how=how, failure=f"optimize: {reason_of(error)}")
                return found
            return {**found, "optimize": _inference(fast, last, None)}

        _timed(rows, size, ways, model=name, how=how, batch=size.optimize_batch)


def check_operators(size: Size, rows: Rows) -> None:
    """The table of operators: those that matter most first, then more, then all."""
    for names in size.operators:
        found = nhwc.ops(*names, device=size.device, dtypes=("float32",), timed=False)
        rows.rows = [
            {"operator": operator.title, "outcome": operator.outcome().value}
            for operator in found.operators
        ]
        rows.write()


@dataclass(frozen=True)
class Step:
    """One step: its name, which is that of its file, its limit, and what it does."""

    name: str
    limit_s: float
    work: Callable[[Size, Rows], None]


STEPS = (
    Step("tests", 75.0, run_tests),
    Step("train", 60.0, compare_training),
    Step("mobilenet", 60.0, compare_mobilenet),
    Step("volta", 110.0, compare_volta),
    Step("operators", 60.0, check_operators),
    Step("optimize", 300.0, compare_optimize),
)
"""In the order in which they run. The last has the most to do and gets what time is left."""


def warm() -> None:
    """Import once what every step needs."""
    mend_torchvision()


def serve(link: Connection) -> None:
    """Do one step and say how it ended."""
    request = link.recv()
    size = REHEARSAL if request["rehearse"] else Size()
    rows = Rows.read(Path(request["file"]))
    ended = WHOLE
    try:
        rows.environment = Environment.here(size.device).to_dict()
        rows.write()
        torch.backends.cudnn.benchmark = True
        step = next(step for step in STEPS if step.name == request["step"])
        step.work(size, rows)
    except Exception as error:
        # Whatever ends a step, its file says so, and the next one begins.
        ended = reason_of(error)
    rows.write()
    link.send(ended)


def _compare_steps(size: Size, rows: Rows, name: str, batch: int, *, how: str) -> str:
    """Time a training step in both layouts; return why it could not be, if so."""

    def ways() -> dict[str, Way]:
        made: dict[str, Way] = {}
        for layout in ("nchw", "nhwc"):
            model, image = _model(name, size), _image(size, batch)
            if layout == "nhwc":
                model, image = nhwc.convert_(model), _nhwc(image)
            function = model if how == "eager" else _compiler(size)(model)
            made[layout] = StepCall(model, function, (image,), amp=True)
        return made

    return _timed(rows, size, ways, grad=True, model=name, how=how, batch=batch)


def _timed(
    rows: Rows,
    size: Size,
    ways: Callable[[], Mapping[str, Way]],
    *,
    grad: bool = False,
    **named: Any,
) -> str:
    """Time the ways in turns and add a row; return why there are no times, if so."""
    failure = ""
    try:
        made = ways()
        with torch.inference_mode(not grad):
            found = interleave(made, rounds=size.rounds, warmup=3, device=size.device)
        seconds = {way: list(samples.seconds) for way, samples in found.items()}
        rows.add(**named, seconds=seconds)
    except Exception as error:
        # A row that says why is worth more than a step that ends.
        failure = reason_of(error)
        rows.add(**named, failure=failure)
    torch.compiler.reset()
    if size.device == "cuda":
        torch.cuda.empty_cache()
    return failure


def _model(name: str, size: Size) -> nn.Module:
    with torch.device(size.device):
        return randomize_batchnorm_(load_model(name))


def _image(size: Size, batch: int) -> Tensor:
    return torch.randn(batch, 3, size.image, size.image, device=size.device)


def _nhwc(image: Tensor) -> Tensor:
    return nhwc.to_format(image, nhwc.Format.CHANNELS_LAST)


def _compiler(size: Size, mode: str = "default") -> Callable[[nn.Module], Any]:
    if size.backend != "inductor":
        return lambda model: torch.compile(model, backend=size.backend)
    return lambda model: torch.compile(model, mode=mode)


def _inference(model: Any, image: Tensor, mixed: Size | None) -> Way:
    """A call of the model; in mixed precision where there is a `Size` that says on what device."""
    if mixed is None:
        return lambda: model(image)

    def call() -> object:
        with autocast(mixed.device, True):
            return model(image)

    return call
