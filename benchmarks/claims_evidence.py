"""What is held against a claim: rules run here, audits run here, and what was recorded."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from nhwc._bench import SUITES, Benchmark, load_benchmark
from nhwc._bench.results import geometric_mean

from .claims_checks import CHECKS

RESULTS = Path(__file__).parent / "results"
OPERATORS = Path(__file__).parents[1] / "docs" / "operators-torch-2.13-cpu.json"

SHOWN, EXCEEDED, NOT_HERE = "shown", "exceeded", "not here"
GPU, LATER = "needs a GPU", "not recorded yet"
OUTCOMES = (SHOWN, EXCEEDED, NOT_HERE, GPU, LATER)


@dataclass(frozen=True)
class Found:
    """The outcome of a claim here, and what was seen."""

    outcome: str
    words: str


class Evidence:
    """Runs each command once, when a claim first asks for it."""

    def __init__(self) -> None:
        self.audits: dict[tuple[str, ...], dict[str, Any]] = {}

    @cached_property
    def rules(self) -> dict[str, dict[str, Any]]:
        rules = nhwc("ops", "--rules", "--format", "json")["rules"]
        return {rule["claim"]: rule for rule in rules}

    @cached_property
    def operators(self) -> list[dict[str, Any]]:
        operators: list[dict[str, Any]] = json.loads(OPERATORS.read_text())["operators"]
        return operators

    def audit(self, *arguments: str) -> dict[str, Any]:
        if arguments not in self.audits:
            self.audits[arguments] = nhwc("audit", *arguments, "--format", "json")
        return self.audits[arguments]


Look = Callable[[Evidence], Found]


def nhwc(*arguments: str) -> dict[str, Any]:
    """What the command line says, as data; a rule that fails makes it exit with 1."""
    done = subprocess.run(
        [sys.executable, "-m", "nhwc", *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode > 1:
        raise RuntimeError(f"nhwc {' '.join(arguments)}: {done.stderr.strip()}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def rule(*claims: str, outcome: str = SHOWN) -> Look:
    """All of these rules hold on this torch."""

    def look(evidence: Evidence) -> Found:
        missing = [claim for claim in claims if claim not in evidence.rules]
        if missing:
            raise RuntimeError(f"`nhwc ops --rules` has no such rule: {'; '.join(missing)}")
        found = [evidence.rules[claim] for claim in claims]
        wrong = [r for r in found if not r["passed"]]
        if wrong:
            words = "; ".join(f"{r['claim']}: {r['measured']}" for r in wrong)
            return Found(NOT_HERE, words)
        return Found(outcome, "; ".join(f"{r['claim']}: {r['measured']}" for r in found))

    return look


def check(name: str, outcome: str = SHOWN) -> Look:
    """A program of `claims_checks` runs through."""
    (program,) = (program for program in CHECKS if program.__name__ == name)

    def look(evidence: Evidence) -> Found:
        try:
            return Found(outcome, program())
        except AssertionError as error:
            return Found(NOT_HERE, f"the program says otherwise: {error}".rstrip(": "))

    return look


def kept(*names: str, aspects: Iterable[str] = ("forward", "backward")) -> Look:
    """These operators keep the format of images in the recorded table."""

    def look(evidence: Evidence) -> Found:
        found = [op for op in evidence.operators if op["name"].rpartition(".")[2] in names]
        lost = [
            f"{op['name']} {op['variant']} {aspect}: {outcome}"
            for op in found
            for aspect, dims, outcome, *_ in op["rows"]
            if aspect in aspects and dims == 4 and outcome not in ("keeps", "view", "no format")
        ]
        seen = sorted({op["name"].rpartition(".")[2] for op in found})
        if lost or len(seen) < len(names):
            return Found(NOT_HERE, "; ".join(lost) or f"only {', '.join(seen)} are in the table")
        return Found(SHOWN, f"{', '.join(seen)} keep it, {' and '.join(aspects)}")

    return look


def losing(evidence: Evidence) -> Found:
    """How many operators of the table do not keep the format of images."""
    bad = ("loses", "sometimes loses", "converts inside")
    lost = [
        op
        for op in evidence.operators
        if any(r[0] == "forward" and r[1] == 4 and r[2] in bad for r in op["rows"])
    ]
    some = ", ".join(sorted({op["name"] for op in lost if "nn.functional" in op["name"]})[:4])
    total = len(evidence.operators)
    return Found(SHOWN, f"{len(lost)} of {total} lose it or copy inside, forward: {some}, ...")


def faster(*names: str) -> Look:
    """Most of these operators are faster in channels last, in the recorded table."""
    return _most(names, lambda ratio: ratio >= 1.1, "are faster")


def level(*names: str) -> Look:
    """Most of these operators take the same time in both formats, within a fifth."""
    return _most(names, lambda ratio: 1 / 1.2 <= ratio <= 1.2, "take the same time within a fifth")


def _most(names: tuple[str, ...], fits: Callable[[float], bool], what: str) -> Look:
    def look(evidence: Evidence) -> Found:
        ratios = {
            f"{op['name'].rpartition('.')[2]} {op['variant']}".strip(): speed[5]
            for op in evidence.operators
            if op["name"].rpartition(".")[2] in names
            for speed in op.get("speeds", ())
            if speed[1].count("x") == 3
        }
        good = sum(map(fits, ratios.values()))
        told = ", ".join(f"{name} {ratio:.2f}x" for name, ratio in ratios.items())
        outcome = SHOWN if good > len(ratios) / 2 else NOT_HERE
        return Found(outcome, f"{good} of {len(ratios)} {what}: {told}")

    return look


def audited(
    judge: Callable[[dict[str, Any]], tuple[bool, str]], *arguments: str, outcome: str = SHOWN
) -> Look:
    """An audit run here, and what is read from it."""

    def look(evidence: Evidence) -> Found:
        held, words = judge(evidence.audit(*arguments))
        return Found(outcome if held else NOT_HERE, words)

    return look


def inside(judge: Callable[[dict[str, Any]], tuple[bool, str]], *arguments: str) -> Look:
    """The same of what oneDNN told."""

    def look(evidence: Evidence) -> Found:
        report = evidence.audit(*arguments)
        if report["reorders"] is None:
            return Found(NOT_HERE, "; ".join(report["unseen"]))
        held, words = judge(report["reorders"])
        return Found(SHOWN if held else NOT_HERE, words)

    return look


def suite(file: str, outcome_of_gain: str | None = None) -> Look:
    """The published gain of a suite, in a file that `nhwc bench --suite` recorded.

    It comes in here when the file is there: `python -m benchmarks.published` writes blog, fusion
    and apex.
    """

    def look(evidence: Evidence) -> Found:
        path = RESULTS / f"{file}.json"
        if not path.exists():
            return Found(LATER, f"`benchmarks/results/{path.name}` is not there")
        return _judged(load_benchmark(path), outcome_of_gain)

    return look


def _judged(result: Benchmark, outcome: str | None) -> Found:
    rows = [row for row in result.rows if row.published is not None]
    published = next((row.published for row in rows), None)
    gains = [
        gain.ratio
        for row in rows
        if published and (gain := row.comparison(published.after, published.before))
    ]
    if not gains or published is None:
        return Found(LATER, "no row of it was measured")
    counts: dict[str, int] = {}
    for row in rows:
        counts[row.judgement] = counts.get(row.judgement, 0) + 1
    told = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
    mean = geometric_mean(gains)
    words = (
        f"{mean:.2f}x in the mean, {min(gains):.2f}-{max(gains):.2f}x; of {len(rows)} rows "
        f"{told} ({_processor(result)})"
    )
    if outcome is None:
        outcome = SHOWN if mean >= (published.low or 1.0) else NOT_HERE
        outcome = EXCEEDED if published.high and mean > published.high else outcome
    return Found(outcome, words)


def _processor(result: Benchmark) -> str:
    here = result.environment
    return f"{here.processor} {here.instruction_set}, {here.threads} threads"


def stepwise(file: str, after: str, before: str) -> Look:
    """What one step gains on ResNet-18, of two variants in a recorded file."""

    def look(evidence: Evidence) -> Found:
        path = RESULTS / f"{file}.json"
        if not path.exists():
            return Found(LATER, f"`benchmarks/results/{path.name}` is not there")
        result = load_benchmark(path)
        for row in result.rows:
            gain = row.comparison(after, before)
            if row.case.model == "resnet18" and gain is not None:
                low, high = gain.interval
                words = f"{gain.ratio:.2f}x ({low:.2f}-{high:.2f}) ({_processor(result)})"
                return Found(SHOWN if gain.ratio > 1 and low > 0.97 else NOT_HERE, words)
        return Found(LATER, "its ResNet-18 was not measured")

    return look


def clean(suite_name: str, *files: str) -> Look:
    """Whether the models of a suite keep the format throughout, by what was recorded of them."""
    (models,) = (suite.models for suite in SUITES if suite.name == suite_name)

    def look(evidence: Evidence) -> Found:
        recorded = [load_benchmark(RESULTS / f"{file}.json") for file in files]
        rows = {row.case.model: row.propagation for result in recorded for row in result.rows}
        lost = {model: rows[model] for model in models if rows.get(model, "clean") != "clean"}
        unknown = [model for model in models if model not in rows]
        words = f"{len(models) - len(lost) - len(unknown)} of {len(models)} keep it throughout"
        words += f"; not recorded: {', '.join(unknown)}" if unknown else ""
        if not lost:
            return Found(LATER if unknown else SHOWN, words)
        told = "; ".join(f"{model}: {what}" for model, what in lost.items())
        return Found(NOT_HERE, f"{words}; {told}{_mended(lost)}")

    return look


def _mended(models: Iterable[str]) -> str:
    """What the sweep found of these models after the passes of `nhwc optimize`."""
    rows = json.loads((RESULTS / "zoo_sweep.json").read_text())
    after = [rows[model]["lost_after"] for model in models]
    return "; after the passes of `nhwc optimize` none does" if not any(after) else ""


def gpu_tests(evidence: Evidence) -> Found:
    """What the tests marked `gpu` said, when `benchmarks.gpu` has run them."""
    path = RESULTS / "gpu" / "tests.json"
    if not path.exists():
        return NO_GPU
    outcomes = [row["outcome"] for row in json.loads(path.read_text())["rows"] if "test" in row]
    passed = outcomes.count("passed")
    held = passed and passed == len(outcomes)
    return Found(
        SHOWN if held else NOT_HERE, f"{passed} of {len(outcomes)} tests marked gpu passed"
    )


NO_GPU = Found(GPU, "written for CUDA, and not run on one yet")


def gpu(step: str = "", low: float = 1.0, high: float = 10.0, on_cpu: str = "") -> Look:
    """Comes in when benchmarks/results/gpu has the file of a step of `benchmarks.gpu`.

    Until then, what the suite `on_cpu` gained without a GPU stands there, if it was recorded.
    """

    def look(evidence: Evidence) -> Found:
        path = RESULTS / "gpu" / f"{step}.json"
        if not step or not path.exists():
            if on_cpu and (RESULTS / f"{on_cpu}.json").exists():
                return Found(GPU, f"on a CPU: {suite(on_cpu)(evidence).words}")
            return NO_GPU
        data = json.loads(path.read_text())
        eager = [
            row["seconds"] for row in data["rows"] if row.get("how") == "eager" and "seconds" in row
        ]
        gains = [median(one["nchw"]) / median(one["nhwc"]) for one in eager]
        if not gains:
            return Found(GPU, "its rows were not measured")
        mean = geometric_mean(gains)
        outcome = EXCEEDED if mean > high else SHOWN if mean >= low else NOT_HERE
        words = f"{min(gains):.2f}-{max(gains):.2f}x, {mean:.2f}x in the mean of {len(gains)} rows"
        return Found(outcome, words)

    return look


def said(outcome: str, words: str) -> Look:
    """What cannot be run by the script, with its reason or its place."""
    return lambda evidence: Found(outcome, words)
