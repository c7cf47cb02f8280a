"""Norms and transposed convolutions with what is added to their result and applied to it."""

from __future__ import annotations

from ...graph.modules.leaves import runs_hooks
from ...graph.modules.mended import GroupNorm, InstanceNorm
from ...operators.activations import of_module
from .calls import Lowered, OperatorCall
from .norms import normed_in_groups
from .transposed import OF_SIGNALS, TRANSPOSED, convolved
from .weighted import in_ours


def fused(call: OperatorCall) -> Lowered:
    activation, op = of_module(call.module.activation), call.module.op
    code = in_ours(activation) if activation or call.module.activation is None else None
    if code is None or any(map(runs_hooks, call.module.children())):
        return None
    if type(op) in (GroupNorm, InstanceNorm):
        return normed_in_groups(call, op, *code)
    return convolved(call, op, *code) if type(op) in (*TRANSPOSED, *OF_SIGNALS) else None
