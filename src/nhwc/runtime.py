"""The module that `optimize` returns: planned calls take the fast way, all others the graph."""

from __future__ import annotations

import contextlib
import operator
import threading
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd import forward_ad

from .formats import format_of
from .plan import Identifier, UnknownKernel, Unplannable, remake_plan
from .plan.cuda import on_device
from .preserve import place_of

_version = operator.attrgetter("_version")


@dataclass(frozen=True)
class Recipe:
    """What was chosen for one set of input shapes; a program is made from it when it is needed.

    `graph` if it was made for these shapes alone. Passes made weights of it from those of the
    graph for all shapes, so it is good for as long as those stay what they are.
    """

    signature: Hashable
    inputs: tuple[Any, ...]
    kernels: tuple[tuple[str, Identifier], ...]
    graph: fx.GraphModule | None = None


class Optimized(nn.Module):
    """A model for inference: `portable`, a graph for any call, and programs for known shapes.

    A call whose inputs have planned shapes, types and device runs its program. Any other call, and
    one under autocast, one that wants gradients, one that is being exported, compiled, scripted,
    traced, transformed (`torch.func`) or watched (a dispatch mode), runs `portable`. New weights
    (`load_state_dict`, `.to()`, in-place changes) are noticed and packed anew at the next call;
    with them, a plan of a graph that was made for its shapes alone is over. Parameters ask for no
    gradients until they are told to.

    What programs have packed, only other calls read as it was: large weights wait for those in a
    file (`release.shelve`) and take no memory until then. Copies of the model hold them in memory.

    `examples` are the shapes it was made for, in words; `report` says how it came about.
    """

    portable: nn.Module
    _programs: dict[Hashable, Callable[..., Any]]

    def __init__(
        self,
        graph: nn.Module,
        recipes: Sequence[Recipe] = (),
        programs: dict[Hashable, Callable[..., Any]] | None = None,
        *,
        report: Any = None,
        exact: bool = False,
    ) -> None:
        super().__init__()
        self.portable = graph
        self.examples: tuple[tuple[str, ...], ...] = ()
        self.report = report
        self.exact = exact
        self.train(graph.training)
        self._recipes = {recipe.signature: recipe for recipe in recipes}
        self._programs = dict(programs or {})
        self._told = False
        self._renew_stamp()

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if named or _is_observed():
            return self.portable(*inputs, **named)
        program = self._programs.get(signature(inputs))
        if program is None or self._has_new_weights():
            program = self._remade(inputs)
        if program is None:
            return self.portable(*inputs)
        if not torch.is_grad_enabled():
            return program(*inputs)
        if self._wants_gradients(inputs):
            return self.portable(*inputs)
        with torch.no_grad():
            return program(*inputs)

    def _wants_gradients(self, inputs: Sequence[Any]) -> bool:
        wanted = any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
        wanted = wanted or any(p.requires_grad for p in self.portable.parameters())
        if wanted and not self._told:
            self._told = True
            warnings.warn(
                "gradients are wanted: planned kernels have none, so this call runs the graph, "
                "which is slower. Call it under torch.no_grad() or inference_mode().",
                stacklevel=4,
            )
        return wanted

    @contextlib.contextmanager
    def unplanned(self) -> Iterator[None]:
        """For a while every call runs `portable`, in which all that happens can be seen."""
        held, self._recipes, self._programs = (self._recipes, self._programs), {}, {}
        try:
            yield
        finally:
            self._recipes, self._programs = held

    def _remade(self, inputs: Sequence[Any]) -> Callable[..., Any] | None:
        """The program of a recipe that has none, or has one with weights of the past."""
        key = signature(inputs)
        if key not in self._recipes or not isinstance(self.portable, fx.GraphModule):
            return None
        with self._lock:
            if self._has_new_weights():
                self._forget()
            recipe = self._recipes.get(key)
            if recipe is not None and key not in self._programs:
                try:
                    with torch.inference_mode(False):
                        graph = recipe.graph or self.portable
                        program = remake_plan(graph, inputs, recipe.kernels)
                        self._programs[key] = on_device(program, inputs)
                except UnknownKernel as error:
                    del self._recipes[key]
                    warnings.warn(f"{error} Until then the graph runs.", stacklevel=5)
                except (Unplannable, RuntimeError, TypeError, ValueError):
                    # Weights of another type or device, say: what the graph answers then is right.
                    del self._recipes[key]
            return self._programs.get(key)

    def _has_new_weights(self) -> bool:
        return bool(sum(map(_version, self._tensors)) != self._stamp)

    def _forget(self) -> None:
        """Let go of all that was made from weights of the past."""
        self._programs = {}
        self._recipes = {key: one for key, one in self._recipes.items() if one.graph is None}
        self._renew_stamp()

    def _renew_stamp(self) -> None:
        self._lock = threading.Lock()
        self._tensors = [*self.portable.parameters(), *self.portable.buffers()]
        self._stamp = -1
        # An in-place change raises a tensor's version, and so the sum.
        with contextlib.suppress(RuntimeError):
            self._stamp = sum(map(_version, self._tensors))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        held = list(map(place_of, self._tensors))
        result = super()._apply(fn, recurse)
        now = [place_of(t) for t in (*self.portable.parameters(), *self.portable.buffers())]
        if now != held or self._has_new_weights():
            self._forget()
        return result

    def __prepare_scriptable__(self) -> nn.Module:
        """What torch.jit.script makes a script of: the graph."""
        return self.portable

    def __getstate__(self) -> dict[str, Any]:
        """Programs hold packed weights and functions: a copy makes its own when it is called."""
        state = dict(self.__dict__, _recipes={r.signature: r for r in self.recipes})
        for name in ("_programs", "_lock", "_tensors", "_stamp"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._programs = {}
        self._renew_stamp()

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        """What is planned; a program is made from each when it is first called."""
        recipes = self._recipes.values()
        return tuple(r for r in recipes if r.graph is None or not self._has_new_weights())

    def serves(self, inputs: Sequence[Any]) -> bool:
        """Whether there is a plan for these shapes."""
        return signature(inputs) in self._recipes

    def extra_repr(self) -> str:
        shapes = [", ".join(recipe.inputs) for recipe in self.recipes]
        return f"planned for {'; '.join(shapes) or 'nothing'}"


def describe(inputs: Sequence[Any]) -> tuple[str, ...]:
    """`1x3x224x224 float32` for every tensor, with its layout where that is channels last.

    >>> describe((torch.zeros(2, 3), 7))
    ('2x3 float32', '7')
    """
    return tuple(_described(x) for x in inputs)


def _described(x: Any) -> str:
    if isinstance(x, (list, tuple)):
        return f"[{', '.join(describe(x))}]"
    if not isinstance(x, Tensor):
        return repr(x)
    last = format_of(x).is_last
    words = ["x".join(map(str, x.shape)), str(x.dtype).removeprefix("torch.")]
    return " ".join([*words, "channels_last"] if last else words)


def signature(inputs: Sequence[Any]) -> Hashable:
    """What a program is chosen by: shapes, types and devices of tensors, and all other values."""
    return tuple(
        (x.shape, x.dtype, x.device) if isinstance(x, Tensor) and _is_plain(x) else _hashable(x)
        for x in inputs
    )


def _is_plain(x: Tensor) -> bool:
    """Whether a kernel finds in the memory of `x` what `x` stands for."""
    # A fake or distributed tensor has its values elsewhere; a negated one has them the other way.
    ours = type(x).__torch_dispatch__ is Tensor.__torch_dispatch__
    return ours and x.layout is torch.strided and not x.is_neg()


def _hashable(value: Any) -> Hashable:
    plain = (int, float, bool, str, type(None))
    # Anything else is not known to stay what it is: an object equal to itself alone matches none.
    return (type(value), value) if isinstance(value, plain) else object()


def _is_observed() -> bool:
    """Whether torch records or transforms the call, or runs it in another precision."""
    return (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch._C._is_any_autocast_enabled()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
    )
