"""Does the model keep channels last? One word or two for a table; `nhwc audit` tells the rest."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


def propagation(model: nn.Module, inputs: Sequence[Tensor]) -> str:
    """`clean`, how many calls lost the format, or that no image is at work."""
    # Asked as a user would ask: the verbs stand side by side and know nothing of one another.
    import nhwc

    try:
        report = nhwc.audit(model, *inputs, convert=True)
    except Exception:
        # A run is worth measuring also where nobody can say what it does to the format.
        return "not audited"
    lost = sum(len(finding.calls) for finding in report.lost)
    if not lost:
        return "clean" if report.judged else "nothing to judge"
    return f"lost at {lost} call{'s' * (lost != 1)}"
