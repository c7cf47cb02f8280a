"""Hooks on a model that is trained by somebody else's loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from .._audit.running import image_ranks
from .._audit.step import FirstStep, StepWatch
from ..errors import InputError
from ..formats import CHANNELS_LAST_OF, convert_, format_of, to_format
from ..formats.optimizers import restride_state_
from ..models.trees import has_strides
from ..operators.overrun import layers_that_overrun, overrun_told

Tell = Callable[[FirstStep], None]


def convert_unless_sharded_(model: nn.Module, *, sharded: bool) -> None:
    """Convert the weights; those that will be pieces of flat memory have no format to keep."""
    if not sharded:
        convert_(model)


def refuse_overruns(model: nn.Module) -> list[RemovableHandle]:
    """Hook layers whose weight gradient torch writes past its memory: on a CPU, none is trained."""
    return [
        layer.register_forward_pre_hook(partial(_refuse, path))
        for path, layer in layers_that_overrun(model)
    ]


def _refuse(path: str, layer: nn.Conv2d, args: tuple[Any, ...]) -> None:
    tensors = [one for one in (*args, layer.weight) if isinstance(one, Tensor)]
    plain = all(one.device.type == "cpu" and one.dtype is torch.float32 for one in tensors)
    graded = torch.is_grad_enabled() and layer.weight.requires_grad
    if plain and graded and not torch.is_autocast_enabled("cpu"):
        told = overrun_told(path, layer)
        raise InputError(f"{told} Train in mixed precision, or without ChannelsLast.")


def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Be a hook of the first step: a state that was loaded has the order in which it was saved."""
    restride_state_(optimizer)


@dataclass(frozen=True)
class LastImages:
    """Makes the images among values channels last; what is so already is not copied."""

    ranks: Collection[int]
    """The numbers of dimensions that the model's images have."""

    @classmethod
    def of(cls, model: nn.Module) -> LastImages:
        return cls(frozenset(image_ranks(model)))

    def __call__(self, value: Any) -> Any:
        return self._last(value) if self._is_image(value) else value

    def mark_(self, value: Any) -> Any:
        """Do so in place, for loops that give no chance to return another tensor."""
        if self._is_image(value):
            value.data = self._last(value.data)
        return value

    def before(self, model: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Be a forward pre-hook of the model."""
        return tree_map(self, (args, kwargs))  # type: ignore[no-any-return]

    def _is_image(self, value: object) -> bool:
        if not isinstance(value, Tensor) or value.ndim not in self.ranks:
            return False
        pixels = value.is_floating_point() or value.dtype is torch.uint8
        return pixels and has_strides(value)

    def _last(self, image: Tensor) -> Tensor:
        own = CHANNELS_LAST_OF[image.ndim]
        return image if format_of(image) is own else to_format(image, own)


class Hooked:
    """A model in channels last whose first step is watched from its own forward pass on."""

    def __init__(self, model: nn.Module, tell: Tell) -> None:
        self.model, self._tell = model, tell
        self._watch: StepWatch | None = None
        self._open = contextlib.ExitStack()
        self._made: list[Any] = []
        images = LastImages.of(model).before
        self._lasting = [
            model.register_forward_pre_hook(images, with_kwargs=True),
            *refuse_overruns(model),
        ]
        # Torch calls the second one even if the model raises: no mode outlives the call.
        self._hooks = [
            model.register_forward_pre_hook(self._before, with_kwargs=True),
            model.register_forward_hook(self._after, always_call=True),
        ]

    def follow(self, optimizers: Iterable[Optimizer]) -> None:
        """Tell of the first step once one of these has updated a weight of the model."""
        own = {id(parameter) for parameter in self.model.parameters()}
        for optimizer in optimizers:
            held = {id(p) for group in optimizer.param_groups for p in group["params"]}
            if held & own:
                self._hooks.append(optimizer.register_step_pre_hook(before_step))
                self._hooks.append(optimizer.register_step_post_hook(self._updated))

    def remove(self) -> None:
        """Take all hooks off the model and the optimizers."""
        for hook in self._lasting:
            hook.remove()
        self._unwatch()

    def _unwatch(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _before(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or self._watch is not None:
            return
        if model is self.model and model.training and torch.is_grad_enabled():
            self._watch = StepWatch(model)
            self._made = self._open.enter_context(self._watch.forward((args, kwargs)))

    def _after(self, model: nn.Module, args: Any, result: Any) -> None:
        if torch.compiler.is_compiling() or model is not self.model:
            return
        self._made.append(result)
        self._open.close()
        self._made = []  # The results of every later batch would be kept.
        if result is None:
            self._watch = None

    def _updated(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._unwatch()
        watch = self._watch or StepWatch(self.model)
        if self._watch is None:
            watch.unseen.append("the operators: the model ran compiled")
        self._tell(watch.result([optimizer]))
        self._watch = None
