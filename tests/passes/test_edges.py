"""Models at the edge of what a rewrite may take: each computes what its own code says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nhwc
from nhwc.passes import PASSES

X = torch.randn(2, 8, 6, 5, generator=torch.Generator().manual_seed(1))


class Edge(nn.Module):
    def __init__(self, function: Callable[[Any, Tensor], Any], **held: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in held.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


def conv() -> nn.Conv2d:
    return nn.Conv2d(8, 8, 3, padding=1)


def picked_by_tensor(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    y[self.places + 1].mul_(5)
    return y * 1


def picked_by_list(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    y[:, [1, 3]].mul_(5)
    return y


def picked_by_order(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    y[:, x.sum((0, 2, 3)).argsort()].zero_()
    return y * 1


def sliced(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    y[:, 1:3].mul_(5)
    y[0].zero_()
    return y * 1


def normed(self: Any, x: Tensor) -> Tensor:
    x = x.permute(0, 2, 3, 1)
    return F.layer_norm(x, (x.size(-1),), self.w, self.b).permute(0, 3, 1, 2)


def written_before_the_sum(self: Any, x: Tensor) -> Any:
    first = self.a(x)
    tokens = first.flatten(2)
    second = self.b(first)
    first.relu_()
    return second + x, tokens.mean(2)


def assigned_a_batch_of_one(self: Any, x: Tensor) -> Tensor:
    y = self.a(x)
    y[:, :2] = self.c(x)[None]
    return self.b(y)


def by_keyword(self: Any, x: Tensor) -> Tensor:
    return self.act(input=self.a(x)).softmax(dim=1)


def turned_in_place(self: Any, x: Tensor) -> Tensor:
    return self.a(x.transpose_(2, 3))


def resized_by_one_side(self: Any, x: Tensor) -> Tensor:
    pixel = self.a(F.adaptive_avg_pool2d(x, 1))
    return torch.cat(
        [
            F.interpolate(pixel, size=x.shape[2], mode="bilinear"),
            self.b(pixel)[..., :1, :1].expand(-1, -1, 6, 6),
        ],
        1,
    )


def response(self: Any, x: Tensor) -> Tensor:
    n = x.norm(p=2, dim=(-2, -1), keepdim=True)
    n = n / (n.mean(dim=-3, keepdim=True) + 1e-6)
    return x + torch.addcmul(self.b, self.w, x * n)


def row(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


EDGES: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "picked by a tensor": lambda: (
        Edge(picked_by_tensor, a=conv(), places=torch.tensor([0])),
        X,
    ),
    "picked by a list": lambda: (Edge(picked_by_list, a=conv()), X),
    "picked by an order": lambda: (Edge(picked_by_order, a=conv()), X),
    "sliced": lambda: (Edge(sliced, a=conv()), X),
    "normed over a size": lambda: (Edge(normed, w=row(8), b=row(8)), X),
    "groups normed without weights": lambda: (
        Edge(lambda self, x: F.group_norm(self.a(x), 2), a=conv()),
        X,
    ),
    "written before the sum": lambda: (Edge(written_before_the_sum, a=conv(), b=conv()), X),
    "assigned a batch of one": lambda: (
        Edge(assigned_a_batch_of_one, a=conv(), b=conv(), c=nn.Conv2d(8, 2, 1)),
        X,
    ),
    "by keyword": lambda: (Edge(by_keyword, a=conv(), act=nn.SiLU()), X),
    "turned in place": lambda: (Edge(turned_in_place, a=conv()), X),
    "resized by one side": lambda: (Edge(resized_by_one_side, a=nn.Conv2d(8, 8, 1), b=conv()), X),
    "response of one image": lambda: (Edge(response, w=row(1, 8, 1, 1), b=row(1, 8, 1, 1)), X[0]),
    "response": lambda: (Edge(response, w=row(1, 8, 1, 1), b=row(1, 8, 1, 1)), X),
}


@pytest.mark.parametrize("name", EDGES)
@torch.no_grad()
def test_it_computes_what_its_own_code_says(name: str) -> None:
    torch.manual_seed(0)
    model, x = EDGES[name]()
    expected = model.eval()(x.clone())
    for rewritten in (
        nhwc.fuse(model),
        nhwc.fuse(model, passes=PASSES),
        nhwc.optimize(model, x.clone()),
    ):
        torch.testing.assert_close(rewritten(x.clone()), expected, rtol=1e-4, atol=1e-4)


DRAWN = {
    "gumbel": lambda self, x: x * F.gumbel_softmax(self.w, dim=0).view(1, -1, 1, 1),
    "alpha dropout": lambda self, x: x * F.alpha_dropout(self.w, 0.5, True).view(1, -1, 1, 1),
    "feature alpha dropout": lambda self, x: (
        x * F.feature_alpha_dropout(self.w.view(1, -1, 1, 1), 0.5, True)
    ),
    "rrelu": lambda self, x: x * F.rrelu(self.w, -1, 1, True).view(1, -1, 1, 1),
}


@pytest.mark.parametrize("name", DRAWN)
@torch.no_grad()
def test_what_is_drawn_of_weights_is_drawn_in_each_call(name: str) -> None:
    fused = nhwc.fuse(Edge(DRAWN[name], w=nn.Parameter(torch.linspace(-3, 3, 8))).eval())
    assert len({fused(X).sum().item() for _ in range(8)}) > 1


def test_a_factor_that_half_precision_cannot_hold_stays_one() -> None:
    layer = nn.Conv2d(8, 8, 3, bias=False)
    nn.init.constant_(layer.weight, 200.0)
    scaled = Edge(lambda self, x: self.a(x) * self.g, a=layer, g=torch.full((8, 1, 1), 1000.0))
    x, model = X.half() * 1e-3, scaled.half().eval()
    torch.testing.assert_close(nhwc.fuse(model, passes=PASSES)(x), model(x))


@pytest.mark.parametrize("mode", ["zeros", "border"])
def test_an_infinite_place_is_none_but_at_the_border(mode: str) -> None:
    grid = torch.zeros(1, 2, 3, 2)
    grid[0, 0, 0, 0], grid[0, 1, 1, 1], grid[0, 1, 2, 0] = torch.inf, -torch.inf, torch.nan

    def forward(self: Any, x: Tensor) -> Tensor:
        return F.grid_sample(x, grid, padding_mode=mode, align_corners=False)

    model, x = Edge(forward).eval(), nhwc.to_format(X, nhwc.Format.CHANNELS_LAST)[:1]
    found, expected = nhwc.fuse(model, passes=PASSES)(x), model(x)
    torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize("mode", ["zeros", "border"])
def test_no_sample_is_taken_of_infinite_pixels_that_are_not_seen(mode: str) -> None:
    x = torch.randn(1, 4, 5, 5)
    x[..., -1] = torch.inf
    grid = torch.rand(1, 40, 40, 2, generator=torch.Generator().manual_seed(1)) * 3 - 1.5

    def forward(self: Any, x: Tensor) -> Tensor:
        return F.grid_sample(x, grid, padding_mode=mode, align_corners=False)

    model, x = Edge(forward).eval(), nhwc.to_format(x, nhwc.Format.CHANNELS_LAST)
    found, expected = nhwc.fuse(model, passes=PASSES)(x), model(x)
    assert not (found.isnan() & ~expected.isnan()).any()
