"""Whether the code of a graph proves that a value has a batch dimension."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn

from ..graph.modules.layers import assert_holds
from ..graph.modules.leaves import definer
from ..graph.nodes.ranks import asks_rank


def takes_batches(value: fx.Node, conv: nn.Module, norm: nn.Module) -> bool:
    """Whether the code proves that `value`, between `conv` and `norm`, has a batch dimension.

    It does if `norm` is a BatchNorm2d, which raises without one, or if the code asserts the number
    of dimensions. BatchNorm1d proves nothing: it takes a single signal (C, L) for (N, C).
    """
    weight: Any = conv.weight
    checked = {4: nn.BatchNorm2d, 5: nn.BatchNorm3d}.get(weight.ndim)
    if definer(type(norm), "_check_input_dim") is checked:
        return True
    sizes = [user for user in value.users if asks_rank(user)]
    tests = [test for size in sizes for test in size.users if _is_test(test, size, weight.ndim)]
    stopping = (torch._assert, assert_holds)
    return any(user.target in stopping for test in tests for user in test.users)


def _is_test(node: fx.Node, size: fx.Node, rank: int) -> bool:
    return node.target is operator.eq and node.args in ((size, rank), (rank, size))
