"""Does the model keep channels last? One word or two for a table; `nhwc audit` tells the rest."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


def propagation(model: nn.Module, inputs: Sequence[Tensor]) -> str:
    """`clean`, or how many calls lost the format; empty where it cannot be told."""
    # Asked as a user would ask: the verbs stand side by side and know nothing of one another.
    import nhwc

    audit = getattr(nhwc, "audit", None)
    if audit is None:
        return ""
    try:
        lost = sum(finding.calls for finding in audit(model, *inputs).findings)
    except nhwc.NhwcError:
        return "not audited"
    return f"lost at {lost} calls" if lost else "clean"
