"""Findings: the calls that lost or converted a format, grouped by the line that caused them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from ..formats import Format, format_of
from ..formats.source import CONVOLUTIONS
from ..formats.weights import convolution_weights
from ..models.trees import some
from ..watch.calls import Call, CallSite
from ..watch.effects import MIXING, CallEffect, Effect, short_name
from .remedies import remedy

KINDS = {
    "lost": "loses channels last",
    "misread": "takes channels last for contiguous",
    "converted": "is asked to convert to contiguous",
    "copies": "copies between formats inside its kernel",
    "unconverted": "was never converted to channels last",
}
"""The kinds of findings, each with words that follow the operator's name."""


@dataclass(frozen=True)
class Finding:
    """One place in the user's code that loses or converts the format, however often it runs.

    >>> import torch
    >>> import nhwc
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8), nn.Conv2d(8, 8, 3))
    >>> [finding] = nhwc.audit(net, torch.rand(2, 3, 16, 16)).findings
    >>> finding.kind, finding.operator, finding.site.module
    ('lost', 'torch.nn.functional.instance_norm', '1')
    >>> len(finding.calls), len(finding.payers)  # one call loses it, one pays to convert back
    (1, 1)
    >>> print(finding.remedy)
    `instance_norm` copies to contiguous, ...
    """

    kind: str
    operator: str
    site: CallSite
    calls: tuple[int, ...]
    payers: tuple[int, ...]
    """Later calls that converted images back to the format that these calls had dropped."""
    cost_s: float
    share: float
    """`cost_s` as a share of one run."""
    copied_bytes: int
    remedy: str

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "place": self.site.place}


def find(calls: list[Call], outcomes: list[CallEffect], run_s: float) -> list[Finding]:
    payers: dict[int, list[int]] = {}
    made: set[int] = set()
    for call, outcome in zip(calls, outcomes, strict=True):
        if outcome.effect is not Effect.RESTORES:
            continue
        origin = outcome.origin
        if origin is None and not call.backward:
            origin = _maker(call, calls, outcomes)
            if origin is not None:
                # No call made an input of the model: the first one that converts it is charged.
                made.add(call.index if origin < 0 else origin)
        if origin is not None and origin >= 0:
            payers.setdefault(origin, []).append(call.index)
    groups: dict[tuple[str, str, str, int, str], list[int]] = {}
    for call, outcome in zip(calls, outcomes, strict=True):
        kind = _kind(call, outcome) or ("unconverted" if call.index in made else None)
        if kind is not None:
            paid_here = kind == "unconverted" and outcome.effect is Effect.RESTORES
            operator = "input" if paid_here else call.operator
            site = call.site
            # Without a line of the user's, the module is the place.
            module = "" if site.file else site.module
            key = (kind, operator, site.file, site.line, module)
            groups.setdefault(key, []).append(call.index)
    found = []
    for (kind, operator, *_), members in groups.items():
        paid = [index for member in members for index in payers.get(member, ())]
        found.append(_finding(kind, operator, members, paid, calls, outcomes, run_s))
    return found


def _maker(call: Call, calls: list[Call], outcomes: list[CallEffect]) -> int | None:
    """The call that first made contiguous what `call` has to convert; -1 for a model's input."""
    found = None
    while True:
        images = [i for i in call.inputs if i.source is not None and len(i.shape) >= 4]
        source = next((i.source for i in images if i.densest not in (None, 1)), None)
        if source is None:
            return found
        if source < 0 or outcomes[source].effect is not Effect.PLAIN:
            return source
        found, call = source, calls[source]


def _kind(call: Call, outcome: CallEffect) -> str | None:
    if outcome.effect is Effect.LOSES:
        return "lost"
    if outcome.effect is Effect.MISREADS:
        return "misread"
    if outcome.effect is Effect.CONVERTS:
        return "converted"
    # The copy of a restoring call is charged to the call that lost the format. A copy inside a
    # call that keeps the format is its own kernel's doing.
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
    outcomes: list[CallEffect],
    run_s: float,
) -> Finding:
    involved = [calls[i] for i in (*members, *paid)]
    cost = sum(call.copy_seconds for call in involved)
    first = members[0]
    advice = remedy(calls[first], outcomes[first].effect)
    if kind == "lost" and (origin := outcomes[first].origin) is not None:
        cause = calls[origin]
        where = cause.site.place if cause.site.file else cause.site.module
        place = f" ({where})" if where else ""
        advice += f" That input lost it in `{short_name(cause.operator)}`{place}: mend that first."
    return Finding(
        kind=kind,
        operator=operator,
        site=calls[first].site,
        calls=tuple(members),
        payers=tuple(paid),
        cost_s=cost,
        share=cost / run_s,
        copied_bytes=sum(call.copied_bytes for call in involved),
        remedy=advice,
    )


def unconverted_weights(model: nn.Module) -> list[Finding]:
    """The weights that the model's owner forgot to convert."""
    weights = [
        _layer(weight.name)
        for weight in convolution_weights(model)
        if format_of(weight.tensor) is Format.CONTIGUOUS
    ]
    if not weights:
        return []
    are = "weight is" if len(weights) == 1 else "weights are"
    return [
        Finding(
            kind="unconverted",
            operator="weight",
            site=CallSite(weights[0], "", "", 0, ""),
            calls=(),
            payers=(),
            cost_s=0.0,
            share=0.0,
            copied_bytes=0,
            remedy=f"{len(weights)} convolution {are} contiguous ({some(weights)}). "
            "Call nhwc.convert_(model) once after loading.",
        )
    ]


def _layer(weight: str) -> str:
    """The layer that a weight is that of, if its name says no more; the weight itself elsewhere.

    >>> _layer("stem.weight"), _layer("stem.fixed_weight")
    ('stem', 'stem.fixed_weight')
    """
    module, _, name = weight.rpartition(".")
    return module if name == "weight" else weight


def hidden_weights(calls: Sequence[Call], model: nn.Module) -> list[Finding]:
    """Contiguous weights of the model that convolutions read and that `convert_` does not find."""
    known = {tuple(weight.tensor.shape) for weight in convolution_weights(model)}
    sites: dict[CallSite, list[int]] = {}
    for call in calls:
        if short_name(call.operator) in CONVOLUTIONS and not call.backward:
            for weight in call.inputs[1:2]:
                own = weight.source is None and weight.shape not in known
                if own and weight.format is Format.CONTIGUOUS:
                    sites.setdefault(call.site, []).append(call.index)
    return [
        Finding(
            kind="unconverted",
            operator="weight",
            site=site,
            calls=tuple(members),
            payers=(),
            cost_s=0.0,
            share=0.0,
            copied_bytes=0,
            remedy="This convolution reads a contiguous weight of the model, which nhwc.convert_ "
            "does not find, because the code of its class hands it to no convolution. Convert it: "
            f"p.data = nhwc.to_format(p.data, Format.{_last_of(calls[members[0]])}).",
        )
        for site, members in sites.items()
    ]


def _last_of(call: Call) -> str:
    """The name of the format that the weight of a convolution should have."""
    volume = len(call.inputs[1].shape) == 5
    return (Format.CHANNELS_LAST_3D if volume else Format.CHANNELS_LAST).name


def is_note(finding: Finding) -> bool:
    return finding.kind not in ("lost", "misread")
