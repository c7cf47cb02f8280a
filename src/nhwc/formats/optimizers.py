"""Keep what an optimizer remembers of a weight in the weight's own order.

Fused kernels walk weight and momentum side by side in memory and never look at strides: beside a
weight in another order they would update the wrong elements, and nothing would say so.
"""

from __future__ import annotations

import gc
from collections.abc import Collection

import torch
from torch import Tensor
from torch.optim import Optimizer


def restride_state_(optimizer: Optimizer) -> None:
    """Give each tensor that `optimizer` keeps for a parameter the strides of that parameter.

    >>> weight = torch.nn.Parameter(torch.zeros(2, 3, 4, 4))
    >>> optimizer = torch.optim.SGD([weight], lr=0.1)
    >>> optimizer.state[weight]["momentum_buffer"] = torch.zeros(2, 3, 4, 4)
    >>> weight.data = weight.data.to(memory_format=torch.channels_last)
    >>> restride_state_(optimizer)
    >>> optimizer.state[weight]["momentum_buffer"].stride()
    (48, 1, 12, 3)
    """
    for parameter, values in getattr(optimizer, "state", {}).items():
        if not isinstance(parameter, Tensor) or not isinstance(values, dict):
            continue
        shape, strides = parameter.shape, parameter.stride()
        for name, value in values.items():
            if type(value) is Tensor and value.shape == shape and value.stride() != strides:
                like = torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)
                values[name] = like.copy_(value)


def optimizers_of(weights: Collection[Tensor]) -> list[Optimizer]:
    """All optimizers of this process that update one of `weights`.

    A weight does not know its optimizer, and torch keeps no list of them: Python's memory has one.
    """
    own = {id(weight) for weight in weights}
    living = [one for one in gc.get_objects() if issubclass(type(one), Optimizer)]
    return [
        one
        for one in living
        if any(id(p) in own for group in getattr(one, "param_groups", ()) for p in group["params"])
    ]
