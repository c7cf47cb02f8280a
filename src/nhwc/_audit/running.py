"""One run of a model for an audit: checked first, on copies of its inputs, as it was written."""

from __future__ import annotations

import contextlib
import sys
import traceback
import types
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import InputError, ModelFailed, NhwcError, advice_on, is_out_of_memory
from ..formats import CHANNELS_LAST_OF, Format, restride_weights_, to_format
from ..formats.weights import convolution_weights, packed_convolutions
from ..graph.code.reached import values_named_by
from ..models.kinds import check_devices, check_initialized
from ..models.preserve import own
from ..models.trees import every_tensor_of, has_strides, remade, some
from ..optimized import Optimized
from ..shown import shown
from ..watch.recorder import Recorder, is_users
from ..watch.uncompiled import uncompiled
from .deadly import NoDeath


class Run:
    """One run of the model on fresh copies of its inputs: in-place operators may write to them.

    Its images are given in `format`; without one, they are given as they are.
    """

    def __init__(
        self, model: nn.Module, inputs: Any, kwargs: Any, *, format: Format | None, backward: bool
    ) -> None:
        self.model = model
        self.arguments = (inputs, kwargs)
        self.format = format
        self.ranks = () if format is None else image_ranks(model)
        self.backward = backward

    def go(
        self,
        recorder: contextlib.AbstractContextManager | None = None,
        see: Callable[[object], None] = lambda result: None,
    ) -> None:
        """Run once; `see` gets the result before a backward pass can write into it."""
        args, kwargs = remade(self.arguments, self._fresh)
        with torch.set_grad_enabled(self.backward), recorder or contextlib.nullcontext():
            result = self.model(*args, **kwargs)
            see(result)
            if self.backward:
                _backward(result)

    def _fresh(self, leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        if self.format and leaf.ndim in self.ranks and has_strides(leaf):
            wanted = CHANNELS_LAST_OF[leaf.ndim] if self.format.is_last else self.format
            marked = to_format(leaf.detach(), wanted)
            fresh = marked.clone() if marked.data_ptr() == leaf.data_ptr() else marked
        else:
            fresh = own(leaf)
        return fresh.requires_grad_(leaf.requires_grad)


@contextlib.contextmanager
def weights_in(model: nn.Module, format: Format) -> Iterator[None]:
    """`model` with its weights in `format`, the constants of frozen TorchScript among them."""
    kept = [(weight.tensor, weight.tensor.data) for weight in convolution_weights(model)]
    restride_weights_(model, format)
    try:
        yield
    finally:
        for tensor, data in kept:
            tensor.data = data


def image_ranks(model: nn.Module) -> Collection[int]:
    """The numbers of dimensions that an image of this model has, by its convolutions' weights.

    A clip for 2-D convolutions has five dimensions, too, but is no volume.
    """
    convolved = {weight.tensor.ndim for weight in convolution_weights(model)}
    return convolved.intersection(CHANNELS_LAST_OF) or CHANNELS_LAST_OF


def _backward(result: object) -> None:
    leaves = [t for t in every_tensor_of(result) if t.requires_grad]
    if not leaves:
        raise InputError(
            "no output of the model requires a gradient, so backward=True has nothing to run. "
            "Unfreeze a parameter, or audit without backward."
        )
    with torch._C.DisableTorchFunction(), _disable_current_modes():  # These calls are ours.
        ones = [torch.ones_like(t) for t in leaves]
    torch.autograd.backward(leaves, ones)


def check(model: nn.Module, inputs: Any, kwargs: Any) -> None:
    check_initialized(model)
    tensors = every_tensor_of((inputs, kwargs))
    if not (inputs or kwargs):
        raise InputError("no input given. Call audit(model, torch.rand(1, 3, 224, 224)).")
    check_devices(model, tensors)
    # A model of anything else may be run on none of it, and has nothing to judge.
    for tensor in (t for t in tensors if t.ndim in CHANNELS_LAST_OF and has_strides(t)):
        if tensor.numel() == 0:
            raise InputError(f"input {tuple(tensor.shape)} is empty. Give at least one image.")
        if tensor.is_floating_point() and bool(tensor.isnan().any()):
            raise InputError(f"input {tuple(tensor.shape)} contains NaN. Give finite numbers.")
    if torch._C._autograd._profiler_enabled():
        raise InputError(
            "a profiler of torch runs around this call, and audit starts one of its own, which "
            "would end it. Call audit outside of the profiler."
        )


@contextlib.contextmanager
def as_written(model: nn.Module) -> Iterator[list[str]]:
    """Run compiled and planned parts as their original code; yield the parts that stay unseen."""
    unseen = []
    modules = dict(model.named_modules())
    planned = {n: m for n, m in modules.items() if isinstance(m, Optimized)}
    compiled: list[str] = []
    # Whoever compiled anything has loaded it.
    if "torch._dynamo" in sys.modules:
        compiled += (name for n, m in modules.items() for name in _compiled(n, m))
        compiled += _compiled_elsewhere(model)
    scripted = [n for n, m in modules.items() if isinstance(m, torch.jit.ScriptModule)]
    packed = packed_convolutions(model)
    if compiled:
        unseen.append(
            f"{some(compiled)} compiled by torch.compile ran as plain Python here; "
            "what the compiler makes of it is not visible"
        )
    if scripted:
        unseen.append(
            f"{some(scripted)} in TorchScript: operators are seen one by one, without source "
            "lines, and a copy inside one of them counts as converted on request"
        )
    if packed:
        unseen.append(
            f"{some(packed)}: weights packed for one kernel, which lays out images as it likes"
        )
    if planned:
        unseen.append(
            f"the plan of {some(list(planned))}, which ran as the graph below it: which kernel "
            "and which layout each layer has got is in its report"
        )
    with contextlib.ExitStack() as stack:
        for module in planned.values():
            stack.enter_context(module.unplanned())
        stack.enter_context(uncompiled())
        yield unseen


def _compiled(path: str, module: nn.Module) -> list[str]:
    """A module that torch.compile made, or the functions of it that it or its class holds."""
    if type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None:
        return [path]
    held: dict[str, Any] = {}
    for kind in reversed(type(module).__mro__):
        held |= vars(kind)
    functions = [n for n, f in (held | vars(module)).items() if _COMPILED in _attributes(f)]
    return [f"{path}.{name}" if path else name for name in functions]


def _compiled_elsewhere(model: nn.Module) -> list[str]:
    """The compiled functions that code of the model calls and no module holds."""
    kinds = {type(module): module for module in model.modules()}.values()
    named = (value for module in kinds for value in values_named_by(module))
    found = {id(value): value for value in named if _COMPILED in _attributes(value)}
    return [value.__name__ for value in found.values()]


_COMPILED = "_torchdynamo_orig_callable"
"""What a function that torch.compile made keeps the original under."""


def _attributes(value: Any) -> dict[str, Any]:
    return vars(value) if isinstance(value, types.FunctionType) else {}


def guarded(run: Run, tensors: Sequence[Tensor]) -> None:
    """Run the model; turn its exception into an error that says what is wrong with the input."""
    death = NoDeath()
    try:
        run.go(death)
    except NhwcError:
        raise
    except Exception as error:
        if death.found is not None:
            raise death.found from None
        if is_out_of_memory(error):
            raise
        text = shown(error).rstrip(".")
        usual = "Check the input's shape and type, and that the model runs by itself."
        advice = advice_on(error, usual)
        if "view size is not compatible" in text:
            advice = "Channels-last memory has no such view: write .reshape or .flatten there."
        elif "grad_input must be contiguous" in text:
            advice = (
                "torch has no backward pass for nll_loss of a channels-last image. Give it "
                "x.contiguous(), or take F.cross_entropy, which has one."
            )
        elif tensors and not any(tensor.ndim in CHANNELS_LAST_OF for tensor in tensors):
            advice = (
                f"The input has {tensors[0].ndim} dimensions; a vision model needs 4 (N, C, H, W) "
                "or 5 (N, C, D, H, W). Try torch.rand(1, 3, 224, 224)."
            )
        raise ModelFailed(
            f"{type(run.model).__name__} raised {type(error).__name__} on this input"
            f"{_where(error)}: {text}. {advice}{_operator(run)}"
        ) from error


def _operator(run: Run) -> str:
    """The operator that raises, with its inputs, which a second run tells; "" where none does."""
    recorder = Recorder(run.model)
    try:
        run.go(recorder)
    except Exception as error:
        return f" {recorder.told_of(error)}".rstrip()
    return ""


def _where(error: Exception) -> str:
    """The innermost line of the traceback that is neither torch's nor ours."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if is_users(f.filename)]
    return f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
