"""The module that `optimize` returns: planned calls take the fast way, all others the graph."""

from __future__ import annotations

import contextlib
import inspect
import operator
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd import forward_ad

from ..errors import InputError
from ..formats import format_of
from ..machine.forks import check_threads
from ..plan import Identifier, Plan, UnknownKernel, Unplannable, remake_plan
from ..plan.cuda import on_device
from .stamp import Stamp

_wants_gradients = operator.attrgetter("requires_grad")


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


@dataclass(frozen=True)
class Served:
    """A set of input shapes that has a plan: how to make it again, its program, what it packed."""

    recipe: Recipe
    program: Callable[..., Any]
    weights: tuple[Tensor, ...]


def served(plan: Plan, graph: fx.GraphModule, inputs: Sequence[Any]) -> Served:
    """The shapes of `inputs`, served by the `plan` that was made of `graph` for them."""
    recipe = Recipe(signature(inputs), describe(inputs), plan.kernels)
    return Served(recipe, on_device(plan.program, inputs), tuple(plan.weights(graph)))


class Optimized(nn.Module):
    """A model for inference: `portable`, a graph for any call, and programs for known shapes.

    A call whose inputs have planned shapes, types and device runs its program. Any other call, and
    one under autocast, one that wants gradients, one that is being exported, compiled, scripted,
    traced, transformed (`torch.func`) or watched (a dispatch mode), runs `portable`. Parameters ask
    for no gradients until they are told to. It is for inference: it has no training mode.

    It answers with the weights it has now. Each planned call first asks a `Stamp` whether the model
    is still the one that was packed, at a cost of microseconds. Weights that were written to, in
    whatever way, are packed anew; other tensors in their place (`functional_call`) run the graph,
    and are packed if they are there the next time, too. While a module is another one, or has a
    hook or a `forward` that it had not, calls run the graph. A plan of a graph that was made for
    its shapes alone is over with the weights that it was made from.

    What cannot be seen: writes behind torch's back (`p.data[i] = ...`, numpy's views, another
    process) that spare the 64 bytes in the middle of a weight of more than 512, and attributes of
    modules that are no weights (`conv.stride = ...`). After such a change call `refresh()`.

    What programs have packed, only other calls read as it was: large weights wait for those in a
    file (`release.shelve`) and take no memory until then. Copies of the model hold them in memory.

    `examples` are the shapes it was made for, in words; `report` says how it came about.
    """

    portable: nn.Module
    _programs: dict[Hashable, Callable[..., Any]]
    _stamp: Stamp
    _foreign: list[weakref.ref[Tensor]]

    def __init__(
        self,
        graph: nn.Module,
        plans: Sequence[Served] = (),
        *,
        report: Any = None,
        exact: bool = False,
    ) -> None:
        super().__init__()
        self.portable = graph.requires_grad_(False)
        self.examples: tuple[tuple[str, ...], ...] = ()
        self.report = report
        self.exact = exact
        self.training = graph.training
        self._recipes = {one.recipe.signature: one.recipe for one in plans}
        self._programs = {one.recipe.signature: one.program for one in plans}
        self._told = False
        self._lock = threading.Lock()
        self.restamp()

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if isinstance(inputs, fx.Proxy):
            return self.portable(*_unpacked(inputs, self.portable))
        if named or _is_observed():
            return self.portable(*inputs, **named)
        check_threads()
        # The stamp first: another thread may put in a new one, with programs of its own.
        stamp = self._stamp
        program = self._programs.get(signature(inputs))
        if program is None or not stamp.holds():
            program = self._remade(inputs)
        elif self._foreign:
            self._foreign = []
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
        wanted = wanted or any(map(_wants_gradients, self._stamp.tensors))
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
            if not self._stamp.holds() and not self._accepts():
                return None
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

    def _accepts(self) -> bool:
        """Whether what changed is the weights alone, to stay; then what they were is forgotten."""
        if not self._stamp.has_parts():
            return False
        if not self._stamp.has_tensors():
            # `functional_call` puts others in their place for one call: packing would cost more.
            now = self._stamp.in_slots()
            known = [one() for one in self._foreign]
            if len(known) != len(now) or not all(map(operator.is_, known, now)):
                self._foreign = list(map(weakref.ref, now))
                return False
        self._forget()
        return True

    def _forget(self) -> None:
        """Let go of all that was made from weights of the past."""
        self._programs = {}
        self._recipes = {key: one for key, one in self._recipes.items() if one.graph is None}
        self.restamp()

    def restamp(self) -> None:
        """Take the model as it is for the one that the programs were made from."""
        self._foreign = []
        self._stamp = Stamp(self.portable, self._modules)

    def refresh(self) -> None:
        """Pack all weights anew at the next call, after a change that could not be noticed."""
        for module in self.modules():
            if isinstance(module, Optimized):
                module._forget()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)
        self._renew()
        return result

    def _renew(self) -> None:
        """Forget the past if there is another present."""
        if not self._stamp.holds() and self._stamp.has_parts():
            self._forget()

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As torch's; weights that do not fit raise an InputError."""
        try:
            result = super().load_state_dict(state_dict, strict, assign)
        except RuntimeError as error:
            problem = " ".join(str(error).split()).partition(": ")[2][:200]
            raise InputError(
                "the state dict is not one of this optimized model, whose layers are folded: "
                f"{problem} Load the weights of the original into the original, and optimize it "
                "again."
            ) from None
        self._renew()
        return result

    def train(self, mode: bool = True) -> Optimized:
        """Refused: folded layers cannot be trained as the model was. `eval()` is no change."""
        if mode:
            raise InputError(
                "an optimized model is for inference and has no training mode. Train the original "
                "and optimize it again."
            )
        return super().train(False)

    def __prepare_scriptable__(self) -> nn.Module:
        """What torch.jit.script makes a script of: the graph."""
        return self.portable

    def __getstate__(self) -> dict[str, Any]:
        """Programs hold packed weights and functions: a copy makes its own when it is called."""
        state = dict(self.__dict__, _recipes={r.signature: r for r in self.recipes})
        for name in ("_programs", "_lock", "_foreign", "_stamp"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._programs = {}
        self._lock = threading.Lock()
        self.restamp()

    @property
    def recipes(self) -> tuple[Recipe, ...]:
        """What is planned; a program is made from each when it is first called."""
        recipes = self._recipes.values()
        return tuple(r for r in recipes if r.graph is None or self._stamp.holds())

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


def _unpacked(inputs: Any, graph: nn.Module) -> list[Any]:
    """The arguments in `*inputs`, which torch.fx traces as one: as many as `graph` must have."""
    if isinstance(graph, fx.GraphModule):
        places = graph.graph.find_nodes(op="placeholder")
        return [inputs[i] for i, place in enumerate(places) if not place.args]
    needed = inspect.signature(graph.forward).parameters.values()
    return [inputs[i] for i, one in enumerate(needed) if one.default is one.empty]


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
