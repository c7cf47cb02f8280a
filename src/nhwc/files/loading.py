"""Load a model from its file, where its classes are not known, and plan it for this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map_only

from ..errors import FileError, InputError, NhwcError, is_out_of_memory, of_kind
from ..graph.nodes.counts import counts_inputs_alone
from ..kernels.language.sources import sources
from ..kernels.programs.pool import Pool, from_nothing
from ..machine.environment import Environment, beside, usable_device
from ..machine.forks import check_threads
from ..machine.host_memory import bring_back
from ..models.preserve import undrawn
from ..optimized import Optimized, Served, served
from ..optimized.returned import return_as
from ..passes import PASSES, exact_passes
from ..passes.sizes import for_sizes
from ..plan import Plan, make_plan
from ..plan.ledger import Ledger
from ..shown import shown
from ..verify import observe, verify
from ..verify.decided import judged_as_whole
from ..verify.inputs import TRIALS, random_inputs
from ..version import __version__
from .budget import Budget, OverBudget
from .container import damaged, read
from .examples import Example, examples_in
from .guests import guests_of
from .plain import Foreign
from .serial import restore

EXAMPLES = 256
"""The most sets of shapes that a file may be planned for, and the most inputs of each."""


def path_of(given: Any, call: str) -> Path:
    try:
        return Path(given)
    except TypeError:
        raise InputError(
            f"{of_kind(given)} is no path of a file. Give one, as nhwc.{call}."
        ) from None


@contextlib.contextmanager
def _without_autocast() -> Iterator[None]:
    """Choose kernels as calls have them that are planned, whatever surrounds `load`."""
    with contextlib.ExitStack() as stack:
        for kind in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@_without_autocast()
@torch.inference_mode(False)
def load(path: str | Path, device: torch.device | str = "cpu") -> Optimized:
    """Load a model that `save` wrote onto `device`, and choose its kernels for this machine.

    >>> import tempfile
    >>> from torch import nn
    >>> from nhwc import save
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "net.nhwc")
    ...     save(net, file)
    ...     again = load(file)
    >>> again(torch.rand(1, 3, 16, 16)).shape
    torch.Size([1, 8, 14, 14])

    A file can call only operators of torch whose schemas say that they compute and nothing else,
    nhwc's own layers, and a few listed functions; docs/file-format.md has the checks. Any other
    file, and a damaged one, raises FileError. Choosing kernels runs the graph on the examples that
    the file names. Their cost is reckoned from shapes first: an example beyond the budget is not
    planned for. The author of the file decides how much time and memory a call of the loaded model
    takes.
    """
    check_threads()
    path, there = path_of(path, "load('model.nhwc')"), usable_device(device)
    header, tensors = read(path)
    ledger = Ledger.of(Environment.here(there))
    try:
        graph = restore(header, tensors)
        if not counts_inputs_alone(graph.graph):
            raise Foreign("a check of numbers that are no input's")
        examples = [[examples_in(text) for text in inputs] for inputs in _planned_for(header)]
        planned = _affordable(graph, examples, ledger, _known_as(header))
        if type(header["exact"]) is not bool:
            raise Foreign(f"exact is {header['exact']!r}")
    except (NhwcError, MemoryError):
        raise
    except Exception as error:
        if newer := _newer(header):
            raise FileError(
                f"{path} was saved with {newer}, and has what this one does not know "
                f"({shown(error)}). Install that version here, or save the model with this one."
            ) from error
        raise damaged(path, f"it describes no model ({shown(error)})") from error
    with beside(graph.to(there).parameters()), undrawn():
        return _planned(graph, planned, header["exact"], there, ledger)


def versions() -> dict[str, str]:
    return {"nhwc": __version__, "torch": torch.__version__.partition("+")[0]}


def _newer(header: dict[str, Any]) -> str:
    """Of nhwc and torch, what the file was saved with in a newer version than here, in words."""
    saved = header.get("written_with")
    if not isinstance(saved, dict):
        return ""
    pairs = [(name, str(saved.get(name)), here) for name, here in versions().items()]
    return " and ".join(
        f"{name} {shown(there)}" for name, there, here in pairs if _release(there) > _release(here)
    )


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"[0-9]{1,9}", version)[:3])


def _planned_for(header: dict[str, Any]) -> list[list[str]]:
    """The texts of the examples, each once, as lists within bounds; Foreign for anything else."""
    planned = header["planned"]
    if not isinstance(planned, list) or len(planned) > EXAMPLES:
        raise Foreign(f"it is planned for more than {EXAMPLES} sets of shapes, or for none at all")
    if not all(isinstance(inputs, list) and len(inputs) <= EXAMPLES for inputs in planned):
        raise Foreign("an example that is no list of inputs")
    return [inputs for number, inputs in enumerate(planned) if inputs not in planned[:number]]


def _known_as(header: dict[str, Any]) -> str:
    """What the ledger knows a file by, whose numbers may be any: their shapes make the cost."""
    told = f"{sources(Path(__file__).parent)} {json.dumps(header)}"
    return f"cost of {hashlib.sha256(told.encode()).hexdigest()}"


def _affordable(
    graph: fx.GraphModule, examples: list[list[Any]], ledger: Ledger, key: str
) -> list[list[Any]]:
    """The examples on which a run of the graph stays within the budget.

    Reckoning that takes as long as all else, so the ledger keeps it.
    """
    fits = ledger.get(key)
    if not isinstance(fits, list) or [type(one) for one in fits] != [bool] * len(examples):
        budget = Budget()
        fits = [_is_within(budget, graph, example) for example in examples]
        ledger.put(key, fits)
    return [example for example, fit in zip(examples, fits, strict=True) if fit]


def _is_within(budget: Budget, graph: fx.GraphModule, example: list[Any]) -> bool:
    try:
        budget.check(graph, example)
    except OverBudget:
        return False
    return True


def drawn(examples: Iterable[Any]) -> tuple[Any, ...]:
    """Inputs for one call, in the lists, tuples and dicts that hold the examples."""
    found: tuple[Any, ...] = tree_map_only(Example, Example.drawn, tuple(examples))
    return found


def _planned(
    graph: fx.GraphModule,
    examples: list[list[Any]],
    exact: bool,
    device: torch.device,
    ledger: Ledger,
) -> Optimized:
    pool = Pool()
    there = lambda inputs: tree_map_only(Tensor, lambda x: x.to(device), inputs)
    # Drawn one after the other: all at once may be more than there is memory for.
    found = (_served(graph, there(drawn(one)), ledger, pool, exact) for one in examples)
    plans = [one for one in found if one is not None]
    ledger.save()
    packed = (weight for one in plans for weight in one.weights)
    bring_back((*graph.parameters(), *graph.buffers()), packed)
    return Optimized(graph, plans, exact=exact, pool=pool)


def _served(
    graph: fx.GraphModule, inputs: tuple[Any, ...], ledger: Ledger, pool: Pool, exact: bool
) -> Served | None:
    """A plan for `inputs`, or none: of `graph`, or of one for their sizes that opens its guests."""
    sized, _ = for_sizes(
        graph, inputs, guests_of(graph.graph), exact_passes(PASSES) if exact else PASSES
    )
    for planned in (sized.graph, graph) if sized else (graph,):
        try:
            plan = _plan_that_agrees(planned, graph, inputs, ledger, pool, exact)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            continue  # Without a plan a call runs the graph, which says what is wrong.
        if plan is not None:
            one = served(plan, planned, inputs)
            own = None if planned is graph else planned
            return dataclasses.replace(one, recipe=dataclasses.replace(one.recipe, graph=own))
    return None


def _plan_that_agrees(
    planned: fx.GraphModule,
    graph: fx.GraphModule,
    inputs: tuple[Any, ...],
    ledger: Ledger,
    pool: Pool,
    exact: bool,
) -> Plan | None:
    """A plan that answers as `graph` does, with exact kernels if others round too freely."""
    truth, several = observe(graph, [inputs], wide=False), None
    if planned is not graph:
        return_as(planned, inputs, truth.answers[0])
    for exactly in dict.fromkeys((exact, True)):
        plan = make_plan(planned, inputs, ledger, exact=exactly, pool=pool)
        with from_nothing():
            # What differs by roundings alone needs no run in float64.
            if verify(dataclasses.replace(truth, exact=truth.answers), plan.program).passed:
                return plan
            several = several or observe(graph, random_inputs(inputs, TRIALS))
            found = verify(several, plan.program)
            if judged_as_whole(found, several, graph, plan.program).passed:
                return plan
    return None
