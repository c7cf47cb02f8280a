"""A model as a graph that the passes have rewritten, and that answers as the model does."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from ..errors import NhwcError, VerificationError, is_out_of_memory
from ..graph import Captured, capture, capture_closed, is_one_call
from ..graph.nodes.seen import note_fixed
from ..graph.report import Opaque, PassReport
from ..machine.host_memory import trim
from ..models.preserve import preserved
from ..optimized.returned import return_as
from ..passes import run_passes
from ..shown import shown
from .inner import inner_graphs, unplanned
from .task import OptimizeTask
from .verdict import Judge


@dataclass(frozen=True)
class Rewritten:
    """The graph, the parts of the model that it only calls, and what each pass did.

    A `closed` graph calls the model as it is: no graph of its inside can run.
    """

    graph: fx.GraphModule
    opaque: tuple[Opaque, ...]
    passes: tuple[PassReport, ...] = ()
    closed: bool = False


def captured_for(task: OptimizeTask) -> Captured:
    """A copy of the model as a graph."""
    # A plan for other shapes than these is in the way of one for them.
    captured = capture(unplanned(task.model), task.examples, layers=True)
    note_fixed(captured.module, task.model, task.example)
    return captured


def rewrite(captured: Captured, task: OptimizeTask) -> Rewritten:
    """Run the passes on the captured graph, in place."""
    graph = captured.module
    reports = run_passes(graph, task.passes)
    for parameter in graph.parameters():
        parameter.requires_grad_(False)
    trim()
    # A pass may have put another layer in the place of a model that is one layer of torch's.
    opaque = tuple(part for part in captured.opaque if part.path or hasattr(graph, "model"))
    return Rewritten(graph, opaque, (*captured.baked, *reports))


def checked(rewritten: Rewritten, task: OptimizeTask, judge: Judge) -> Rewritten:
    """Hold the graph against the original; where it cannot even run, the model stays closed."""
    try:
        with preserved(rewritten.graph):
            _check(rewritten.graph, judge)
        return_as(rewritten.graph, task.example, judge.answers)
        return rewritten
    except NhwcError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        said = f"{type(error).__name__}: {shown(error)}"
        reason = f"a graph of it fails where it does not: {said}"
        return closed(task, judge, reason)


def _check(graph: fx.GraphModule, judge: Judge) -> None:
    """Hold the graph against the original; one of which nothing was rewritten, unfrozen as well."""
    try:
        judge.check(graph)
    except VerificationError:
        if not is_one_call(graph) or inner_graphs(graph):
            raise
        judge.check_unfrozen(graph)


def closed(task: OptimizeTask, judge: Judge, reason: str) -> Rewritten:
    """The model as it is, called as a whole, and why."""
    captured = capture_closed(unplanned(task.model), reason)
    with preserved(captured.module):
        _check(captured.module, judge)
    return Rewritten(captured.module, captured.opaque, closed=True)
