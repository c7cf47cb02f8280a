"""The report of an optimization: every pass, every layer, the errors and the times."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from ..displayed import Displayed
from ..graph.report import Opaque, PassReport
from ..machine.environment import Environment
from ..machine.others import Others
from ..machine.timing import SAME, Comparison, Samples
from ..verify import Verification

_MUCH_SLOWER = 1.5
_OF_ALL_LAYERS = 0.01
"""A share of their time from which on it is told what slower kernels cost."""

_OF_A_CALL_S = 1e-3
"""What a call may take besides its layers, before its time is doubted."""


def much_slower(whole_s: float, layers_s: float) -> bool:
    """Whether a program takes much longer than its layers do alone: a moment may have disturbed it.

    >>> much_slower(0.040, 0.010), much_slower(0.012, 0.010), much_slower(1e-4, 1e-6)
    (True, False, False)
    """
    return layers_s > 0 and whole_s > _MUCH_SLOWER * layers_s + _OF_A_CALL_S


@dataclass(frozen=True)
class KernelTime:
    """One kernel that could serve a layer, the layout it reads, and its time.

    The time is the least of `turns`, taken in turns with those of the layer's other kernels; their
    median lies above it by the share `spread`.
    """

    kernel: str
    layout: str
    seconds: float
    spread: float = 0.0
    turns: int = 0


@dataclass(frozen=True)
class WholeTime:
    """A choice for all layers, timed as a whole program in so many sittings."""

    seconds: float
    sittings: int
    taken: bool


@dataclass(frozen=True)
class LayerReport:
    """One layer of a plan: the kernel that was chosen, and all that stood to choice.

    A layer with only one kernel is not timed; its time is 0. `sureness` is `settled`, `even` if
    kernels cannot be told apart and the first in a fixed order was taken, `open` if the next
    `optimize` measures again, or empty if there was no choice.
    """

    name: str
    what: str
    chosen: KernelTime
    kernels: tuple[KernelTime, ...]
    sureness: str = ""

    @property
    def lag_s(self) -> float:
        """By how much the choice is slower than the fastest kernel, each alone."""
        return max(0.0, self.chosen.seconds - min(kernel.seconds for kernel in self.kernels))

    @property
    def gain(self) -> float | None:
        """How many times faster the choice is than torch's own kernel on contiguous data."""
        own = [k for k in self.kernels if (k.kernel, k.layout) == ("torch", "contiguous")]
        return own[0].seconds / self.chosen.seconds if own and self.chosen.seconds else None


@dataclass(frozen=True)
class Fallback:
    """An operator that a plan leaves to torch: where, what that takes, and why.

    `seconds` is the sum over `places`, each timed in its place in a call; `share` is that of all
    steps of a call.
    """

    operator: str
    places: tuple[str, ...]
    seconds: float
    share: float
    reason: str


@dataclass(frozen=True)
class PlanReport:
    """The plan for one set of input shapes, or why there is none.

    `part` is the path of a graph inside a part that could not be traced; empty for the whole model.
    `opened` are the parts that could be traced for these shapes, though not for all shapes. Their
    insides are among `layers`, and `passes` reports what the passes did in them. It is for the
    numbers of some inputs alone, too, if it `counts`: `inputs` says which. `unset` are
    attributes that the model sets in a call and this plan does not: no call reads them. `layers_s`
    is what layers, and conversions between them, take when each is timed alone; `measured` counts
    what was timed for the first time, `renewed` what was timed again because it was not settled.
    `wholes` are the choices that were timed as whole programs, the one by single layers first.
    `fallbacks` is what is left to torch, the most costly first.
    """

    inputs: tuple[str, ...]
    layers: tuple[LayerReport, ...]
    conversions: int
    measured: int
    reason: str = ""
    part: str = ""
    opened: tuple[Opaque, ...] = ()
    counts: bool = False
    unset: tuple[str, ...] = ()
    passes: tuple[PassReport, ...] = ()
    renewed: int = 0
    layers_s: float = 0.0
    wholes: tuple[WholeTime, ...] = ()
    fallbacks: tuple[Fallback, ...] = ()

    @property
    def planned(self) -> bool:
        return not self.reason

    @property
    def sureness(self) -> str:
        """How sure the choices are, in sentences; empty if there was none to make."""
        return " ".join((*_counted(self), *_against_figures(self), *_as_wholes(self)))

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "sureness": self.sureness}


def _counted(plan: PlanReport) -> Iterator[str]:
    counts = Counter(layer.sureness for layer in plan.layers)
    settled, even, waiting = (counts[name] for name in ("settled", "even", "open"))
    if not settled + even + waiting:
        return
    words = [f"{settled} settled"]
    if even:
        words.append(f"{even} even, where the first in a fixed order is taken")
    if waiting:
        words.append(f"{waiting} open, which a later optimize measures again")
    yield f"Choices of kernels: {'; '.join(words)}."


def _against_figures(plan: PlanReport) -> Iterator[str]:
    own = [layer for layer in plan.layers if layer.chosen in layer.kernels]
    lags = [layer.lag_s for layer in own if layer.lag_s > SAME * layer.chosen.seconds]
    if sum(lags) > _OF_ALL_LAYERS * plan.layers_s:
        yield (
            f"Chosen, though not the fastest alone: {len(lags)} kernel{'s' * (len(lags) > 1)}, by "
            f"{_ms(sum(lags))} in all; conversions, calls or memory would cost more, or "
            "the whole is faster."
        )


def _as_wholes(plan: PlanReport) -> Iterator[str]:
    taken = next((one for one in plan.wholes[1:] if one.taken), None)
    if taken:
        yield (
            f"Taken for its time as a whole, {_ms(taken.seconds)} in {taken.sittings} "
            f"sitting{'s' * (taken.sittings > 1)}; the choice by single layers takes "
            f"{_ms(plan.wholes[0].seconds)}."
        )


def _ms(seconds: float) -> str:
    """
    >>> _ms(0.0123456), _ms(1.23456)
    ('12.3 ms', '1230 ms')
    """
    return f"{float(f'{seconds * 1e3:.3g}'):g} ms"


@dataclass(frozen=True)
class OptimizeReport(Displayed):
    """How `optimize` made the model that it returned.

    >>> import torch
    >>> import nhwc
    >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8)).eval()
    >>> report = nhwc.optimize(net, torch.rand(1, 3, 16, 16)).report
    >>> report.verification.passed, report.inputs
    (True, ('1x3x16x16 float32',))
    >>> [site.what for done in report.passes for site in done.applied]
    ['0 + 1']
    >>> report.chosen in ("plan", "graph", "input")  # what was fastest; `comparison` has its times
    True

    `others` is what other programs had of the cores meanwhile, where that is known. `compared` has
    `graph` (the model after the passes) and `plan`, each timed in turns with `input`
    (the model as it was given); `chosen` names the one that was returned.
    """

    model: str
    inputs: tuple[str, ...]
    exact: bool
    chosen: str
    reason: str
    passes: tuple[PassReport, ...]
    opaque: tuple[Opaque, ...]
    plans: tuple[PlanReport, ...]
    verification: Verification
    compared: dict[str, Comparison]
    remembered: bool
    setup_s: float
    environment: Environment
    others: Others | None = None

    @property
    def comparison(self) -> Comparison:
        """The model as it was given against the one that was returned."""
        return Comparison(self.times["input"], self.times[self.chosen])

    @property
    def doubt(self) -> str:
        """Why the times are doubted, in sentences; empty if they are not."""
        return " ".join(filter(None, (self._slow_plan, self._crowd)))

    @property
    def _slow_plan(self) -> str:
        whole = [plan for plan in self.plans if plan.planned and not plan.part]
        if "plan" not in self.compared or len(whole) != 1 or len(self.plans) != 1:
            return ""
        took, alone = self.compared["plan"].after.median_s, whole[0].layers_s
        if not much_slower(took, alone):
            return ""
        return (
            f"The plan takes {took / alone:.1f} times as long as its layers alone, "
            f"{_ms(alone)}: a later optimize times it again."
        )

    @property
    def _crowd(self) -> str:
        return f"Meanwhile {self.others}: remeasure when they have stopped." if self.busy else ""

    @property
    def busy(self) -> bool:
        """Whether other programs had the cores while the times were taken."""
        if self.remembered or self.others is None:
            return False
        return self.others.in_the_way_of(self.environment.threads)

    @property
    def inputs_times(self) -> dict[str, Samples]:
        """The samples of the input that were taken in turns with each stage's."""
        return {stage: one.before for stage, one in self.compared.items()}

    @property
    def times(self) -> dict[str, Samples]:
        """The samples of every stage, and of the input beside the one that was returned."""
        last = self.compared.get(self.chosen, [*self.compared.values()][-1])
        return {"input": last.before} | {name: one.after for name, one in self.compared.items()}

    @property
    def ratios(self) -> dict[str, float]:
        """How many times as fast as the input each stage ran, in their own turns."""
        return {stage: one.ratio for stage, one in self.compared.items()}

    def to_dict(self) -> dict[str, Any]:
        comparison = self.comparison
        return {
            "schema": 1,
            "model": self.model,
            "inputs": list(self.inputs),
            "exact": self.exact,
            "chosen": self.chosen,
            "reason": self.reason,
            "ratio": comparison.ratio,
            "interval": list(comparison.interval),
            "verdict": comparison.verdict,
            "passes": [report.to_dict() for report in self.passes],
            "opaque": [part.to_dict() for part in self.opaque],
            "doubt": self.doubt,
            "busy": self.busy,
            "plans": [plan.to_dict() for plan in self.plans],
            "verification": self.verification.to_dict(),
            "ratios": self.ratios,
            "inputs_times": {n: list(s.seconds) for n, s in self.inputs_times.items()},
            "times": {name: list(samples.seconds) for name, samples in self.times.items()},
            "remembered": self.remembered,
            "setup_s": self.setup_s,
            "environment": self.environment.to_dict(),
            "others": asdict(self.others) if self.others else None,
        }
