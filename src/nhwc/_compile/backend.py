"""What torch.compile calls with each graph that Dynamo captured."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import fx

from ..errors import InputError
from ..models.kinds import true_or_false
from .planned import GraphReport, PlannedGraph


class Backend:
    """A backend of torch.compile; `graphs` tells what became of each graph that is in use."""

    def __init__(self, *, exact: bool = False) -> None:
        true_or_false(exact=exact)
        self.exact = exact
        self._said: set[str] = set()
        self._planned: list[weakref.ref[PlannedGraph]] = []

    def __call__(
        self,
        graph: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        if mode is not None:
            raise InputError(
                f"mode is {mode!r}; the backend nhwc has no modes, since it always measures. Leave "
                'mode out; options={"exact": True} is what can be chosen.'
            )
        exact = self.exact if options is None else _exact(options, self.exact)
        planned = PlannedGraph(graph, example_inputs, exact=exact, say=self._say)
        self._planned = [one for one in self._planned if one() is not None]
        self._planned.append(weakref.ref(planned))
        return planned

    def __reduce__(self) -> Any:
        """A compiled model that is copied or pickled takes its backend along, empty."""
        return partial(Backend, exact=self.exact), ()

    @property
    def graphs(self) -> tuple[GraphReport, ...]:
        alive = [one() for one in self._planned]
        return tuple(planned.report for planned in alive if planned is not None)

    def reset(self) -> None:
        """Forget what was said; `torch.compiler.reset()` calls it."""
        self._said.clear()

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            warnings.warn(text)


def backend(*, exact: bool = False) -> Backend:
    """Return a backend for torch.compile, whose `graphs` tell what became of the model.

    >>> import torch
    >>> from torch import nn
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    >>> chosen = backend(exact=True)
    >>> fast = torch.compile(net, backend=chosen)
    >>> with torch.no_grad():
    ...     fast(torch.randn(1, 3, 16, 16)).shape
    torch.Size([1, 8, 14, 14])
    >>> [report.verification.passed for graph in chosen.graphs for report in graph.reports]
    [True]

    `torch.compile(net, backend="nhwc")` does the same without an import of nhwc, and takes `exact`
    as `options={"exact": True}`; `optimize` says what it is. Each graph is optimized in the first
    call with its shapes, for four sets of shapes at most. Calls that want gradients, in training
    mode, under autocast or of other shapes run the graph as it was captured.
    """
    return Backend(exact=exact)


by_name = Backend()
"""What `backend="nhwc"` finds, by the entry point in pyproject.toml; torch asks for one object."""


def _exact(options: Mapping[str, Any], exact: bool) -> bool:
    unknown = [name for name in options if name != "exact"]
    if unknown:
        raise InputError(
            f"options has {unknown[0]!r}; the backend nhwc knows exact alone. "
            'Call torch.compile(model, backend="nhwc", options={"exact": True}), say.'
        )
    found = options.get("exact", exact)
    if not isinstance(found, bool):
        raise InputError(f"options has exact={found!r}; it is True or False.")
    return found
