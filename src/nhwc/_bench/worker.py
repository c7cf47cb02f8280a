"""The process that runs one engine: it sleeps on its link whenever another engine is at work.

A model that has no name comes as pickled bytes, from the same parent through the same link and
never from a file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import pickle
import time
import zipfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import MissingPackage, NhwcError
from ..machine.timing import timer_for
from ..models.kinds import module_of
from ..models.scripts import script_in
from ..models.vision import import_torchvision
from ..shown import shown
from ..zoo import inputs_for, load_model, randomize_batchnorm_, randomize_constants_
from .engines import find_engine
from .floor import find_floor
from .peak import peak_bytes, reset_peak, resident_bytes
from .propagation import propagation
from .results import Case
from .step import StepCall, autocast
from .truth import Truth, find_truth

WARMUP = 2
"""Calls after the first ones that are timed only to plan the turns."""

SLOW_S = 1.0
"""A call that takes longer gains nothing from warm caches: it has no untimed one before it."""


class WrongOutput(Exception):
    """An engine's output differs from the model's by more than the case allows."""


@dataclasses.dataclass
class Running:
    """An engine that is ready to be timed."""

    call: Callable[[], Any]
    device: str
    resident_before: int | None
    warm_calls: int = 0
    """Untimed calls at the start of a turn: another engine's turn has left the caches cold."""

    def pace(self) -> float:
        """Return the seconds of a call, and decide whether a turn has to warm the caches."""
        first = min(self.burst(1))
        if first > SLOW_S:
            return first
        self.warm_calls = 1
        return min(self.burst(WARMUP))

    def burst(self, calls: int) -> list[float]:
        """Time `calls` calls in a row."""
        seconds = timer_for(self.device)
        training = isinstance(self.call, StepCall)
        with contextlib.nullcontext() if training else torch.inference_mode():
            for _ in range(self.warm_calls):
                self.call()
            return [seconds(self.call) for _ in range(calls)]

    def finish(self) -> dict[str, Any]:
        peak = peak_bytes(self.device)
        if peak is None or self.resident_before is None:
            return {"peak_bytes": None}
        return {"peak_bytes": max(0, peak - self.resident_before)}


@dataclasses.dataclass
class Built:
    """The model and its inputs: the same numbers in every process."""

    case: Case
    model: nn.Module
    inputs: tuple[Tensor, ...]
    resident_before: int | None


def build(case: Case, sent: bytes) -> Built:
    """Build the model by its name, with random batch-norm statistics, or take the one sent."""
    torch.set_num_threads(case.threads)
    if (index := torch.device(case.device).index) is not None:
        # CUDA events are recorded on the current device, even if the model is on another.
        torch.cuda.set_device(index)
    before = resident_bytes(case.device)
    if sent:
        model = _received(sent)
    else:
        model = load_model(case.model, weights=case.weights, seed=case.seed)
    inputs = tuple(inputs_for(model, case.shapes, case.seed))
    if not sent and case.weights is None:
        randomize_constants_(model, case.seed)
        randomize_batchnorm_(model, case.seed, inputs=inputs)
    moved = tuple(x.to(case.device) for x in inputs)
    return Built(case, model.to(case.device), moved, before)


def _received(sent: bytes) -> nn.Module:
    """Read the model that the parent sent: TorchScript and exported programs come as archives."""
    file = io.BytesIO(sent)
    if not zipfile.is_zipfile(file):
        model: nn.Module = pickle.loads(sent)
        return model
    with zipfile.ZipFile(file) as archive:
        is_script = any(name.endswith("/constants.pkl") for name in archive.namelist())
    file.seek(0)
    return module_of(script_in(sent) if is_script else torch.export.load(file), "bench")


def convert(built: Built, request: dict[str, Any]) -> dict[str, Any]:
    """Write the files that the engine reads into a folder of its own."""
    engine, folder = find_engine(request["variant"]), Path(request["folder"])
    # Converters leave other files in the working directory, too.
    os.chdir(folder)
    start = time.perf_counter()
    with torch.no_grad():
        if engine.convert is not None:
            engine.convert(built.model, built.inputs, folder)
    return {"setup_s": time.perf_counter() - start}


def prepare(built: Built, request: dict[str, Any]) -> tuple[Running, dict[str, Any]]:
    """Set the engine up, and compare its first answer with the truth."""
    case, engine = built.case, find_engine(request["variant"])
    truth = Truth.load(Path(request["truth"]))
    start = time.perf_counter()
    source = Path(request["folder"]) if engine.convert else built.model
    with contextlib.nullcontext() if case.train else torch.no_grad():
        function, arguments = engine.prepare(source, built.inputs)
    call: Callable[[], Any]
    if case.train:
        call = StepCall(built.model, function, arguments, amp=case.amp)
        output: Any = call.check()
        call()
    else:
        call = _inference(function, arguments, case)
        with torch.inference_mode():
            output = call()
    if case.device != "cpu":
        torch.cuda.synchronize()
    setup_s = time.perf_counter() - start
    error = truth.error_of(output)
    if not error <= truth.allowed:
        raise WrongOutput(f"wrong output: error {error:.1e}, allowed is {truth.allowed:.1e}")
    # Only what the engine itself holds on to should count in its memory.
    del built.model, source, output, truth
    answer: dict[str, Any] = {"setup_s": setup_s, "error": error, "version": engine.version}
    if engine.folding is not None:
        answer |= vars(engine.folding(function))
    del function
    running = Running(call, case.device, built.resident_before)
    reset_peak(case.device)
    answer["seconds"] = running.pace()
    return running, {**answer, "warm_calls": running.warm_calls}


def _inference(function: Callable[..., Any], arguments: tuple[Any, ...], case: Case) -> Any:
    if not case.amp:
        return lambda: function(*arguments)

    def call() -> Any:
        with autocast(case.device.split(":")[0], True):
            return function(*arguments)

    return call


def tell_truth(built: Built, request: dict[str, Any]) -> dict[str, Any]:
    """Save the model's float64 answer; say how it keeps its memory format, and what its floor is.

    The floor is that of float32: other precisions have other peaks.
    """
    case = built.case
    clean = "" if case.train else propagation(built.model, built.inputs)
    floor = None if case.train or case.amp else find_floor(built.model, built.inputs)
    truth = find_truth(built.model, built.inputs, train=case.train, amp=case.amp)
    truth.save(Path(request["truth"]))
    return {"propagation": clean, "floor": floor}


def warm() -> None:
    """Import once what most models need: it takes seconds, and each variant has a worker.

    A model's own code would import it where it counts as the model's memory.
    """
    with contextlib.suppress(MissingPackage):
        import_torchvision()


def serve(link: Connection) -> None:
    """Answer requests until the parent closes the link or dies.

    They come in this order: build; then truth, or convert, or prepare, any number of bursts, and
    finish.
    """
    built: Built | None = None
    running: Running | None = None
    with contextlib.suppress(EOFError):
        while True:
            request = link.recv()
            answer: dict[str, Any] = {}
            try:
                if request["do"] == "build":
                    built = build(request["case"], request["sent"])
                elif request["do"] == "truth" and built:
                    answer = tell_truth(built, request)
                elif request["do"] == "convert" and built:
                    answer = convert(built, request)
                elif request["do"] == "prepare" and built:
                    running, answer = prepare(built, request)
                elif request["do"] == "burst" and running:
                    answer = {"seconds": running.burst(request["calls"])}
                elif request["do"] == "finish" and running:
                    answer = running.finish()
            except Exception as error:
                # Engines may raise anything; the row of one that fails says why.
                answer = {"failure": reason_of(error)}
            link.send(answer)


def reason_of(error: BaseException) -> str:
    """Return the first line of the error that is not blank, short enough for a table.

    >>> reason_of(ValueError("no such thing\\nand more"))
    'ValueError: no such thing'
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    if isinstance(error, (WrongOutput, NhwcError)):
        return shown(text)
    return shown(f"{type(error).__name__}: {text}") if text else type(error).__name__
