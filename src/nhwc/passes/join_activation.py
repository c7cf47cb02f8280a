"""Make one activation of what a model spells out, so that the layer before it applies it.

x * torch.sigmoid(x)                           ->    SiLU, as many EfficientNets have it
x * torch.sigmoid(1.702 * x)                   ->    QuickGELU, CLIP's
x * F.relu6(x + 3) / 6                         ->    Hardswish
F.relu6(x + 3) / 6                             ->    Hardsigmoid
x * torch.tanh(F.softplus(x))                  ->    Mish
x / 2 * (1 + torch.erf(x / sqrt(2)))           ->    ErfGELU
x / 2 * (1 + torch.tanh(a * (x + b * x**3)))   ->    TanhGELU
F.relu(x) ** 2                                 ->    SquaredReLU
torch.where(x > 0, x, a * x)                   ->    LeakyReLU
x.clamp(min=0)                                 ->    ReLU

What stands for x may be a value, and a, b, 1.702 however they are come by: arguments are compared
as polynomials.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.nn.modules.conv import _ConvNd

from ..graph import add_module, bound, module_of
from ..graph.nodes.unused import erase_unused
from ..graph.report import PassReport, Site
from ..operators.activations import NamedActivation, of_module
from ..operators.kinds import writes_first
from ..operators.spelled import ErfGELU, QuickGELU, SquaredReLU, TanhGELU
from ._folding_sites import name_of, written_between
from ._matching import activation_of, arithmetic, is_own
from ._reporting import reported


class _Found(NamedTuple):
    """What is applied to which value."""

    x: fx.Node
    activation: nn.Module


def join_activation(gm: fx.GraphModule) -> PassReport:
    """Replace what computes an activation by that one."""
    sites = []
    for node in list(gm.graph.nodes):
        found = _spelled(node)
        if found is None:
            continue
        x, activation = found
        kind = type(activation).__name__
        reason = written_between([x], min(x.users), node)
        sites.append(Site(name_of(node), kind, not reason, reason))
        if reason:
            continue
        with gm.graph.inserting_before(node):
            made = add_module(gm.graph, f"{node.name}_{kind.lower()}", activation.eval(), (x,))
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)
        erase_unused(node)
    return reported(gm, "join_activation", sites)


def _spelled(node: fx.Node) -> _Found | None:
    """What `node` applies which activation to."""
    if arithmetic(node) in ("mul", "div"):
        return _of_product(node)
    if node.target in _POWERS:
        return _of_power(node)
    if node.target in _LARGER or node.target is torch.where:
        return _of_choice(node)
    return _of_bounds(node) if node.target in _CLAMPS else None


def _of_product(node: fx.Node) -> _Found | None:
    number, values = _factors(node, top=True)
    if len(values) == 1:
        x = _above_three(values[0])
        return _Found(x, nn.Hardsigmoid()) if x is not None and _is(number, 1 / 6) else None
    if len(values) != 2:
        return None
    first, second = values
    if first is second:
        x = _rectified(first, reads=2)
        return _Found(x, SquaredReLU(power=False)) if x is not None and _is(number, 1.0) else None
    for x, gate in (values, values[::-1]):
        made = _gated(number, x, gate)
        if made is not None:
            return _Found(x, made)
    return None


def _gated(number: float, x: fx.Node, gate: fx.Node) -> nn.Module | None:
    """The activation that `number` times x times a gate is, which was made of x."""
    curve = activation_of(gate)
    if _is(number, 1 / 6) and _above_three(gate) is x:
        return nn.Hardswish()
    if _is(number, 0.5):
        return _raised(x, gate)
    if not _is(number, 1.0) or not gate.args:
        return None
    if isinstance(curve, nn.Hardsigmoid):
        return nn.Hardswish() if gate.args[0] is x else None
    if isinstance(curve, nn.Tanh):
        inner = gate.args[0]
        soft = of_module(activation_of(inner)) if isinstance(inner, fx.Node) else None
        of_x = isinstance(inner, fx.Node) and inner.args[:1] == (x,)
        return nn.Mish() if of_x and soft == NamedActivation("softplus") else None
    if isinstance(curve, nn.Sigmoid):
        found = _Polynomial.of(gate.args[0], x)
        if found is not None and found.is_close({1: 1.0}):
            return nn.SiLU()
        return QuickGELU() if found is not None and found.is_close({1: 1.702}) else None
    return None


def _raised(x: fx.Node, gate: fx.Node) -> nn.Module | None:
    """The GELU whose curve, of erf or of tanh, is raised by one in `gate`."""
    if arithmetic(gate) != "add" or gate.kwargs or not is_own(gate):
        return None
    curves = [one for one in gate.args if isinstance(one, fx.Node)]
    if [one for one in gate.args if not isinstance(one, fx.Node)] != [1] or not curves[0].args:
        return None
    [curve] = curves
    found = _Polynomial.of(curve.args[0], x)
    if found is None:
        return None
    if curve.target in (torch.erf, torch.special.erf, "erf"):
        return ErfGELU() if found.is_close({1: math.sqrt(0.5)}) else None
    if isinstance(activation_of(curve), nn.Tanh) and found.is_close(
        {1: _TANH, 3: 0.044715 * _TANH}
    ):
        return TanhGELU(power=found.by_power)
    return None


def _of_power(node: fx.Node) -> _Found | None:
    """The square of a ReLU."""
    square = bound(node, ("input", "exponent"))
    if node.target not in _SQUARES and square.get("exponent") not in (2, 2.0):
        return None
    x = _rectified(square.get("input"), reads=1)
    return None if x is None else _Found(x, SquaredReLU(power=True))


def _rectified(node: Any, *, reads: int) -> fx.Node | None:
    """What a ReLU is applied to whose result is read so often and by nothing else."""
    if not isinstance(node, fx.Node) or not is_own(node) or not node.args:
        return None
    user = next(iter(node.users))
    alone = [*user.args, *user.kwargs.values()].count(node) == reads
    relu = alone and isinstance(activation_of(node), nn.ReLU)
    return node.args[0] if relu and isinstance(node.args[0], fx.Node) else None


def _of_choice(node: fx.Node) -> _Found | None:
    """x or a multiple of it, the larger one, or as a comparison with zero says."""
    if node.kwargs or len(node.args) != (3 if node.target is torch.where else 2):
        return None
    *asked, first, second = node.args
    orders = ((first, second),) if asked else ((first, second), (second, first))
    for x, other in orders:
        if not isinstance(x, fx.Node) or other is x or (asked and not _is_positive(asked[0], x)):
            continue
        found = _Polynomial.of(other, x)
        slope = found.alone(1) if found is not None else None
        if slope is not None and (asked or 0 < slope < 1):
            return _Found(x, nn.LeakyReLU(slope))
    return None


def _is_positive(node: Any, x: fx.Node) -> bool:
    """Whether `node` asks where x is above zero; at zero either is right."""
    kinds = (*_ABOVE, "gt", "ge")
    return isinstance(node, fx.Node) and node.target in kinds and node.args == (x, 0)


def _of_bounds(node: fx.Node) -> _Found | None:
    """The bounds of what a layer returned; of whole numbers they might be others."""
    given = bound(node, ("input", "min", "max"))
    x, low, high = (given.get(name) for name in ("input", "min", "max"))
    if not isinstance(x, fx.Node) or not any(map(_is_layer, (x, *_summands(x)))):
        return None
    if writes_first(node.target) and not is_own(x):
        return None
    if not isinstance(low, int | float) or not isinstance(high, int | float | None):
        return None
    if (low, high) == (0, None):
        return _Found(x, nn.ReLU())
    if (low, high) == (0, 6):
        return _Found(x, nn.ReLU6())
    return _Found(x, nn.Hardtanh(low, math.inf)) if high is None and math.isfinite(low) else None


def _is_layer(node: object) -> bool:
    return isinstance(node, fx.Node) and isinstance(module_of(node), _ConvNd | nn.Linear)


def _summands(node: fx.Node) -> tuple[Any, ...]:
    return node.args if arithmetic(node) == "add" else ()


_TANH = math.sqrt(2 / math.pi)
_CLAMPS = {
    *(torch.clamp, torch.clip, torch.clamp_min, "clamp", "clip", "clamp_min"),
    *(torch.clamp_, torch.clip_, torch.clamp_min_, "clamp_", "clip_", "clamp_min_"),
}
_SQUARES = (torch.square, "square")
_POWERS = (torch.pow, operator.pow, "pow", *_SQUARES)
_LARGER = (torch.maximum, torch.max, torch.fmax, "maximum", "max")
_ABOVE = (operator.gt, operator.ge, torch.gt, torch.ge)
_DEEPEST = 6


class _Polynomial(NamedTuple):
    """What is computed of a value with numbers: a coefficient for each power of it."""

    terms: Mapping[int, float]
    by_power: bool = False

    @classmethod
    def of(cls, node: Any, x: fx.Node, depth: int = 0) -> _Polynomial | None:
        """What `node` is of x; None if it is anything else."""
        if node is x:
            return cls({1: 1.0})
        if type(node) in (int, float):
            return cls({0: float(node)})
        if not isinstance(node, fx.Node) or depth > _DEEPEST or node.kwargs or len(node.args) != 2:
            return None
        first, second = (cls.of(one, x, depth + 1) for one in node.args)
        if first is None or second is None:
            return None
        kind = arithmetic(node)
        if kind in ("add", "sub"):
            return first._plus(second, 1.0 if kind == "add" else -1.0)
        if kind == "mul":
            return first._times(second)
        number = second.alone(0)
        if kind == "div":
            return first._times(cls({0: 1 / number})) if number else None
        if node.target in _POWERS and number in (2.0, 3.0):
            squared = first._times(first)
            whole = squared._times(first) if number == 3.0 else squared
            return whole._replace(by_power=True)
        return None

    def _plus(self, other: _Polynomial, sign: float) -> _Polynomial:
        terms = dict(self.terms)
        for power, number in other.terms.items():
            terms[power] = terms.get(power, 0.0) + sign * number
        return _Polynomial(terms, self.by_power or other.by_power)

    def _times(self, other: _Polynomial) -> _Polynomial:
        terms: dict[int, float] = {}
        for power, number in self.terms.items():
            for more, factor in other.terms.items():
                terms[power + more] = terms.get(power + more, 0.0) + number * factor
        return _Polynomial(terms, self.by_power or other.by_power)

    def alone(self, power: int) -> float | None:
        """The coefficient of this power, if there is no other."""
        return self.terms[power] if self.terms.keys() == {power} else None

    def is_close(self, terms: Mapping[int, float]) -> bool:
        """Whether it has these coefficients, which may be written with some digits."""
        same = self.terms.keys() == terms.keys()
        return same and all(_is(self.terms[power], number) for power, number in terms.items())


def _factors(node: Any, *, top: bool = False) -> tuple[float, tuple[fx.Node, ...]]:
    """The numbers, as one, and the values whose product `node` is."""
    kind = arithmetic(node) if top or is_own(node) else None
    if kind not in ("mul", "div") or len(node.args) != 2 or node.kwargs:
        return 1.0, (node,)
    first, second = node.args
    if type(second) in (int, float) and second:
        number, values = _factors(first)
        return (number * second if kind == "mul" else number / second), values
    if kind == "div":
        return 1.0, (node,)
    if type(first) in (int, float):
        number, values = _factors(second)
        return number * first, values
    if not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
        return 1.0, (node,)
    one, other = _factors(first), _factors(second)
    return one[0] * other[0], (*one[1], *other[1])


def _is(number: float, wanted: float) -> bool:
    """Whether a number is one that is written with some digits."""
    return math.isclose(number, wanted, rel_tol=1e-6)


def _above_three(node: fx.Node) -> fx.Node | None:
    """The value that `node` is, three more, within 0 and 6."""
    if node.target in _CLAMPS:
        given = bound(node, ("input", "min", "max"))
        within = (given.get("min"), given.get("max")) == (0, 6)
    else:
        bounds: Any = activation_of(node)
        within = isinstance(bounds, nn.Hardtanh) and (bounds.min_val, bounds.max_val) == (0, 6)
    raised = node.args[0] if within and node.args else None
    if not isinstance(raised, fx.Node) or arithmetic(raised) != "add" or raised.kwargs:
        return None
    values = [one for one in raised.args if isinstance(one, fx.Node)]
    numbers = [one for one in raised.args if type(one) in (int, float)]
    return values[0] if len(values) == 1 and numbers == [3] else None
