"""`audit`: where a model loses or converts its memory format, what it costs, what to change."""

from __future__ import annotations

import contextlib
import copy
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves, tree_map

from .capture import Call, Recorder, Site, is_users
from .effects import MIXING, Effect, Outcome, Tracker, short_name
from .environment import Environment
from .errors import InputError, ModelFailed, NhwcError
from .formats import CHANNELS_LAST_OF, Format, convert_, format_of, to_format
from .preserve import preserved
from .profile import profiled, with_profile
from .ready import check_devices, check_initialized, some
from .remedies import remedy
from .timing import Comparison, interleave

SCHEMA = 1

KINDS = {
    "lost": "loses channels last",
    "misread": "takes an ambiguous tensor for contiguous",
    "converted": "is asked to convert to contiguous",
    "copies": "copies between formats inside its kernel",
    "unconverted": "was never converted to channels last",
}
"""What a finding can be about, in words that follow the operator's name."""


@dataclass(frozen=True)
class Finding:
    """One place in the user's code that loses or converts the format, however often it runs."""

    kind: str
    operator: str
    site: Site
    calls: tuple[int, ...]
    payers: tuple[int, ...]
    """Later calls that converted back what these calls had lost."""
    cost_s: float
    share: float
    """`cost_s` as a share of one run."""
    copied_bytes: int
    remedy: str

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "place": self.site.place}


@dataclass(frozen=True)
class Audit:
    """What one run of a model did to its memory formats."""

    model: str
    inputs: tuple[tuple[int, ...], ...]
    """The shapes of the input tensors."""
    calls: tuple[Call, ...]
    outcomes: tuple[Outcome, ...]
    """What call i did to the format."""
    findings: tuple[Finding, ...]
    run_s: float
    """One run without anybody watching."""
    converted: bool
    """Whether the audit converted weights and inputs to channels last for its run."""
    unseen: tuple[str, ...]
    """What could not be seen, and why."""
    environment: Environment
    comparison: Comparison | None = field(default=None)
    """Contiguous against channels last, timed in turns, where it was asked for."""

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
        """Whether every image stayed in channels last from the first operator to the last."""
        return not self.findings

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
            "cost_s": self.cost_s,
            "converted": self.converted,
            "counts": self.counts,
            "findings": [finding.to_dict() for finding in self.findings],
            "calls": calls,
            "unseen": list(self.unseen),
            "environment": self.environment.to_dict(),
            "comparison": None if self.comparison is None else asdict(self.comparison),
        }


def audit(
    model: nn.Module,
    *inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    backward: bool = False,
    convert: bool | None = None,
    compare: bool = False,
    name: str | None = None,
) -> Audit:
    """Run `model` once and report what every operator did to the memory format.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8), nn.Conv2d(8, 8, 3))
    >>> report = audit(net, torch.rand(2, 3, 16, 16))
    >>> [(f.kind, f.operator) for f in report.findings]
    [('lost', 'torch.nn.functional.instance_norm')]

    `convert` says whether weights and inputs are turned to channels last for the run; left out,
    they are if nothing is converted yet: a model whose owner has begun is taken as it is. `compare`
    times both formats in turns. The model is left as it was found.
    """
    kwargs = dict(kwargs or {})
    _check(model, inputs, kwargs)
    if convert is None:
        convert = not _begun(model, (inputs, kwargs))
    device = _device(model, inputs, kwargs)
    with preserved(model), _as_written(model) as unseen:
        if convert:
            convert_(model)
        run = _Run(model, inputs, kwargs, convert=convert, backward=backward)
        _guarded(run.go, model)
        run_s = min(_seconds(run.go, device) for _ in range(2))
        recorder = Recorder(model)
        profile = profiled(lambda: run.go(recorder), cuda=device.type == "cuda")
    calls = with_profile(recorder.calls, profile, cuda=device.type == "cuda")
    tracker = Tracker()
    outcomes = [tracker.follow(call) for call in calls]
    findings = _findings(calls, outcomes, run_s)
    if not convert:
        findings += _unconverted(model, inputs, calls, outcomes, run_s)
    return Audit(
        model=name or type(model).__name__,
        inputs=tuple(tuple(t.shape) for t in _tensors((inputs, kwargs))),
        calls=tuple(calls),
        outcomes=tuple(outcomes),
        findings=tuple(sorted(findings, key=lambda f: (_is_note(f), -f.cost_s, f.calls))),
        run_s=run_s,
        converted=convert,
        unseen=tuple(unseen),
        environment=Environment.here(device),
        comparison=_compare(model, inputs, kwargs, backward, device) if compare else None,
    )


class _Run:
    """One run of the model on fresh copies of its inputs: in-place operators may write to them."""

    def __init__(
        self, model: nn.Module, inputs: Any, kwargs: Any, *, convert: bool, backward: bool
    ) -> None:
        self.model = model
        self.arguments = (inputs, kwargs)
        self.format = convert
        self.backward = backward

    def go(self, recorder: contextlib.AbstractContextManager | None = None) -> None:
        args, kwargs = tree_map(self._fresh, self.arguments)
        with torch.set_grad_enabled(self.backward), recorder or contextlib.nullcontext():
            result = self.model(*args, **kwargs)
            if self.backward:
                _backward(result)

    def _fresh(self, leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        if self.format and leaf.ndim in CHANNELS_LAST_OF and leaf.layout is torch.strided:
            marked = to_format(leaf.detach(), CHANNELS_LAST_OF[leaf.ndim])
            fresh = marked.clone() if marked.data_ptr() == leaf.data_ptr() else marked
        else:
            fresh = copy.deepcopy(leaf.detach())
        return fresh.requires_grad_(leaf.requires_grad)


def _backward(result: object) -> None:
    leaves = [t for t in _tensors(_fields(result)) if t.requires_grad]
    if not leaves:
        raise InputError(
            "no output of the model requires a gradient, so backward=True has nothing to run. "
            "Unfreeze a parameter, or audit without backward."
        )
    torch.autograd.backward(leaves, [torch.ones_like(t) for t in leaves])


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _fields(result: object) -> object:
    """Outputs that pytree does not open: dataclasses and dict-like objects."""
    if isinstance(result, Mapping):
        return dict(result)
    return vars(result) if hasattr(result, "__dataclass_fields__") else result


def _check(model: nn.Module, inputs: Any, kwargs: Any) -> None:
    if not isinstance(model, nn.Module):
        raise InputError(
            f"the first argument is {type(model).__name__}, not a torch.nn.Module. "
            "Call audit(model, input)."
        )
    check_initialized(model)
    tensors = _tensors((inputs, kwargs))
    if not tensors:
        raise InputError("no input given. Call audit(model, torch.rand(1, 3, 224, 224)).")
    if not any(t.ndim in CHANNELS_LAST_OF for t in tensors):
        shapes = ", ".join("x".join(map(str, t.shape)) or "scalar" for t in tensors)
        raise InputError(
            f"input {shapes} has {tensors[0].ndim} dimensions; a vision model needs 4 "
            "(N, C, H, W) or 5 (N, C, D, H, W). Try torch.rand(1, 3, 224, 224)."
        )
    for tensor in tensors:
        if tensor.numel() == 0:
            raise InputError(f"input {tuple(tensor.shape)} is empty. Give at least one image.")
        if tensor.is_floating_point() and not tensor.is_meta and bool(tensor.isnan().any()):
            raise InputError(f"input {tuple(tensor.shape)} contains NaN. Give finite numbers.")
    check_devices(model, tensors)


def _begun(model: nn.Module, inputs: object) -> bool:
    """Whether any weight or input is channels last already."""
    last = CHANNELS_LAST_OF.values()
    return any(format_of(t) in last for t in (*model.parameters(), *_tensors(inputs)))


def _device(model: nn.Module, inputs: Any, kwargs: Any) -> torch.device:
    return [*model.parameters(), *_tensors((inputs, kwargs))][0].device


@contextlib.contextmanager
def _as_written(model: nn.Module) -> Iterator[list[str]]:
    """Run compiled parts as the Python they were compiled from; yield what stays unseen."""
    unseen = []
    modules = dict(model.named_modules())
    compiled = [n for n, m in modules.items() if _is_compiled(m)]
    scripted = [n for n, m in modules.items() if isinstance(m, torch.jit.ScriptModule)]
    if compiled:
        unseen.append(
            f"{some(compiled)} compiled by torch.compile ran as plain Python here; "
            "what the compiler makes of it is not visible"
        )
    if scripted:
        unseen.append(
            f"{some(scripted)} in TorchScript: operators are seen one by one, without source lines"
        )
    if any(p.device.type == "cpu" for p in model.parameters()):
        unseen.append("reorders inside oneDNN's own kernels (of weights, for instance)")
    with torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext():
        yield unseen


def _is_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None


def _guarded(go: Any, model: nn.Module) -> None:
    try:
        go()
    except NhwcError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())[:300].rstrip(".")
        advice = "Check the input's shape and type, and that the model runs by itself."
        if "view size is not compatible" in text:
            advice = "Channels-last memory has no such view: write .reshape or .flatten there."
        raise ModelFailed(
            f"{type(model).__name__} raised {type(error).__name__} on this input"
            f"{_where(error)}: {text}. {advice}"
        ) from error


def _where(error: Exception) -> str:
    """The innermost line of the traceback that is neither torch's nor ours."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]
    return f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _seconds(go: Any, device: torch.device) -> float:
    start = time.perf_counter()
    go()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _findings(calls: list[Call], outcomes: list[Outcome], run_s: float) -> list[Finding]:
    payers: dict[int, list[int]] = {}
    for call, outcome in zip(calls, outcomes, strict=True):
        if outcome.origin is not None and outcome.effect is Effect.RESTORES:
            payers.setdefault(outcome.origin, []).append(call.index)
    groups: dict[tuple[str, str, str, int], list[int]] = {}
    for call, outcome in zip(calls, outcomes, strict=True):
        kind = _kind(call, outcome)
        if kind is not None:
            key = (kind, call.operator, call.site.file, call.site.line)
            groups.setdefault(key, []).append(call.index)
    found = []
    for (kind, operator, _, _), members in groups.items():
        paid = [index for member in members for index in payers.get(member, ())]
        found.append(_finding(kind, operator, members, paid, calls, outcomes, run_s))
    return found


def _kind(call: Call, outcome: Outcome) -> str | None:
    if outcome.effect is Effect.LOSES:
        return "lost"
    if outcome.effect is Effect.MISREADS:
        return "misread"
    if outcome.effect is Effect.CONVERTS:
        return "converted"
    # A restoring call's copy is charged to whoever lost the format; a copy in one that keeps it
    # has no other culprit than the kernel.
    if short_name(call.operator) in MIXING:
        return None
    own = {i.shape for i in call.inputs if i.source is None}
    inside = any(copy.shape not in own for copy in call.copies)
    return "copies" if inside and outcome.effect is Effect.KEEPS else None


def _finding(
    kind: str,
    operator: str,
    members: list[int],
    paid: list[int],
    calls: list[Call],
    outcomes: list[Outcome],
    run_s: float,
) -> Finding:
    involved = [calls[i] for i in (*members, *paid)]
    cost = sum(call.copy_seconds for call in involved)
    first = members[0]
    return Finding(
        kind=kind,
        operator=operator,
        site=calls[first].site,
        calls=tuple(members),
        payers=tuple(paid),
        cost_s=cost,
        share=cost / run_s,
        copied_bytes=sum(call.copied_bytes for call in involved),
        remedy=remedy(calls[first], outcomes[first].effect),
    )


def _unconverted(
    model: nn.Module, inputs: Any, calls: list[Call], outcomes: list[Outcome], run_s: float
) -> list[Finding]:
    """What the model's owner forgot to convert: weights, or the input."""
    found = []
    weights = [
        name
        for name, module in model.named_modules()
        if isinstance(module, _ConvNd)
        and module.weight.ndim in CHANNELS_LAST_OF
        and format_of(module.weight) is Format.CONTIGUOUS
    ]
    if weights:
        found.append(
            Finding(
                kind="unconverted",
                operator="weight",
                site=Site(weights[0], "", "", 0, ""),
                calls=(),
                payers=(),
                cost_s=0.0,
                share=0.0,
                copied_bytes=0,
                remedy=f"{len(weights)} convolution weights are contiguous ({some(weights)}). "
                "Call nhwc.convert_(model) once after loading.",
            )
        )
    paying = [
        call.index
        for call, outcome in zip(calls, outcomes, strict=True)
        if outcome.effect is Effect.RESTORES and any(i.source == -1 for i in call.inputs)
    ]
    if paying:
        found.append(_finding("unconverted", "input", paying[:1], [], calls, outcomes, run_s))
    return found


def _is_note(finding: Finding) -> bool:
    return finding.kind not in ("lost", "misread")


def _compare(
    model: nn.Module, inputs: Any, kwargs: Any, backward: bool, device: torch.device
) -> Comparison:
    """Time contiguous against channels last on two copies, in turns."""
    plain = convert_(copy.deepcopy(model), Format.CONTIGUOUS)
    last = convert_(copy.deepcopy(model))
    runs = {
        "contiguous": _Run(plain, inputs, kwargs, convert=False, backward=backward).go,
        "channels_last": _Run(last, inputs, kwargs, convert=True, backward=backward).go,
    }
    with preserved(model):
        times = interleave(runs, rounds=10, device=device)
    return Comparison(times["contiguous"], times["channels_last"])


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Format) else value
