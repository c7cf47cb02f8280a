"""The module that `optimize` returns: planned calls run programs, all others run the graph."""

from __future__ import annotations

import contextlib
import inspect
import operator
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

from ..errors import InputError, is_out_of_memory
from ..graph.modules.leaves import runs_hooks
from ..graph.nodes.flat import leaves_of
from ..kernels.programs.pool import Pool
from ..machine.forks import check_threads
from ..models.places import by_place
from ..plan import Unplannable, remake_plan
from ..plan.gpu.graphs import on_device
from ..shown import shown
from ..verify.decided import Picking
from .recipes import PlanRecipe as PlanRecipe
from .recipes import Served as Served
from .recipes import describe as describe
from .recipes import is_known as is_known
from .recipes import served as served
from .recipes import signature as signature
from .stamp import Stamp

_wants_gradients = operator.attrgetter("requires_grad")


class Optimized(nn.Module):
    """A model for inference: `portable`, a graph for any call, and programs for known shapes.

    >>> import nhwc
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).eval()
    >>> fast = nhwc.optimize(net, torch.rand(1, 3, 16, 16))
    >>> type(fast).__name__, fast.examples
    ('Optimized', (('1x3x16x16 float32',),))
    >>> fast(torch.rand(2, 3, 32, 32)).shape  # another shape: right, by the graph
    torch.Size([2, 8, 30, 30])

    A call whose inputs have planned shapes, types and device runs the program for them; where the
    model's code counts by whole numbers that it is given, these must be planned, too. Any other
    call runs `portable`; so does a call under autocast, one that wants gradients, and one that is
    being exported, compiled, scripted, traced, transformed (`torch.func`) or watched (a dispatch
    or function mode), or is given a tensor of a subclass. Parameters require no gradients until
    they are told to. There is no training mode: inside a model that is trained, this part stays as
    it is, like a frozen backbone, and says so once.

    It always computes with its present weights. Each planned call first asks a `Stamp` whether the
    model is still the one that was packed, a microsecond for each weight. Weights that were written
    to are packed anew. Other tensors in their place (`functional_call`) run the graph the first
    time, and are packed if the next call finds them, too. While a module is replaced or of another
    class, or has a new hook or a new `forward`, calls run the graph. A plan of a graph that was
    made for its shapes alone ends when its weights change. The first call without it says so.

    Two kinds of change go unnoticed: a write behind torch's back (`p.data[i] = ...`, numpy's views,
    another process) that spares the 64 bytes in the middle of a weight of more than 512, or that
    changes a weight on a GPU, where looking would wait for it; and a new value of a module's other
    attributes (`conv.stride = ...`), or of a class's (`nn.Conv2d.forward = ...`). Call `refresh()`
    after either.

    Programs read packed weights; only other calls read the original ones. So large ones wait in a
    file (`host_memory.shelve`) and take no memory until such a call. Copies of the model hold them
    in memory.

    Programs for several shapes share their packed weights where these are the same numbers, and
    the memory of a call: `pool` is that of `plans`.

    `examples` are the shapes it was made for, in words; `report` says how it came about.
    """

    portable: nn.Module
    _resting = False
    _programs: dict[Hashable, Callable[..., Any]]
    _stamp: Stamp
    _foreign: list[weakref.ref[Tensor]]
    _pool: Pool

    def __init__(
        self,
        graph: nn.Module,
        plans: Sequence[Served] = (),
        *,
        report: Any = None,
        exact: bool = False,
        pool: Pool | None = None,
    ) -> None:
        super().__init__()
        self.portable = graph.requires_grad_(False)
        self.examples: tuple[tuple[str, ...], ...] = ()
        self.report = report
        self.exact = exact
        self.training = graph.training
        self._recipes = {one.recipe.signature: one.recipe for one in plans}
        self._programs = {one.recipe.signature: one.program for one in plans}
        # What a call's shapes alone do not tell: by which inputs a plan for them counts.
        self._counts: dict[Hashable, set[tuple[int, ...]]] = {}
        for recipe in self._recipes.values():
            if recipe.counts:
                self._counts.setdefault(recipe.shapes, set()).add(recipe.counts)
        self._lost: dict[Hashable, str] = {}
        self._told = False
        self._kept_in_eval = False
        self._lock = threading.Lock()
        self._share(pool or Pool())
        self.restamp()

    def _share(self, pool: Pool) -> None:
        """Take memory from `pool`, with the planned parts inside: one part runs after the other."""
        graphs = [recipe.graph for recipe in self._recipes.values() if recipe.graph]
        for module in (part for graph in (self, *graphs) for part in graph.modules()):
            if isinstance(module, Optimized):
                module._pool = pool

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if isinstance(inputs, fx.Proxy):
            return self.portable(*_unpacked(inputs, self.portable))
        if self._resting or is_observed():
            return self.portable(*inputs, **named)
        given = inputs if not named else by_place(self.portable, inputs, named)
        if given is None:
            return self.portable(*inputs, **named)
        check_threads()
        # The stamp is read first: another thread may put in a new one, with new programs.
        stamp = self._stamp
        program = self._programs.get(self._key(given))
        if program is None or not stamp.holds():
            program = self._remade(given)
        elif self._foreign:
            self._foreign = []
        if program is None:
            return self.portable(*inputs, **named)
        if not torch.is_grad_enabled():
            return program(*given)
        if self._wants_gradients(given):
            return self.portable(*inputs, **named)
        with torch.no_grad():
            return program(*given)

    def _key(self, inputs: Sequence[Any]) -> Hashable:
        """The key of the program for `inputs`, if there is one."""
        key = signature(inputs)
        for counts in self._counts.get(key, ()) if self._counts else ():
            counted = signature(inputs, counts)
            if counted in self._recipes or counted in self._lost:
                return counted
        return key

    @property
    def takes(self) -> inspect.Signature:
        """The arguments of a call: those of the model."""
        return inspect.signature(self.portable.forward)

    def _wants_gradients(self, inputs: Sequence[Any]) -> bool:
        wanted = any(isinstance(x, Tensor) and x.requires_grad for x in leaves_of(inputs))
        wanted = wanted or any(map(_wants_gradients, self._stamp.tensors))
        if wanted and not self._told:
            self._told = True
            warnings.warn(
                "gradients are wanted: planned kernels have none, so this call runs the graph, "
                "which is slower. Call it under torch.no_grad() or inference_mode().",
                stacklevel=5,
            )
        return wanted

    @contextlib.contextmanager
    def unplanned(self) -> Iterator[None]:
        """Within this context every call runs `portable`, whose operators can be watched."""
        held, self._resting = self._resting, True
        try:
            yield
        finally:
            self._resting = held

    @property
    def counts(self) -> bool:
        """Whether some plan is for the numbers of inputs, too."""
        return bool(self._counts)

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """Within this context calls run the plans for any numbers, where there are such."""
        held, self._counts = self._counts, {}
        try:
            yield
        finally:
            self._counts = held

    def _remade(self, inputs: Sequence[Any]) -> Callable[..., Any] | None:
        """The program of a recipe that had none, or an outdated one; None if there is no plan.

        A call that has lost its plan says so, once.
        """
        key = self._key(inputs)
        if key not in self._recipes and key not in self._lost:
            return None
        if not isinstance(self.portable, fx.GraphModule):
            return None
        with self._lock:
            if not self._stamp.holds() and not self._accepts():
                return None
            recipe = self._recipes.get(key)
            if recipe is not None and key not in self._programs:
                try:
                    with torch.inference_mode(False):
                        graph = recipe.graph or self.portable
                        program = remake_plan(graph, inputs, recipe.kernels, self._pool)
                        self._programs[key] = on_device(program, inputs)
                except Unplannable as error:
                    self._lose(key, str(error))
                except (RuntimeError, TypeError, ValueError, MemoryError) as error:
                    # Weights of another type or device, say: the graph answers rightly. Memory
                    # may be there again at the next call.
                    if not is_out_of_memory(error):
                        del self._recipes[key]
            lost = self._lost.pop(key, "")
            if lost:
                warnings.warn(lost, stacklevel=5)
            return self._programs.get(key)

    def _lose(self, key: Hashable, reason: str) -> None:
        """Forget a recipe, which the next call that would have had it says."""
        recipe = self._recipes.pop(key)
        self._lost[key] = (
            f"the plan for {', '.join(recipe.inputs)} is dropped, and the graph runs: {reason}. "
            "Optimize the model again."
        )

    def _accepts(self) -> bool:
        """Whether only weights changed, and to stay; then drop what was made from the old ones."""
        if not self._stamp.has_parts():
            return False
        if not self._stamp.has_tensors():
            # `functional_call` swaps tensors for one call: packing them would cost more than it.
            # Only others have weak references: `swap_tensors` takes no weight that has one.
            own = set(map(id, self._stamp.tensors))
            now = [one for one in self._stamp.in_slots() if id(one) not in own]
            known = [one() for one in self._foreign]
            if len(known) != len(now) or not all(map(operator.is_, known, now)):
                self._foreign = list(map(weakref.ref, now))
                return False
        self._forget()
        return True

    def _forget(self) -> None:
        """Drop all that was made from the old weights; a call without the lock puts it back."""
        self._programs = {}
        for key in [key for key, one in self._recipes.items() if one.graph is not None]:
            self._lose(key, "it was made of the weights as they were, which changed")
        self.restamp()

    def restamp(self) -> None:
        """Declare the model, as it is now, to be the one that the programs were made from."""
        self._foreign = []
        self._stamp = Stamp(self.portable, self._modules)

    def refresh(self) -> None:
        """Pack all weights anew at the next call, after a change that could not be noticed."""
        for module in self.modules():
            if isinstance(module, Optimized):
                with module._lock:
                    module._forget()

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)
        self._renew()
        return result

    def _renew(self) -> None:
        """Drop what was made from the old weights, if only weights have changed."""
        with self._lock:
            if not self._stamp.holds() and self._stamp.has_parts():
                self._forget()

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load as torch does, but raise an InputError for weights that do not fit."""
        try:
            result = super().load_state_dict(state_dict, strict, assign)
        except RuntimeError as error:
            problem = shown(str(error).partition(": ")[2])
            raise InputError(
                "the state dict is not one of this optimized model, whose layers are folded: "
                f"{problem} Load the weights of the original into the original, and optimize it "
                "again."
            ) from None
        self._renew()
        return result

    def train(self, mode: bool = True) -> Optimized:
        """Refuse training mode: folded layers cannot be trained as the original's.

        A model around this one may be trained, its head for instance: `train()` of that leaves
        this part in eval mode and warns.
        """
        refused = (
            "an optimized model is for inference and has no training mode. Train the original "
            "and optimize it again."
        )
        if mode and sys._getframe(1).f_code is not nn.Module.train.__code__:
            raise InputError(refused)
        if mode and not self._kept_in_eval:
            self._kept_in_eval = True
            warnings.warn(f"a part stays in eval mode: {refused}", stacklevel=3)
        return super().train(False)

    def __prepare_scriptable__(self) -> nn.Module:
        """Give torch.jit.script the graph to compile."""
        if runs_hooks(self):
            raise InputError(
                "TorchScript of an optimized model is that of its graph, which has no hooks and no "
                "forward that were set on the model. Take them off first."
            )
        return self.portable

    def __getstate__(self) -> dict[str, Any]:
        """Programs hold packed weights and functions: a copy makes its own when it is called."""
        self._renew()
        state: dict[str, Any] = super().__getstate__()
        state["_recipes"] = {r.signature: r for r in self.recipes}
        state["_lost"] = dict(self._lost)
        for name in ("_programs", "_lock", "_pool", "_foreign", "_stamp"):
            del state[name]
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({"_lost": {}, "_counts": {}, **state})
        self._programs = {}
        self._lock = threading.Lock()
        self._share(Pool())
        self.restamp()

    @property
    def recipes(self) -> tuple[PlanRecipe, ...]:
        """The recipes that are valid now; a program is made from each when it is first called."""
        recipes = self._recipes.values()
        return tuple(r for r in recipes if r.graph is None or self._stamp.holds())

    def serves(self, inputs: Sequence[Any]) -> bool:
        """Whether there is a plan for these shapes."""
        return self._key(inputs) in self._recipes

    def extra_repr(self) -> str:
        shapes = [", ".join(recipe.inputs) for recipe in self.recipes]
        return f"planned for {'; '.join(shapes) or 'nothing'}"


def _unpacked(inputs: Any, graph: nn.Module) -> list[Any]:
    """The arguments in `*inputs`, which torch.fx traces as one: as many as `graph` requires."""
    if isinstance(graph, fx.GraphModule):
        places = graph.graph.find_nodes(op="placeholder")
        return [inputs[i] for i, place in enumerate(places) if not place.args]
    needed = inspect.signature(graph.forward).parameters.values()
    return [inputs[i] for i, one in enumerate(needed) if one.default is one.empty]


def is_observed() -> bool:
    """Whether torch records or transforms the call, or runs it in another precision."""
    return (
        torch.compiler.is_compiling()
        or torch._C._is_tracing()
        or torch._C._is_any_autocast_enabled()
        or (torch._C._len_torch_dispatch_stack() > 0 and _is_dispatch_watched())
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or (torch._C._len_torch_function_stack() > 0 and _is_function_watched())
    )


def _is_dispatch_watched() -> bool:
    """Whether a dispatch mode sees the calls; one that minds picks alone misses none of these."""
    modes = map(torch._C._get_dispatch_stack_at, range(torch._C._len_torch_dispatch_stack()))
    return not all(isinstance(mode, Picking) for mode in modes)


def _is_function_watched() -> bool:
    """Whether a function mode sees the calls; that of a default device minds new tensors alone."""
    modes = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
    return any(type(mode) is not DeviceContext for mode in modes)
