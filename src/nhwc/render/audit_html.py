"""An audit as one HTML page that works offline."""

from __future__ import annotations

from .._audit import Audit
from .._audit.findings import KINDS
from .audit_text import clean_words, comparison_words
from .page import page


def audit_html(audit: Audit) -> str:
    """Render the page: the network in order, coloured by format, findings beside it."""
    shapes = ", ".join("x".join(map(str, dims)) for dims in audit.inputs)
    data = {
        **audit.to_dict(),
        "where": str(audit.environment),
        "kinds": KINDS,
        "judged": audit.judged,
        "clean_words": clean_words(audit),
        "comparison_words": comparison_words(audit),
    }
    return page("audit", f"{audit.model} {shapes}: memory format", data)
