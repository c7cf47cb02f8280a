"""Results that lie in one memory in eager do so in a plan: a write into one shows in the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ..optimizing import force


class Returns(nn.Module):
    """Two convolutions, and what a function makes of the first one's result."""

    def __init__(self, makes: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.makes = makes

    def forward(self, x):
        y = self.first(x).relu()
        return self.makes(y), self.second(y)


MAKES: dict[str, Callable[[Tensor], Any]] = {
    "a part": lambda y: (y, y[:, :2]),
    "rows": lambda y: (y.flatten(2), y),
    "turned": lambda y: [y.permute(0, 2, 3, 1), y],
    "halves": lambda y: y.chunk(2, 1),
    "halves of what is not returned": lambda y: (*y.split(4, 1),),
    "detached": lambda y: {"here": y, "there": y.detach()},
    "contiguous": lambda y: (y, y.contiguous()),
    "views of a view": lambda y: (y[:, 1:], y[:, 1:].transpose(2, 3)),
    "the same": lambda y: (y, y),
    "apart": lambda y: (y, y.clone(), y * 1.0),
}


def together(result: Any) -> list[int]:
    memories = [t.untyped_storage().data_ptr() for t in torch.utils._pytree.tree_leaves(result)]
    return [memories.index(memory) for memory in memories]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("name", MAKES)
@torch.no_grad()
def test_views_of_one_value_share_its_memory(name: str, layout: torch.memory_format) -> None:
    model, x = Returns(MAKES[name]).eval(), torch.randn(2, 3, 12, 10).to(memory_format=layout)
    fast = force(model, x)
    assert fast.serves((x,))
    found, expected = fast(x), model(x)
    assert together(found) == together(expected)
    for one, other in zip(*map(torch.utils._pytree.tree_leaves, (found, expected)), strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
