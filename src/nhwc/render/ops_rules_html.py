"""The rules of memory formats as one page that works offline: what ran, and where it put what."""

from __future__ import annotations

from collections.abc import Sequence

from .._ops import RuleResult
from ..machine.environment import Environment
from ..pictures.html import memory_fragment, memory_styles
from .ops_rules_text import WORDS, outcome, summary
from .page import page


def rules_html(found: Sequence[RuleResult], environment: Environment) -> str:
    """Render the page; a drawing that several rules share is in it once."""
    env = environment.to_dict()
    processor = f"{env['processor']} {env['instruction_set']}"
    fragments: dict[str, int] = {}
    rules = []
    for rule in found:
        drawn = [
            {
                "name": tensor.name,
                "came": tensor.came,
                "shape": list(tensor.memory.shape),
                "picture": fragments.setdefault(memory_fragment(tensor.memory), len(fragments)),
            }
            for tensor in rule.drawn
        ]
        word = WORDS[rule.passed]
        rules.append({**rule.to_dict(), "outcome": outcome(rule), "word": word, "drawn": drawn})
    data = {
        "rules": rules,
        "pictures": list(fragments),
        "styles": memory_styles(),
        "summary": summary(found),
        "where": f"torch {env['torch']}, {processor}, {env['device']}",
    }
    return page("rules", f"Rules of memory formats, torch {env['torch']}", data)
