"""`optimize`: passes in order, a plan by measurement, both verified, and never slower."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn

from ..errors import InputError, VerificationError, of_kind
from ..graph import check_copies, graphs
from ..graph.effects.outside import outside_put_back
from ..graph.nodes.counts import counts_of
from ..graph.report import Opaque
from ..graph.tracing.copies import own_copy
from ..machine.crowd import one_thread_if_crowded
from ..machine.environment import Environment, beside
from ..machine.forks import check_threads
from ..machine.host_memory import bring_back, shelve, unread
from ..machine.others import Others, watch_others
from ..models.kinds import (
    check_devices,
    check_initialized,
    given_by_name,
    rewritable,
    true_or_false,
)
from ..models.places import by_place
from ..models.preserve import preserved
from ..models.trees import every_tensor_of, tensors_of
from ..optimized import Optimized, describe
from ..optimized.returned import return_as
from ..passes import PASSES, Pass, exact_passes
from ..passes.sizes import Sized, for_sizes
from ..plan.ledger import Ledger, digest
from ..plan.measuring import Leisure
from ..shown import described, shown
from ..verify import Verification, answer
from .contest import Turns, take_turns, winner
from .planner import Planned, bare, plan_model, refusals
from .report import OptimizeReport
from .rewritten import Rewritten, captured_for, checked, closed, rewrite
from .task import OptimizeTask, Progress
from .verdict import Judge

_AGAIN_S = 0.5
"""About how long what is known may be measured again, as long as it is not settled."""


def optimize(
    model: nn.Module,
    *example_inputs: Any,
    kwargs: Mapping[str, Any] | None = None,
    passes: Sequence[Pass] = PASSES,
    exact: bool = False,
    also: Sequence[Any] = (),
    remeasure: bool = False,
    progress: Progress | None = None,
) -> Optimized:
    """Return a model that computes the same as `model` and is not slower, here and on these shapes.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    >>> fast = optimize(net, torch.randn(1, 3, 16, 16))
    >>> fast.report.verification.passed
    True

    It is planned for the shapes of `example_inputs` and of each entry of `also`, a tensor or a
    tuple of tensors; each is completed by `kwargs`, what is given by name. Other shapes give right
    results without a plan. `exact` leaves out kernels that reach their sums by other products than
    the layer names: Winograd's round otherwise, make NaN of all numbers in a tile that one NaN or
    infinity touches, and lose the digits of a number beside one that is 1e7 times as large; that
    for transposed convolutions of few filters makes NaN of some beside it, causal attention of what
    comes before it; where positions are brought into the channels of attention, an infinite one
    makes NaN of its query; and where channels are mixed before an image is enlarged, an infinite
    pixel may make NaN of its neighbours. `remeasure` asks for all times and verdicts anew, after a
    run on a loaded machine, say. The result is for inference: gradients take the slower graph.
    `report` has every decision; where nothing was gained, the result holds a copy of `model` as it
    is.
    """
    begin = _Begin(time.perf_counter(), watch_others())
    true_or_false(exact=exact, remeasure=remeasure)
    model, named = rewritable(model, "optimize"), given_by_name(kwargs)
    example_inputs = _completed(model, example_inputs, named)
    _check(model, example_inputs)
    if isinstance(also, Tensor) or not isinstance(also, Iterable):
        raise InputError(
            f"also is {describe((also,))[0]}, not a list of inputs. Give one: also=[x]."
        )
    examples = (example_inputs, *(_example(model, one, named) for one in also))
    say = progress or (lambda text: None)
    passes = exact_passes(passes) if exact else passes
    tensors = tensors_of(example_inputs)
    with (
        torch.inference_mode(False),
        torch.no_grad(),
        preserved(model, weights=1 << 26),
        outside_put_back(model),
        beside(tensors),
    ):
        environment, ledger = _here(example_inputs, remeasure=remeasure)
        leisure = Leisure(_AGAIN_S)
        task = OptimizeTask(model, examples, passes, exact, say, environment, ledger, leisure)
        # Before there is a graph: the copy in float64 is the largest of all.
        judge = Judge(model, task.example, ledger, say)
        for inputs in examples[1:]:
            judge.runs(inputs)
        say("capturing the graph")
        try:
            with one_thread_if_crowded():
                rewritten = checked(rewrite(captured_for(task), task), task, judge)
            return _optimized(rewritten, task, judge, begin)
        except VerificationError:
            reason = judge.why_unlike()
            if reason is None:
                judge.check_repeats()
                raise
        return _optimized(closed(task, judge, reason), task, judge, begin)


class _Begin(NamedTuple):
    """When `optimize` began, and what other programs had of the cores since then."""

    at_s: float
    others_since: Callable[[], Others | None]


def _optimized(rewritten: Rewritten, task: OptimizeTask, judge: Judge, begin: _Begin) -> Optimized:
    """Plan the graph, time what there is in turns, and return what won."""
    graph, ledger = rewritten.graph, task.ledger
    with preserved(graph):
        sized, rewritten = _sized(rewritten, task)
        turns = take_turns(task, {"graph": graph}, _key("graph", graph, task))
    shelved = _shelve(graph, sized)
    with preserved(graph):
        judged = _planned_soundly(rewritten, sized, shelved, task, judge)
        planned = judged.planned
        if planned.model.portable is not graph or planned.model.serves(task.example):
            with preserved(planned.model):
                turns = _with_plan(turns, graph, planned, task)
    ledger.save()
    report = _report(task, rewritten, judged, turns, begin)
    bring_back(shelved, planned.weights if report.chosen == "plan" else ())
    result = _result(report.chosen, task, rewritten, planned)
    # Wherever it is planned again, from a file or for other shapes, the same is asked of it.
    result.report, result.exact = report, judged.exact
    counts = [counts_of(one.graph.graph) if one else () for one in sized]
    result.examples = tuple(map(describe, task.examples, counts))
    return result


def _with_plan(
    graph_turns: Turns, graph: fx.GraphModule, planned: Planned, task: OptimizeTask
) -> Turns:
    """The turns of the graph and those of the plan; the same ones, if the graph seems faster.

    Another moment may have been kinder to it, and would be remembered.
    """
    key, stages = _key("plan", graph, task, planned.kernels), {"plan": planned.model}
    turns = take_turns(task, stages, key, planned.layers_s)
    compared = {**graph_turns.compared, **turns.compared}
    if winner(compared)[0] != "graph":
        return Turns(compared, turns.remembered)
    turns = take_turns(task, {"graph": graph, **stages}, f"graph or {key}", planned.layers_s)
    unread(graph.parameters())
    return turns


@dataclass(frozen=True)
class _Judged:
    """A planned model that was found right, the verdict, and whether all its kernels are exact."""

    planned: Planned
    verification: Verification
    exact: bool


def _here(example: tuple[Any, ...], *, remeasure: bool) -> tuple[Environment, Ledger]:
    """The machine that `example` lies on, and what was measured there."""
    device = next((x.device for x in tensors_of(example)), "cpu")
    environment = Environment.here(device)
    ledger = Ledger.of(environment)
    if remeasure:
        ledger.forget()
    return environment, ledger


def _sized(rewritten: Rewritten, task: OptimizeTask) -> tuple[list[Sized | None], Rewritten]:
    """Make for each example a graph for its sizes, or None if that opens no opaque part.

    If none opens a model that is closed as a whole, `rewritten` also tells why not.
    """
    if rewritten.closed:
        return [None for _ in task.examples], rewritten
    graph, opaque = rewritten.graph, rewritten.opaque
    told = [for_sizes(graph, one, opaque, task.passes) for one in task.examples]
    found, reasons = [sized for sized, _ in told], [reason for _, reason in told]
    for sized, inputs in zip(found, task.examples, strict=True):
        if sized is not None:
            return_as(sized.graph, inputs, answer(graph, inputs))
    if any(found):
        return found, rewritten
    return found, replace(rewritten, opaque=tuple(_told(part, reasons[0]) for part in opaque))


def _told(part: Opaque, reason: str) -> Opaque:
    """`part` with why it stays closed for these sizes, too, if it is the whole model."""
    if part.path or not reason or reason in part.reason:
        return part
    return replace(part, reason=f"{part.reason}; with sizes known, {reason}")


def _shelve(graph: fx.GraphModule, sized: Sequence[Sized | None]) -> list[Tensor]:
    """Move the weights to a file, because the kernels hold copies of their own."""
    graphs = [graph, *(one.graph for one in sized if one)]
    return shelve(p for graph in graphs for p in graph.parameters())


def _planned_soundly(
    rewritten: Rewritten,
    sized: Sequence[Sized | None],
    shelved: Sequence[Tensor],
    task: OptimizeTask,
    judge: Judge,
) -> _Judged:
    """Plan, and hold the result against the original; what rounds too freely is made exactly.

    The graph was found right already: where only plans of it decide otherwise, it has none.
    """

    def judged(planned: Planned) -> Verification:
        more, whole = task.examples[1:], not rewritten.opaque
        labels = _labels(rewritten, planned)
        verdict = lambda: judge.judge(planned.model, rewritten.graph, more, labels, whole=whole)
        found = verdict()
        model = planned.model
        # The graph alone was found right already.
        alone = model.portable is rewritten.graph and all(one.counts for one in model.recipes)
        if found.passed and model.counts and not alone:
            with model.uncounted():
                others = verdict()
            found = found if others.passed else others
        unread(shelved)
        return found

    planned = plan_model(task, rewritten.graph, sized)
    found = judged(planned)
    if not found.passed and planned.kernels and not task.exact:
        exactly = replace(task, exact=True)
        planned = plan_model(exactly, rewritten.graph, sized)
        found = judged(planned)
        if found.passed:
            return _Judged(planned, found, exact=True)
    if not found.passed and any(sized):
        why = f"with sizes known, the plan {found.difference}"
        refused = refusals(why, compress(task.examples, sized))
        planned = plan_model(task, rewritten.graph, [None for _ in sized])
        planned = replace(planned, told=(*refused, *planned.told))
        found = judged(planned)
    reason = None if found.passed else judge.why_unlike()
    if reason:
        planned = bare(task, rewritten.graph, reason)
        found = judged(planned)
    found.require()
    return _Judged(planned, found, task.exact)


def _labels(rewritten: Rewritten, planned: Planned) -> str:
    """Digest what the answers depend on: the passes that changed something, and every kernel."""
    passes = [f"{report.name} {len(report.applied)}" for report in rewritten.passes]
    return digest([*passes, *planned.kernels])


def _key(stage: str, graph: fx.GraphModule, task: OptimizeTask, kernels: Sequence[str] = ()) -> str:
    """The same for the same graph, shapes and kernels: then times carry over."""
    codes = [inner.code for _, inner in graphs(graph)]
    layers = map(described, graph.children())
    return f"{stage} {digest([*codes, *layers, *describe(task.example), *kernels])}"


def _report(
    task: OptimizeTask, rewritten: Rewritten, judged: _Judged, turns: Turns, begin: _Begin
) -> OptimizeReport:
    chosen, reason = winner(turns.compared)
    return OptimizeReport(
        model=type(task.model).__name__,
        inputs=describe(task.example),
        exact=task.exact,
        chosen=chosen,
        reason=reason or _why_unplanned(judged.planned),
        passes=rewritten.passes,
        opaque=rewritten.opaque,
        plans=judged.planned.reports,
        verification=judged.verification,
        compared=turns.compared,
        remembered=turns.remembered,
        setup_s=time.perf_counter() - begin.at_s,
        environment=task.environment,
        others=begin.others_since(),
    )


def _why_unplanned(planned: Planned) -> str:
    """Say why some example has no plan; if parts have plans, ask only about the whole model."""
    reports = planned.reports
    told = [one for one in reports if not one.part] if planned.kernels else reports
    return next((one.reason for one in told if one.reason), "")


def _result(chosen: str, task: OptimizeTask, rewritten: Rewritten, planned: Planned) -> Optimized:
    """Return the winner as a model that shares nothing with the user's."""
    if chosen == "plan":
        for module in planned.model.modules():
            if isinstance(module, Optimized):
                # Weights were moved since, with the numbers they had.
                module.restamp()
        return planned.model
    if chosen == "graph":
        return Optimized(rewritten.graph)
    own = own_copy(task.model)
    return own if isinstance(own, Optimized) else Optimized(own)


def _check(model: nn.Module, inputs: tuple[Any, ...]) -> None:
    tensors = tensors_of(inputs)
    if not tensors:
        holder = next((x for x in inputs if every_tensor_of(x)), None)
        if holder is not None:
            raise InputError(
                f"the example's tensors lie in {of_kind(holder)}; kernels are chosen for "
                "those that are given alone, or in lists, tuples and dicts. Give them so, or use "
                'torch.compile(model, backend="nhwc"), which takes calls as they come.'
            )
        raise InputError(
            f"{len(inputs)} example inputs were given and no tensor among them; kernels are chosen "
            "on real shapes. Call optimize(model, torch.randn(1, 3, 224, 224)), say."
        )
    _check_shapes(tensors)
    if not any(tensor.numel() for tensor in tensors):
        raise InputError(
            f"input {tuple(tensors[0].shape)} is empty; kernels are chosen by their times. Give at "
            "least one image: the result takes empty batches, too."
        )
    check_threads()
    check_initialized(model)
    check_copies(model)
    check_devices(model, tensors)
    exported = {p for whole in model.modules() if _is_exported(whole) for p in whole.modules()}
    found = [(name, m) for name, m in model.named_modules() if m not in exported]
    training = [name for name, module in found if module.training]
    if training:
        raise InputError(
            f"{training[0] or type(model).__name__} is in training mode; optimizing is for "
            "inference. Call model.eval() first."
        )


def _check_shapes(tensors: Sequence[Tensor]) -> None:
    if any(tensor.is_nested for tensor in tensors):
        raise InputError(
            "an example input is a nested tensor, which has no one shape; kernels are chosen on "
            "real shapes. Give it padded, as to_padded_tensor(0.0) makes it. Nested ones may be "
            "given to the result, which takes their slower graph."
        )


def _completed(model: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of a call by their places, as plans know them."""
    if not named:
        return inputs
    placed = by_place(model, inputs, named)
    if placed is None:
        raise InputError(
            f"{type(model).__name__}.forward has no place for each of {', '.join(named)} beside "
            f"{len(inputs)} inputs. Give by name what has a place among its arguments; for others, "
            'torch.compile(model, backend="nhwc") takes calls as they come.'
        )
    return placed


def _example(model: nn.Module, one: Any, named: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of the call that an entry of `also` stands for."""
    inputs = _completed(model, _as_tuple(one), named)
    tensors = tensors_of(inputs)
    if not tensors:
        raise InputError(
            f"also has {shown(described(one))}, and no tensor in it; kernels are chosen on real "
            "shapes. Give one: also=[torch.randn(8, 3, 224, 224)], say."
        )
    _check_shapes(tensors)
    return inputs


def _is_exported(module: nn.Module) -> bool:
    """Whether torch.export made it: such a module takes no `eval()`, and its flag says nothing."""
    return isinstance(module, fx.GraphModule) and "eval" in vars(module)


def _as_tuple(inputs: Any) -> tuple[Any, ...]:
    return tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
