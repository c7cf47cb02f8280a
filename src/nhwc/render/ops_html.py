"""The operator table as one page that works offline."""

from __future__ import annotations

from .._ops import OperatorTable
from .._ops.table import ASPECTS, MEANING
from .page import page


def ops_html(table: OperatorTable) -> str:
    """Render the page, which searches, sorts and filters its own data in the browser."""
    env = table.environment
    where = (
        env["device"] if table.device != "cpu" else f"{env['processor']} {env['instruction_set']}"
    )
    data = {
        **table.to_dict(),
        "aspects": ASPECTS,
        "meaning": {str(outcome): meaning for outcome, meaning in MEANING.items()},
        "where": f"torch {env['torch']}, {where}, {env['system']}",
    }
    return page("ops", f"Operators of torch {env['torch']} and channels last", data)
