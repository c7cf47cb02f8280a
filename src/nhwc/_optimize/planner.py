"""Plans for a model: for the whole around its opaque parts, and for the graphs inside them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, fx

from ..graph import is_one_call, is_one_layer
from ..models.preserve import preserved
from ..optimized import Optimized, Recipe, describe, signature
from ..plan import Plan, Unplannable, gains, make_plan
from ..plan.cuda import on_device
from ..plan.implementation import Timed
from ..plan.ledger import Ledger
from .inner import inner_graphs, put, twin, uses
from .report import KernelTime, LayerReport, PlanReport
from .sizes import Sized


@dataclass
class _Plans:
    """The plans of one graph."""

    recipes: list[Recipe] = field(default_factory=list)
    programs: dict[Hashable, Callable[..., Any]] = field(default_factory=dict)


class Planner:
    """Makes plans, and keeps what there is to say of them: `reports`, and `kernels` in words.

    `weights` are those that kernels were given.
    """

    def __init__(self, ledger: Ledger, say: Callable[[str], None], *, exact: bool) -> None:
        self.ledger, self.say, self.exact = ledger, say, exact
        self.reports: list[PlanReport] = []
        self.kernels: list[str] = []
        self.weights: list[Tensor] = []

    def plan(
        self,
        graph: fx.GraphModule,
        examples: Sequence[tuple[Any, ...]],
        sized: Sequence[Sized | None],
    ) -> Optimized:
        """`graph` planned for `examples`, or with planned graphs inside it, or both.

        Where there is a graph for the sizes of an example alone, that one is.
        """
        whole, rest = _Plans(), []
        for inputs, one in zip(examples, sized, strict=True):
            if one is None or not self._add_sized(whole, one, inputs):
                rest.append(inputs)
        around = self._with_parts(graph, rest)
        if not (is_one_call(graph) and inner_graphs(graph)):
            for inputs in rest:
                self._add(whole, around, inputs)
        return Optimized(around, whole.recipes, whole.programs)

    def _with_parts(
        self, graph: fx.GraphModule, examples: Sequence[tuple[Any, ...]]
    ) -> fx.GraphModule:
        """A twin of `graph` in which the graphs inside opaque parts are planned; itself if none."""
        if not examples or not inner_graphs(graph):
            return graph
        around = twin(graph)
        parts: dict[fx.GraphModule, _Plans] = {}
        for use in uses(around, examples):
            if use.reason:
                shapes = describe(use.inputs)
                self.reports.append(PlanReport(shapes, (), 0, 0, use.reason, use.path))
            else:
                self._add(parts.setdefault(use.graph, _Plans()), use.graph, use.inputs, use.path)
        planned = {
            part: Optimized(part, plans.recipes, plans.programs)
            for part, plans in parts.items()
            if plans.recipes
        }
        put(around, planned)
        return around if planned else graph

    def _add_sized(self, plans: _Plans, sized: Sized, inputs: tuple[Any, ...]) -> bool:
        graph = self._with_parts(sized.graph, [inputs])
        count = len(plans.recipes)
        self._add(plans, graph, inputs)
        said = self.reports[-1]
        if len(plans.recipes) == count:
            self.reports[-1] = replace(said, reason=f"with sizes known, {said.reason}")
            return False
        self.reports[-1] = replace(said, opened=sized.opened, passes=sized.passes)
        plans.recipes[-1] = replace(plans.recipes[-1], graph=graph)
        self.kernels.append("with sizes known")
        return True

    def _add(
        self, plans: _Plans, graph: fx.GraphModule, inputs: tuple[Any, ...], part: str = ""
    ) -> None:
        shapes = describe(inputs)

        def progress(number: int, total: int, key: str) -> None:
            of = f" of {part}" if part else ""
            self.say(f"measuring layer {number + 1} of {total}{of}: {key}")

        try:
            with preserved(graph):
                plan = make_plan(graph, inputs, self.ledger, exact=self.exact, progress=progress)
                if is_one_layer(graph) and not gains(plan, graph, inputs, self.ledger):
                    raise Unplannable("no kernel is faster than torch's on what it is given")
        except Unplannable as error:
            self.reports.append(PlanReport(shapes, (), 0, 0, str(error), part))
            return
        self.reports.append(_report(plan, shapes, part))
        self.kernels += plan.words
        self.weights += plan.weights(graph)
        key = signature(inputs)
        plans.recipes.append(Recipe(key, shapes, plan.kernels))
        plans.programs[key] = on_device(plan.program, inputs)


def _report(plan: Plan, shapes: tuple[str, ...], part: str) -> PlanReport:
    layers = []
    for layer in plan.layers:
        known = tuple(map(_kernel_time, plan.timings[layer.node]))
        chosen = _kernel_time(plan.choice[layer.node])
        layers.append(LayerReport(layer.name, layer.spec.key, chosen, known))
    conversions = max(0, len(plan.program.steps) - len(layers))
    return PlanReport(shapes, tuple(layers), conversions, plan.measured, part=part)


def _kernel_time(timed: Timed) -> KernelTime:
    one = timed.implementation
    return KernelTime(one.name, str(one.reads or "any layout"), timed.seconds)
