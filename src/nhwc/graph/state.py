"""What tracing a module must leave as it was."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..ready import versions_of
from .traced import CONSTANT


class State:
    """What a forward pass may change besides its result, so that no graph loses it silently."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.attributes = {
            key: list(value) if isinstance(value, list | set) else value
            for key, value in vars(module).items()
        }
        self.slots = {**module._parameters, **module._buffers}
        self.versions = versions_of(_tensors(module))
        self.data = [(b, b._version, b.clone()) for b in module.buffers() if not b.is_inference()]
        self.random = torch.get_rng_state(), random.getstate()

    def check(self) -> None:
        for key, value in vars(self.module).items():
            if key.startswith(CONSTANT):  # set by the tracer itself
                continue
            old = self.attributes.get(key, self)
            same = list(value) == old if isinstance(value, list | set) else value is old
            if not same:
                raise fx.proxy.TraceError(f"its forward changes self.{key}")
        slots = {**self.module._parameters, **self.module._buffers}
        if any(value is not self.slots.get(key, self) for key, value in slots.items()):
            raise fx.proxy.TraceError("its forward replaces a parameter or buffer")
        if self.versions != versions_of(_tensors(self.module)):
            raise fx.proxy.TraceError("its forward writes into a parameter or buffer")
        state, plain = torch.get_rng_state(), random.getstate()
        if plain != self.random[1] or not torch.equal(state, self.random[0]):
            raise fx.proxy.TraceError("its forward draws random numbers that a graph would freeze")

    def restore(self) -> None:
        for key in set(vars(self.module)) - set(self.attributes):
            del vars(self.module)[key]
        for key, old in self.attributes.items():
            now = vars(self.module).get(key)
            if isinstance(now, list):
                now[:] = old
            elif isinstance(now, set):
                now.clear()
                now.update(old)
            else:
                vars(self.module)[key] = old
        # A buffer that was assigned to holds a traced value now.
        for slots in (self.module._parameters, self.module._buffers):
            held: dict[str, Any] = slots  # type: ignore[assignment]
            for key in held:
                held[key] = self.slots.get(key)
        for buffer, version, before in self.data:
            if buffer._version != version:
                buffer.copy_(before)


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]
