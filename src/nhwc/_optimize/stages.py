"""`optimize`: passes in order, a plan by measurement, both verified, and never slower."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..errors import InputError, NhwcError
from ..graph import capture, capture_closed, check_copies, graphs
from ..graph.copies import own_copy
from ..machine.environment import Environment
from ..machine.forks import check_threads
from ..machine.host_memory import in_memory, shelve, trim, unread
from ..models.kinds import check_devices, check_initialized, rewritable
from ..models.preserve import preserved
from ..models.trees import tensors_of
from ..optimized import Optimized, describe
from ..passes import PASSES, Pass, run_passes
from ..plan.ledger import Ledger
from ..verify import Verification
from .contest import Contest, winner
from .inner import unplanned
from .planner import Planner
from .report import OptimizeReport
from .sizes import for_sizes
from .verdict import Judge

Progress = Callable[[str], None]


def optimize(
    model: nn.Module,
    *example_inputs: Any,
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
    tuple of tensors. Other shapes give right results without a plan. `exact` leaves out kernels
    that reach their sums by other products than the layer names (Winograd): those round otherwise,
    make NaN of all numbers in a tile of 4x4 that one NaN or infinity touches, and lose the digits
    of a number beside one that is 1e7 times as large. `remeasure` asks for
    all times and verdicts anew, after a run on a loaded machine, say. The result is for
    inference: gradients take the slower graph. `report` has every decision; where nothing was
    gained, the result holds a copy of `model` as it is.
    """
    start = time.perf_counter()
    model = rewritable(model, "optimize")
    _check(model, example_inputs)
    if isinstance(also, Tensor):
        raise InputError(
            f"also is one tensor, {describe((also,))[0]}. Give a list of inputs: also=[x]."
        )
    more = tuple(map(_as_tuple, also))
    say = progress or (lambda text: None)
    with torch.inference_mode(False), torch.no_grad(), preserved(model):
        work = _Work(model, example_inputs, say, exact=exact, remeasure=remeasure)
        for inputs in more:
            work.judge.runs(inputs)
        say("capturing the graph")
        work.rewrite(passes)
        work.check_graph()
        with preserved(work.graph):
            work.open(passes, (example_inputs, *more))
            work.time("graph", work.graph)
        work.shelve()
        with preserved(work.graph):
            work.plan(exact=exact)
            work.check()
            if work.is_planned:
                with preserved(work.planned):
                    work.time("plan", work.planned)
        work.ledger.save()
        return work.finish(start)


class _Work:
    """One optimization under way."""

    def __init__(
        self,
        model: nn.Module,
        example: tuple[Any, ...],
        say: Progress,
        *,
        exact: bool,
        remeasure: bool,
    ) -> None:
        self.model, self.example, self.say, self.exact = model, example, say, exact
        device = next((x.device for x in tensors_of(example)), "cpu")
        self.environment = Environment.here(device)
        self.ledger = Ledger.of(self.environment)
        if remeasure:
            self.ledger.forget()
        self.contest = Contest(model, example, self.ledger, self.environment.device)
        # Before there is a graph: the copy in float64 is the largest of all.
        self.judge = Judge(model, example, self.ledger, say)

    def rewrite(self, passes: Sequence[Pass]) -> None:
        # A plan for other shapes than these is in the way of one for them.
        captured = capture(unplanned(self.model), layers=True)
        self.closed = False
        self.opaque = captured.opaque
        self.graph: fx.GraphModule = captured.module
        self.passes = run_passes(self.graph, passes)
        for parameter in self.graph.parameters():
            parameter.requires_grad_(False)
        trim()

    def check_graph(self) -> None:
        """Hold the graph against the original; where it cannot even run, the model stays closed."""
        try:
            with preserved(self.graph):
                self.judge.check(self.graph)
        except NhwcError:
            raise
        except Exception as error:
            said = " ".join(str(error).split())[:200]
            reason = f"a graph of it fails where it does not: {type(error).__name__}: {said}"
            captured = capture_closed(unplanned(self.model), reason)
            self.opaque, self.graph, self.passes = captured.opaque, captured.module, ()
            self.closed = True
            with preserved(self.graph):
                self.judge.check(self.graph)

    def open(self, passes: Sequence[Pass], examples: Sequence[tuple[Any, ...]]) -> None:
        """Look into opaque parts with the sizes of each example."""
        self.examples = examples
        self.sized = [
            None if self.closed else for_sizes(self.graph, one, self.opaque, passes)
            for one in examples
        ]

    def shelve(self) -> None:
        """Let the weights lie in a file while there are kernels with copies of their own."""
        graphs = [self.graph, *(one.graph for one in self.sized if one)]
        self.shelved = shelve(p for graph in graphs for p in graph.parameters())
        trim()

    def plan(self, *, exact: bool) -> None:
        self.planner = Planner(self.ledger, self.say, exact=exact)
        self.planned = self.planner.plan(self.graph, self.examples, self.sized)

    def check(self) -> None:
        """Hold the result against the original; a plan that rounds too freely is made exactly."""
        found = self._judged()
        if not found.passed and self.planner.kernels and not self.exact:
            self.plan(exact=True)
            found = self._judged()
        if not found.passed and any(self.sized):
            self.sized = [None for _ in self.examples]
            self.plan(exact=self.exact)
            found = self._judged()
        found.require()
        self.verification = found

    def _judged(self) -> Verification:
        whole = not self.opaque
        more, labels = self.examples[1:], self._labels()
        found = self.judge.judge(self.planned, self.graph, more, labels, whole=whole)
        unread(self.shelved)
        return found

    def _labels(self) -> str:
        """What stands behind the answers: the passes that ran, and every kernel."""
        passes = [f"{report.name} {len(report.applied)}" for report in self.passes]
        return _digest([*passes, *self.planner.kernels])

    @property
    def is_planned(self) -> bool:
        return self.planned.portable is not self.graph or self.planned.serves(self.example)

    def time(self, stage: str, module: nn.Module) -> None:
        self.say(f"timing the {stage}")
        kernels = self.planner.kernels if stage == "plan" else []
        self.contest.time(stage, module, f"{stage} {self._fingerprint(kernels)}")

    def finish(self, start: float) -> Optimized:
        chosen, reason = winner(self.contest.compared)
        report = OptimizeReport(
            model=type(self.model).__name__,
            inputs=describe(self.example),
            exact=self.exact,
            chosen=chosen,
            reason=reason or self._why_unplanned(),
            passes=self.passes,
            opaque=self.opaque,
            plans=tuple(self.planner.reports),
            verification=self.verification,
            compared=self.contest.compared,
            remembered=self.contest.remembered,
            setup_s=time.perf_counter() - start,
            environment=self.environment,
        )
        packed = {id(weight) for weight in self.planner.weights} if chosen == "plan" else ()
        for weight in self.shelved:
            if id(weight) not in packed:
                weight.data = in_memory(weight.data)
        result = self._result(chosen)
        trim()
        result.report, result.exact = report, self.exact
        result.examples = tuple(map(describe, self.examples))
        return result

    def _result(self, chosen: str) -> Optimized:
        """What won, as a model of its own: nothing done to it reaches the user's."""
        if chosen == "plan":
            for module in self.planned.modules():
                if isinstance(module, Optimized):
                    # Weights were moved since, with the numbers they had.
                    module.restamp()
            return self.planned
        if chosen == "graph":
            return Optimized(self.graph)
        own = own_copy(self.model)
        return own if isinstance(own, Optimized) else Optimized(own)

    def _why_unplanned(self) -> str:
        """Why some example has no plan; with plans for parts, that is no question of theirs."""
        reports = self.planner.reports
        told = [one for one in reports if not one.part] if self.planner.kernels else reports
        return next((one.reason for one in told if one.reason), "")

    def _fingerprint(self, kernels: Sequence[str]) -> str:
        """The same for the same graph, shapes and kernels: then times carry over."""
        codes = [graph.code for _, graph in graphs(self.graph)]
        return _digest([*codes, repr(self.graph), *describe(self.example), *kernels])


def _check(model: nn.Module, inputs: tuple[Any, ...]) -> None:
    tensors = tensors_of(inputs)
    if not tensors:
        raise InputError(
            f"{len(inputs)} example inputs were given and no tensor among them; kernels are chosen "
            "on real shapes. Call optimize(model, torch.randn(1, 3, 224, 224)), say."
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


def _is_exported(module: nn.Module) -> bool:
    """Whether torch.export made it: such a module takes no `eval()`, and its flag says nothing."""
    return isinstance(module, fx.GraphModule) and "eval" in vars(module)


def _digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:24]


def _as_tuple(inputs: Any) -> tuple[Any, ...]:
    return tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)
