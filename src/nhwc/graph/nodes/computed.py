"""Which nodes give the same result whenever they are given the same arguments."""

from __future__ import annotations

from torch import fx

from ...operators.kinds import torchs_name
from ..modules.layers import as_elements
from .writes import written_into

_RANDOM = (
    *("rand", "normal", "bernoulli", "multinomial", "poisson", "exponential", "binomial", "cauchy"),
    *("log_normal", "geometric", "gumbel", "rrelu", "fractional_max_pool"),
)
_HOMES = ("torch", "_operator", "math")


def is_computed_from_arguments(node: fx.Node) -> bool:
    """Whether `node` calls a function of torch's or Python's that gives the same for the same."""
    if node.op == "call_method":
        name = str(node.target)
    elif node.op == "call_function":
        name = torchs_name(node.target)
        home = str(getattr(node.target, "__module__", None) or "torch")
        known = (name and home.split(".")[0] in _HOMES) or node.target in (getattr, as_elements)
        if not known:
            return False
    else:
        return False
    draws = name.startswith(_RANDOM) or "dropout" in name or bool(node.kwargs.get("dropout_p"))
    return not draws and written_into(node) is None
