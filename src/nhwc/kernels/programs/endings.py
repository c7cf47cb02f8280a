"""Steps that add and activate what they compute, where a step of its own would do it.

A norm, a gate or a pooling ends as a product does (layers/ending.py): it can add a residual and
apply an activation before it stores. So a sum or an activation behind it is no step, where nothing
else reads what lies between:

    x -> group norm -> y -> SiLU -> z        x -> group norm with SiLU -> z
"""

from __future__ import annotations

from collections.abc import Sequence

from ..layers.elementwise import SUM
from ..layers.ending import ENDING
from ..tape.steps import Step, View
from .chain import Chain, same


def with_endings(steps: Sequence[Step], outputs: Sequence[View]) -> tuple[Step, ...]:
    """`steps`, in which sums and activations are the ends of the steps before them."""
    chain = Chain(steps, outputs)
    for place in chain.places(SUM.name):
        ending = chain.at(place)
        given = ending.given
        operands = [one for one in (given["x"], given["residual"]) if one is not None]
        makers = [chain.maker(view, place) for view in operands]
        able = [one for one in makers if one is not None and _ends(chain.at(one), ending)]
        if able:
            # The other operand is computed by then.
            maker = max(able)
            chain.join(maker, place, _joined(chain.at(maker), ending))
    return chain.steps


def _ends(maker: Step, ending: Step) -> bool:
    """Whether `maker` does not yet do at its end what `ending` does, and ends in vectors."""
    given = maker.given
    if not {*ENDING} <= given.keys() or given["code"]:
        return False
    if given["residual"] is not None and ending.given["residual"] is not None:
        return False
    # A product clamps in registers, and was given its activation by a pass.
    return "low" not in given and not given.get("pool")


def _joined(maker: Step, ending: Step) -> Step:
    """One step for both, which stands where `ending` stood."""
    given = ending.given
    residual, pixel = given["residual"], given["residual_pixel"]
    if residual is not None and same(maker.given["y"], residual):
        residual, pixel = given["x"], given["x_pixel"]
    end = {name: given[name] for name in ("y", "y_pixel", "code", "slope")}
    if residual is not None:
        end |= {"residual": residual, "residual_pixel": pixel}
    return maker.but(**end)
