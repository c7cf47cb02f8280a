"""Does the model keep channels last? One word or two for a table; `nhwc audit` tells the rest."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn


def propagation(model: nn.Module, inputs: Sequence[Tensor]) -> str:
    """Say `clean`, how many calls lost the format, or why there is no such answer."""
    # Called through the public interface, because the verbs must not import one another.
    import nhwc

    try:
        report = nhwc.audit(model, *inputs, convert=True)
    except Exception:
        # A model that cannot be audited is still worth timing.
        return "not audited"
    lost = sum(len(finding.calls) for finding in report.lost)
    if not lost:
        return "clean" if report.judged else "nothing to judge"
    return f"lost at {lost} call{'s' * (lost != 1)}"
