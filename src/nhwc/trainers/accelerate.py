"""Channels last with accelerate: `ChannelsLast(accelerator).prepare(model, optimizer, ...)`."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer

from .._audit.step import FirstStep
from ..render.step_text import step_text
from .hooked import Hooked, convert_unless_sharded_

_SHARDED = ("FSDP", "DEEPSPEED", "MEGATRON_LM")


class ChannelsLast:
    """Prepares as the accelerator does, in channels last, and tells of each model's first step.

    >>> import torch
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    >>> channels_last = ChannelsLast(Accelerator(cpu=True))
    >>> net, optimizer = channels_last.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    >>> net[0].weight.is_contiguous(memory_format=torch.channels_last)
    True

    Afterwards `first_steps` holds an audit for each model that was trained.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.first_steps: list[FirstStep] = []

    def prepare(self, *objects: Any, **options: Any) -> Any:
        """Take what `Accelerator.prepare` takes, and return what that returns."""
        sharded = self.accelerator.distributed_type in _SHARDED
        # The optimizers themselves: accelerate wraps them in others, and FSDP swaps their weights.
        optimizers = [one for one in objects if isinstance(one, Optimizer)]
        hooked = []
        for model in (one for one in objects if isinstance(one, nn.Module)):
            # Before it is wrapped: DistributedDataParallel keeps the strides it meets.
            convert_unless_sharded_(model, sharded=sharded)
            hooked.append(Hooked(model, self._tell))
        prepared = self.accelerator.prepare(*objects, **options)
        for one in hooked:
            one.follow(optimizers)
        return prepared

    def _tell(self, step: FirstStep) -> None:
        self.first_steps.append(step)
        self.accelerator.print(step_text(step))
