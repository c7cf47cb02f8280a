"""Random networks of what this package is about, from a seed: as odd as PyTorch allows.

A network is a list of steps. Each takes values that were there before and adds its own; what nobody
took is returned. The generator runs each step on real tensors while it builds, so it knows every
shape and never makes a network that eager PyTorch refuses.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from torch import Tensor

from ..judging import Case
from . import blocks, layers, structures
from .builder import Builder
from .network import Network
from .network import smaller as smaller

VERBS = ("audit", "fuse", "optimize", "plan", "load")

_GROUP = 50


_OFTEN = (
    (blocks.block, 4),
    (layers.convolution, 3),
    (layers.transposed, 1),
    (layers.batch_norm, 2),
    (layers.norm, 1),
    (layers.activation, 2),
    (layers.function, 2),
    (layers.view, 2),
    (layers.pool, 1),
    (layers.resize, 1),
    (layers.shuffle, 1),
    (layers.pad, 1),
    (layers.two, 3),
    (layers.write, 1),
    (layers.rows, 1),
    (layers.attention, 1),
    (layers.scale, 1),
    (blocks.squeeze, 1),
    (blocks.again, 1),
    (blocks.padded, 2),
    (blocks.functional, 1),
    (blocks.residual, 2),
    (blocks.branches, 2),
    (blocks.tokens, 2),
    (blocks.sampled, 1),
)
"""Who makes steps, and how many times as often as others."""

_WITH_STRUCTURES = (*_OFTEN, (structures.structure, 20))

_PLAIN = 10_000
"""The networks of the seeds before this one have no structures: their rows stay theirs."""


def groups() -> list[str]:
    return [f"{first}" for first in range(0, 2 * _PLAIN, _GROUP)]


def cases(group: str) -> Iterator[Case]:
    for seed in range(int(group), int(group) + _GROUP):
        model, inputs = network(seed)
        yield Case(f"network {seed}", model, inputs, strides=False, wide=True)


def network(seed: int) -> tuple[Network, tuple[Tensor, ...]]:
    """The network of this seed, in eval mode, and its two inputs."""
    often = _OFTEN if seed < _PLAIN else _WITH_STRUCTURES
    makers = [maker for maker, times in often for _ in range(times)]
    builder = Builder(random.Random(seed))
    for _ in range(builder.draw.choice((3, 5, 8, 13, 20))):
        builder.grow(makers)
    return builder.finished()
