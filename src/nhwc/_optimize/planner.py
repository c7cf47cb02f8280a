"""Plans for a model: for the whole around its opaque parts, and for the graphs inside them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, fx

from ..graph import is_one_call, is_one_layer
from ..graph.code.mentions import asks_strides
from ..graph.nodes.counts import counts_of
from ..models.preserve import preserved
from ..optimized import Optimized, Served, describe, is_known, served, signature
from ..passes.sizes import Sized
from ..plan import Plan, Unplannable, gains, make_plan
from ..plan.implementation import Timed
from .fallbacks import fallbacks
from .inner import inner_graphs, put, twin, uses
from .report import KernelTime, LayerReport, PlanReport, WholeTime
from .task import OptimizeTask


@dataclass(frozen=True)
class Told:
    """The report of one graph for one set of shapes, with the names of its kernels.

    `weights` are the tensors that the kernels were given.
    """

    report: PlanReport
    kernels: tuple[str, ...] = ()
    weights: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Planned:
    """A model with all plans that could be made, and what is told of them and of the others."""

    model: Optimized
    told: tuple[Told, ...]

    @property
    def reports(self) -> tuple[PlanReport, ...]:
        return tuple(one.report for one in self.told)

    @property
    def kernels(self) -> tuple[str, ...]:
        return tuple(kernel for one in self.told for kernel in one.kernels)

    @property
    def layers_s(self) -> float:
        """What the layers of the only plan take alone; 0 if there are several, or a part's."""
        plans = self.reports
        return plans[0].layers_s if len(plans) == 1 and not plans[0].part else 0.0

    @property
    def weights(self) -> tuple[Tensor, ...]:
        return tuple(weight for one in self.told for weight in one.weights)


def plan_model(task: OptimizeTask, graph: fx.GraphModule, sized: Sequence[Sized | None]) -> Planned:
    """`graph` planned for the examples of `task`, or with planned graphs inside it, or both.

    Where there is a graph for the sizes of an example alone, that one is. If that is for numbers,
    too, calls with others have what can be planned for any.
    """
    plans: list[Served] = []
    told: list[Told] = []
    rest: list[tuple[tuple[Any, ...], bool]] = []  # With whether they have a plan for numbers.
    known: set[Hashable] = set()
    for inputs, one in zip(task.examples, sized, strict=True):
        key = signature(inputs, counts_of(one.graph.graph) if one else ())
        if key in known:
            continue  # Answers lie as they did for the first example of these shapes.
        known.add(key)
        found, said = _plan_sized(task, one, inputs) if one else (None, [])
        plans += [found] if found else []
        told += said
        if found is None or found.recipe.counts:
            rest.append((inputs, found is not None))
    around, said = _with_parts(task, graph, [inputs for inputs, _ in rest])
    told += [one for one in said if one.kernels or not all(counted for _, counted in rest)]
    if not (is_one_call(graph) and inner_graphs(graph)):
        for inputs, counted in rest:
            if signature(inputs) in {one.recipe.signature for one in plans}:
                continue  # One with other numbers has this plan already.
            found, one_said = _plan(task, around, inputs)
            plans += [found] if found else []
            told += [one_said] if found or not counted else []
    return Planned(Optimized(around, plans, pool=task.pool), tuple(told))


def bare(task: OptimizeTask, graph: fx.GraphModule, reason: str) -> Planned:
    """`graph` without plans, and why."""
    return Planned(Optimized(graph, pool=task.pool), refusals(reason, task.examples))


def refusals(reason: str, examples: Iterable[tuple[Any, ...]]) -> tuple[Told, ...]:
    """What is told of examples that all have no plan for the same reason."""
    return tuple(Told(PlanReport(describe(one), (), 0, 0, reason)) for one in examples)


def _with_parts(
    task: OptimizeTask, graph: fx.GraphModule, examples: Sequence[tuple[Any, ...]]
) -> tuple[fx.GraphModule, list[Told]]:
    """A twin of `graph` in which the graphs inside opaque parts are planned; itself if none."""
    if not examples or not inner_graphs(graph):
        return graph, []
    around = twin(graph)
    parts: dict[fx.GraphModule, list[Served]] = {}
    told = []
    asked = asks_strides(around)
    strides = f"code of the model {asked}" if asked else ""
    for use in uses(around, examples):
        reason = use.reason or strides
        if reason:
            shapes = describe(use.inputs)
            told.append(Told(PlanReport(shapes, (), 0, 0, reason, use.path)))
            continue
        found, said = _plan(task, use.graph, use.inputs, use.path)
        told.append(said)
        if found:
            parts.setdefault(use.graph, []).append(found)
    put(around, {part: Optimized(part, plans) for part, plans in parts.items()})
    return around if parts else graph, told


def _plan_sized(
    task: OptimizeTask, sized: Sized, inputs: tuple[Any, ...]
) -> tuple[Served | None, list[Told]]:
    graph, told = _with_parts(task, sized.graph, [inputs])
    found, said = _plan(task, graph, inputs)
    if found is None:
        reason = f"with sizes known, {said.report.reason}"
        return None, [*told, replace(said, report=replace(said.report, reason=reason))]
    report = replace(
        said.report,
        opened=sized.opened,
        counts=bool(found.recipe.counts),
        unset=sized.unset,
        passes=sized.passes,
    )
    said = replace(said, report=report, kernels=(*said.kernels, "with sizes known"))
    return replace(found, recipe=replace(found.recipe, graph=graph)), [*told, said]


def _plan(
    task: OptimizeTask, graph: fx.GraphModule, inputs: tuple[Any, ...], part: str = ""
) -> tuple[Served | None, Told]:
    """`graph` planned for the shapes of `inputs`, or why it is not."""
    shapes = describe(inputs, counts_of(graph.graph))

    def progress(number: int, total: int, key: str) -> None:
        of = f" of {part}" if part else ""
        task.say(f"measuring layer {number + 1} of {total}{of}: {key}")

    try:
        if not is_known(inputs):
            raise Unplannable("it is given what may change unnoticed from one call to the next")
        with preserved(graph):
            plan = make_plan(
                graph,
                inputs,
                task.ledger,
                exact=task.exact,
                leisure=task.leisure,
                progress=progress,
                pool=task.pool,
            )
            one = is_one_layer(graph)
            if one and not gains(plan, graph, inputs, task.ledger, task.leisure):
                raise Unplannable("no kernel is faster than torch's on what it is given")
    except Unplannable as error:
        return None, Told(PlanReport(shapes, (), 0, 0, str(error), part))
    with preserved(graph):
        left = fallbacks(plan, graph, inputs)
    report = replace(_report(plan, shapes, part), fallbacks=left)
    found = served(plan, graph, inputs)
    return found, Told(report, tuple(plan.words), found.weights)


def _report(plan: Plan, shapes: tuple[str, ...], part: str) -> PlanReport:
    layers = []
    for layer in plan.layers:
        known = tuple(map(_kernel_time, plan.timings[layer.node]))
        chosen = _kernel_time(plan.choice[layer.node])
        evidence = plan.evidence.get(layer.node)
        sureness = evidence.sureness if evidence else ""
        layers.append(LayerReport(layer.name, layer.spec.key, chosen, known, sureness))
    conversions = max(0, len(plan.program.steps) - len(layers))
    return PlanReport(
        shapes,
        tuple(layers),
        conversions,
        plan.measured,
        part=part,
        renewed=plan.renewed,
        layers_s=plan.seconds,
        wholes=_wholes(plan),
    )


def _wholes(plan: Plan) -> tuple[WholeTime, ...]:
    """The assignments that were timed as whole programs; the first is by single layers."""
    whole = plan.whole
    if whole is None:
        return ()
    return tuple(
        WholeTime(whole.seconds[name], len(whole.sittings), int(name) == plan.taken)
        for name in whole.rivals
    )


def _kernel_time(timed: Timed) -> KernelTime:
    one = timed.implementation
    layout = str(one.reads or "any layout")
    return KernelTime(one.name, layout, timed.seconds, timed.spread, timed.turns)
