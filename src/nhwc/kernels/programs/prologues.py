"""Products that normalize, or multiply by a gate, the pixels that they pack.

A transformer normalizes its tokens in front of products, and squeeze-and-excitation multiplies an
image by a gate in front of a 1x1 convolution. Where nothing else reads the result, it need not be
written and read again: whoever packs the rows changes them on the way (product/rows.py).

    tokens -> layer norm -> y -> product        tokens -> product that normalizes its rows
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..convolutions.direct import DIRECT
from ..layers.elementwise import PRODUCT
from ..layers.normalize import LAYER_NORM
from ..tape.steps import Argument, Step, View
from .chain import Chain


def with_prologues(steps: Sequence[Step], outputs: Sequence[View]) -> tuple[Step, ...]:
    """`steps`, in which products do the norms and gates that only they read."""
    chain = Chain(steps, outputs)
    for place in chain.places(DIRECT.name):
        product = chain.at(place)
        if not _packs_pixels(product.given):
            continue
        maker = chain.maker(product.given["x"], place)
        if maker is not None and _is_prologue(chain.at(maker)):
            chain.join(maker, place, _joined(chain.at(maker), product))
    return chain.steps


def _packs_pixels(given: dict[str, Any]) -> bool:
    """Whether it packs each pixel as it lies, and once: else a norm would be computed again."""
    return bool(given["flat"]) and given["groups"] == 1 and given["column_parts"] == 1


def _is_prologue(step: Step) -> bool:
    given = step.given
    if step.kernel.name not in (LAYER_NORM.name, PRODUCT.name):
        return False
    plain = not given["code"] and given["residual"] is None
    return plain and (step.kernel.name == LAYER_NORM.name or not bool(given["shift"].any()))


def _joined(maker: Step, product: Step) -> Step:
    given = maker.given
    new: dict[str, Argument] = {"x": given["x"], "x_pixel": given["x_pixel"]}
    if maker.kernel.name == LAYER_NORM.name:
        new |= {"gains": given["weights"], "shift": given["bias"]}
        new |= {name: given[name] for name in ("eps", "centred")}
    else:
        new |= {name: given[name] for name in ("factor", "factor_pixel", "shared_by")}
    return product.but(**new)
