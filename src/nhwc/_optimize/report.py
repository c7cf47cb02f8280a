"""The report of an optimization: every pass, every layer, the errors and the times."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ..displayed import Displayed
from ..graph.report import Opaque, PassReport
from ..machine.environment import Environment
from ..machine.timing import Comparison, Samples
from ..verify import Verification


@dataclass(frozen=True)
class KernelTime:
    """One kernel that could serve a layer, the layout it reads, and its time."""

    kernel: str
    layout: str
    seconds: float


@dataclass(frozen=True)
class LayerReport:
    """One layer of a plan: the kernel that was chosen, and all that stood to choice.

    A layer with only one kernel is not timed; its time is 0.
    """

    name: str
    what: str
    chosen: KernelTime
    kernels: tuple[KernelTime, ...]

    @property
    def gain(self) -> float | None:
        """How many times faster the choice is than torch's own kernel on contiguous data."""
        own = [k for k in self.kernels if (k.kernel, k.layout) == ("torch", "contiguous")]
        return own[0].seconds / self.chosen.seconds if own and self.chosen.seconds else None


@dataclass(frozen=True)
class PlanReport:
    """The plan for one set of input shapes, or why there is none.

    `part` is the path of a graph inside a part that could not be traced; empty for the whole model.
    `opened` are the parts that could be traced for these shapes, though not for all shapes. Their
    insides are among `layers`, and `passes` reports what the passes did in them.
    """

    inputs: tuple[str, ...]
    layers: tuple[LayerReport, ...]
    conversions: int
    measured: int
    reason: str = ""
    part: str = ""
    opened: tuple[Opaque, ...] = ()
    passes: tuple[PassReport, ...] = ()

    @property
    def planned(self) -> bool:
        return not self.reason


@dataclass(frozen=True)
class OptimizeReport(Displayed):
    """How `optimize` made the model that it returned.

    `compared` has `graph` (the model after the passes) and `plan`, each timed in turns with `input`
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

    @property
    def comparison(self) -> Comparison:
        """The model as it was given against the one that was returned."""
        return Comparison(self.times["input"], self.times[self.chosen])

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
            "plans": [asdict(plan) for plan in self.plans],
            "verification": self.verification.to_dict(),
            "ratios": self.ratios,
            "inputs_times": {n: list(s.seconds) for n, s in self.inputs_times.items()},
            "times": {name: list(samples.seconds) for name, samples in self.times.items()},
            "remembered": self.remembered,
            "setup_s": self.setup_s,
            "environment": self.environment.to_dict(),
        }
