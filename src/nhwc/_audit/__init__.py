"""`audit`: where a model loses or converts its memory format, what it costs, what to change."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from ..displayed import Displayed
from ..formats import CHANNELS_LAST_OF, Format, format_of, restride_weights_
from ..formats.weights import convolution_weights
from ..graph.effects.outside import outside_put_back
from ..machine.environment import Environment
from ..machine.others import Others, watch_others
from ..machine.timing import Comparison, interleave
from ..models.kinds import given_by_name, module_of, true_or_false
from ..models.preserve import copy_as_is, preserved, turn
from ..models.scripts import bytes_of_script, script_in
from ..models.trees import every_tensor_of
from ..optimized import Optimized
from ..watch.calls import Call
from ..watch.effects import CallEffect, Effect, Tracker
from ..watch.profile import profiled, with_profile
from ..watch.recorder import Recorder
from .divergence import Agreement, agreement_of
from .findings import Finding, find, hidden_weights, is_note, unconverted_weights
from .images import only_of_images
from .reorders import Reorders, Untold, reorders_of
from .running import Run, as_written, check, guarded, weights_in

SCHEMA = 1


@dataclass(frozen=True)
class Audit(Displayed):
    """One run of a model: its calls, their effects on the memory format, and the findings.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8), nn.Conv2d(8, 8, 3))
    >>> report = audit(net, torch.rand(2, 3, 16, 16))
    >>> report.clean, len(report.calls), report.counts["loses"], report.counts["restores"]
    (False, 3, 1, 1)
    >>> report.to_dict()["schema"]
    1
    """

    model: str
    inputs: tuple[tuple[int, ...], ...]
    """The shapes of the input tensors."""
    calls: tuple[Call, ...]
    outcomes: tuple[CallEffect, ...]
    """The effect of each call on the format, in the order of `calls`."""
    findings: tuple[Finding, ...]
    run_s: float
    """The seconds of one run that nothing records."""
    converted: bool
    """Whether the audit converted weights and inputs to channels last for its run."""
    unseen: tuple[str, ...]
    """The parts of the model that the audit could not see, and why."""
    environment: Environment
    comparison: Comparison | None = field(default=None)
    """Contiguous against channels last, timed in turns, where it was asked for."""
    reorders: Reorders | None = field(default=None)
    """What oneDNN ran in either format, its reorders among it, where it was asked for and told."""
    agreement: Agreement | None = field(default=None)
    """Whether each call computes the same in both formats, where they were compared."""
    others: Others | None = field(default=None)
    """What other programs had of the processor meanwhile; None where that is not known."""

    @property
    def lost(self) -> tuple[Finding, ...]:
        """The findings where an operator dropped the format."""
        return tuple(f for f in self.findings if f.kind in ("lost", "misread"))

    @property
    def copies(self) -> tuple[Finding, ...]:
        """The findings where data was copied from one format to another."""
        return tuple(f for f in self.findings if f.payers or f.copied_bytes)

    @property
    def clean(self) -> bool:
        """Whether nothing was found. That also holds if no call was given channels last."""
        return not self.findings

    @property
    def judged(self) -> int:
        """How many calls worked on images, which have a format to keep or to lose."""
        return len(self.calls) - self.counts[str(Effect.NEUTRAL)]

    @property
    def busy(self) -> bool:
        """Whether other programs had the cores while the run was timed."""
        return self.others is not None and self.others.in_the_way_of(self.environment.threads)

    @property
    def cost_s(self) -> float:
        return sum(finding.cost_s for finding in self.findings)

    @cached_property
    def counts(self) -> dict[str, int]:
        """How many calls had each effect."""
        effects = [str(outcome.effect) for outcome in self.outcomes]
        return {str(effect): effects.count(str(effect)) for effect in Effect}

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain data; `schema` grows when its meaning changes."""
        calls = [
            {
                **_plain(asdict(call)),
                "place": call.site.place,
                "effect": str(outcome.effect),
                "origin": outcome.origin,
            }
            for call, outcome in zip(self.calls, self.outcomes, strict=True)
        ]
        return {
            "schema": SCHEMA,
            "model": self.model,
            "inputs": [list(shape) for shape in self.inputs],
            "clean": self.clean,
            "run_s": self.run_s,
            "busy": self.busy,
            "cost_s": self.cost_s,
            "converted": self.converted,
            "counts": self.counts,
            "findings": [finding.to_dict() for finding in self.findings],
            "calls": calls,
            "unseen": list(self.unseen),
            "environment": self.environment.to_dict(),
            "comparison": None if self.comparison is None else asdict(self.comparison),
            "reorders": None if self.reorders is None else self.reorders.to_dict(),
            "agreement": None if self.agreement is None else self.agreement.to_dict(),
            "others": None if self.others is None else asdict(self.others),
        }


def audit(
    model: nn.Module,
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    backward: bool = False,
    convert: bool | None = None,
    compare: bool = False,
    reorders: bool = False,
    name: str | None = None,
) -> Audit:
    """Run `model` once and report what every operator did to the memory format.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8), nn.Conv2d(8, 8, 3))
    >>> report = audit(net, torch.rand(2, 3, 16, 16))
    >>> [(f.kind, f.operator) for f in report.findings]
    [('lost', 'torch.nn.functional.instance_norm')]

    `convert` says whether weights and inputs are turned to channels last for the run. If it is left
    out, they are, unless a weight or an input is channels last already: then the model is taken as
    it is. `compare` times both formats in turns, and makes each call in both: `agreement` has the
    first whose values differ. `reorders` asks oneDNN what it copies between layouts inside its
    kernels, in either format. That takes three more runs, or four if the model is taken as it is;
    during two of them standard output is led into a file, and what others print comes after. A
    model from `nhwc.optimize` is audited as the graph below its plan. The model is left as it was
    found.
    """
    kwargs = given_by_name(kwargs)
    true_or_false(backward=backward, compare=compare, reorders=reorders)
    exported = isinstance(model, ExportedProgram)
    model = module_of(model, "audit")
    check(model, inputs, kwargs)
    others_since = watch_others()
    # Another thread's audit of the same model would see the weights that this one converts.
    with turn, outside_put_back(model):
        if convert is None:
            convert = not _begun(model, (inputs, kwargs))
        device = _device(model, inputs, kwargs)
        tensors = every_tensor_of((inputs, kwargs))
        format = Format.CHANNELS_LAST if convert else None
        in_format = weights_in(model, format) if format else contextlib.nullcontext()
        inside = None
        with preserved(model, weights=1 << 30), as_written(model) as unseen:
            if exported:
                unseen.append("modules and source lines: an exported program is one flat graph")
            run = Run(model, inputs, kwargs, format=format, backward=backward)
            with in_format:
                recorder = Recorder(model)
                guarded(run, tensors)
                run_s = min(_seconds(run.go, device) for _ in range(2))
                profile = profiled(lambda: run.go(recorder), cuda=device.type == "cuda")
            others = others_since()
            try:
                inside = reorders_of(run, device) if reorders else None
                why_not = "they are told with audit(..., reorders=True)"
            except Untold as error:
                why_not = str(error)
            if inside is None and device.type == "cpu":
                unseen.append(f"reorders inside oneDNN's kernels: {why_not}")
        comparison, agreement = (
            _compare(model, inputs, kwargs, backward, device) if compare else (None, None)
        )
        calls = with_profile(recorder.calls, profile, cuda=device.type == "cuda")
        outcomes, findings = judged(calls, model, run_s)
        if not convert:
            findings += unconverted_weights(model)
        return Audit(
            model=name or type(model).__name__,
            # A nested tensor has no one shape.
            inputs=tuple(() if t.is_nested else tuple(t.shape) for t in tensors),
            calls=tuple(calls),
            outcomes=tuple(outcomes),
            findings=sorted_by_weight(findings),
            run_s=run_s,
            converted=convert,
            unseen=tuple(unseen),
            environment=Environment.here(device),
            comparison=comparison,
            reorders=inside,
            agreement=agreement,
            others=others,
        )


def judged(
    calls: list[Call], model: nn.Module, run_s: float
) -> tuple[list[CallEffect], list[Finding]]:
    """What each call of a run did to the format, and the places that lost or converted it."""
    tracker = Tracker()
    outcomes = only_of_images(calls, [tracker.follow(call) for call in calls])
    return outcomes, find(calls, outcomes, run_s) + hidden_weights(calls, model)


def sorted_by_weight(findings: list[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=lambda f: (is_note(f), -f.cost_s, f.calls)))


def _begun(model: nn.Module, inputs: object) -> bool:
    """Whether the owner converted a weight or an input; nhwc.optimize's own do not count."""
    if any(isinstance(module, Optimized) for module in model.modules()):
        return False
    last = CHANNELS_LAST_OF.values()
    weights = (weight.tensor for weight in convolution_weights(model))
    own = (*model.parameters(), *weights)
    return any(format_of(t) in last for t in (*own, *every_tensor_of(inputs)))


def _device(model: nn.Module, inputs: Any, kwargs: Any) -> torch.device:
    tensors = [*model.parameters(), *every_tensor_of((inputs, kwargs))]
    return tensors[0].device if tensors else torch.device("cpu")


def _seconds(go: Any, device: torch.device) -> float:
    start = time.perf_counter()
    go()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _compare(
    model: nn.Module, inputs: Any, kwargs: Any, backward: bool, device: torch.device
) -> tuple[Comparison, Agreement]:
    """Time contiguous against channels last on two copies, in turns, and hold their values."""
    plain, last = _copy_of(model), _copy_of(model)
    restride_weights_(plain, Format.CONTIGUOUS)
    restride_weights_(last, Format.CHANNELS_LAST)
    formats = {"contiguous": Format.CONTIGUOUS, "channels_last": Format.CHANNELS_LAST}
    runs = {
        name: Run(copied, inputs, kwargs, format=format, backward=backward)
        for copied, (name, format) in zip((plain, last), formats.items(), strict=True)
    }
    with preserved(model, weights=1 << 30):
        agreement = agreement_of(runs["channels_last"], runs["contiguous"])
        timed = {name: run.go for name, run in runs.items()}
        times = interleave(timed, rounds=10, device=device)
    return Comparison(times["contiguous"], times["channels_last"]), agreement


def _copy_of(model: nn.Module) -> nn.Module:
    """A copy with weights of its own; torch's copies of frozen TorchScript share constants."""
    if not isinstance(model, torch.jit.ScriptModule):
        return copy_as_is(model)
    return script_in(bytes_of_script(model))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Format) else value
