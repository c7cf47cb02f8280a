"""What the first training step did to memory formats, in a line or two."""

from __future__ import annotations

from .._audit.findings import KINDS
from .._audit.step import FirstStep
from ..models.trees import some
from .audit_text import modules_of
from .text import plural


def step_text(step: FirstStep) -> str:
    """Say what is channels last, and what the first step lost: forward, backward, optimizer."""
    weights = plural(step.weights, "convolution weight")
    head = f"nhwc: {weights} {'is' if step.weights == 1 else 'are'} channels last"
    calls = step.audit.calls
    behind = sum(call.backward for call in calls)
    seen = f"{len(calls) - behind} operators forward, {behind} backward, " if calls else ""
    seen += f"{plural(step.checked, 'gradient')} and their optimizer's state"
    if step.clean and calls:
        return f"{head}; the first step kept the format ({seen})."
    if step.clean:
        return f"{head}; the model ran compiled, so the first step tells of {seen} only: kept."
    return f"{head}, but the first step did not keep the format ({seen}).\nnhwc: {_trouble(step)}"


def _trouble(step: FirstStep) -> str:
    parts = []
    if lost := step.audit.lost:
        first = lost[0]
        often = f" x{len(first.calls)}" if len(first.calls) > 1 else ""
        others = f", and {plural(len(lost) - 1, 'other place')}" if len(lost) > 1 else ""
        place = f" at {first.site.place}" if first.site.file else ""
        where = f"{place} {modules_of(step.audit, first)}"
        parts.append(f"{first.operator}{often} {KINDS[first.kind]}{where}{others}")
    if step.gradients:
        parts.append(f"gradients of {some(list(step.gradients))} are not as their weights")
    if step.states:
        parts.append(f"the optimizer's state of {some(list(step.states))} is not as the weights")
    return "; ".join(parts) + "."
