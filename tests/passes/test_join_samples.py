"""Weighted samples become one layer, which answers as the calls do, or are left alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nhwc import load, optimize, save
from nhwc.graph import capture
from nhwc.graph.modules.mended import WeightedSamples
from nhwc.graph.tracing.sized import capture_sized
from nhwc.passes.join_samples import join_samples

from ..optimizing import force

IMAGES = [torch.randn(4, 3, 6, 5), torch.randn(4, 3, 3, 2)]
GRIDS = [torch.rand(4, 7, count, 2) * 3 - 1.5 for count in (3, 3)]
WEIGHTS = torch.randn(4, 1, 7, 6)
GIVEN = (*IMAGES, *GRIDS, WEIGHTS)


class Stacked(nn.Module):
    """As Deformable DETR has it; what a case changes is a method."""

    def forward(self, x, small, grid, other, weights):
        found = [self.sample(x, grid), self.sample(small, other)]
        return self.summed(found, weights, x)

    def sample(self, x, grid):
        return F.grid_sample(x, grid, mode="bilinear", padding_mode="zeros", align_corners=False)

    def summed(self, found, weights, x):
        return (torch.stack(found, dim=-2).flatten(-2) * weights).sum(-1)


class Named(Stacked):
    def summed(self, found, weights, x):
        stack = torch.stack(found, -2)
        return (weights * torch.flatten(stack, start_dim=-2, end_dim=-1)).sum(dim=-1)


class Concatenated(Stacked):
    """As D-FINE has it."""

    def summed(self, found, weights, x):
        return torch.sum(weights * torch.concat(found, dim=-1), dim=3)


class Viewed(Stacked):
    def sample(self, x, grid):
        return F.grid_sample(x, grid, padding_mode="border", align_corners=True)

    def summed(self, found, weights, x):
        n, c, queries, _ = found[0].shape
        return (torch.stack(found, 3).reshape(n, c, queries, -1) * weights).sum(dim=(-1,))


class One(Stacked):
    def summed(self, found, weights, x):
        return (found[0] * weights[..., :3]).sum(-1) + found[1].mean()


class SameTwice(Stacked):
    def forward(self, x, small, grid, other, weights):
        return self.summed([self.sample(x, grid), self.sample(x, grid + 0.1)], weights, x)


JOINED = (Stacked, Named, Concatenated, Viewed, One, SameTwice)


class Nearest(Stacked):
    def sample(self, x, grid):
        return F.grid_sample(x, grid, mode="nearest", align_corners=False)


class Unlike(Stacked):
    def sample(self, x, grid):
        return F.grid_sample(x, grid, align_corners=x.shape[2] == 6)


class ReadTwice(Stacked):
    def summed(self, found, weights, x):
        return super().summed(found, weights, x) + found[0].mean()


class OtherOrder(Stacked):
    """The points of all images side by side, not the images of each point."""

    def summed(self, found, weights, x):
        return (torch.stack(found, dim=-1).flatten(-2) * weights).sum(-1)


class ForEachChannel(Stacked):
    def summed(self, found, weights, x):
        return (torch.cat(found, -1) * weights.expand(-1, 3, -1, -1)).sum(-1)


class OverQueries(Stacked):
    def summed(self, found, weights, x):
        return (torch.cat(found, -1) * weights).sum(-2)


class Kept(Stacked):
    def summed(self, found, weights, x):
        return (torch.cat(found, -1) * weights).sum(-1, keepdim=True)


class InFloat64(Stacked):
    def summed(self, found, weights, x):
        return (torch.cat(found, -1) * weights).sum(-1, dtype=torch.float64)


class Overwritten(Stacked):
    """Read where the sum is, the image would be zeros."""

    def forward(self, x, *others):
        return super().forward(x * 1, *others)

    def sample(self, x, grid):
        found = super().sample(x, grid)
        x.mul_(0)
        return found

    def summed(self, found, weights, x):
        return super().summed(found, weights, x) + x.sum()


LEFT = (
    *(Nearest, Unlike, ReadTwice, OtherOrder, ForEachChannel, OverQueries, Kept, InFloat64),
    Overwritten,
)


def rewritten(net):
    given = [one.clone() for one in GIVEN]
    graph, _ = capture_sized(capture(net).module, given)
    applied = [site for site in join_samples(graph).sites if site.applied]
    graph.recompile()
    return graph, len(applied)


@pytest.mark.parametrize("kind", [*JOINED, *LEFT])
@torch.no_grad()
def test_what_is_joined_answers_as_the_calls_do(kind):
    net = kind().eval()
    graph, joined = rewritten(net)
    assert joined == (kind in JOINED)
    kinds = [type(module) for module in graph.modules()]
    assert (WeightedSamples in kinds) == (kind in JOINED)
    given, again = ([one.clone() for one in GIVEN] for _ in range(2))
    torch.testing.assert_close(graph(*given), net(*again), rtol=0, atol=0)


@pytest.mark.parametrize("kind", [Stacked, Concatenated, OverQueries])
@torch.no_grad()
def test_sizes_need_not_be_known(kind):
    net = kind().eval()
    graph = capture(net).module
    joined = [site for site in join_samples(graph).sites if site.applied]
    assert len(joined) == (kind is Stacked)
    graph.recompile()
    torch.testing.assert_close(graph(*GIVEN), net(*GIVEN), rtol=0, atol=0)


class OneWeight(Stacked):
    def summed(self, found, weights, x):
        return super().summed(found, weights[:1, :, :1], x)


@pytest.mark.parametrize(
    ("net", "given"),
    [
        (OneWeight(), GIVEN),
        (
            Stacked(),
            (
                *(torch.randn(2, 3, 4, 4, 4) for _ in range(2)),
                *(torch.rand(2, 2, 5, 3, 3) for _ in range(2)),
                torch.randn(2, 1, 2, 5, 6),
            ),
        ),
    ],
    ids=["one weight for all", "volumes"],
)
@torch.no_grad()
def test_what_no_kernel_of_ours_knows_is_planned_all_the_same(net, given):
    fast = force(net.eval(), *given)
    assert fast.report.plans[0].planned
    torch.testing.assert_close(fast(*given), net(*given))


@torch.no_grad()
def test_gradients_reach_all_that_is_read():
    net = Stacked().eval()
    graph, _ = rewritten(net)
    found = []
    for one in (graph, net):
        given = [each.clone().requires_grad_() for each in GIVEN]
        with torch.enable_grad():
            one(*given).square().sum().backward()
        found.append([each.grad for each in given])
    torch.testing.assert_close(*found)


@torch.no_grad()
def test_optimize_joins_them_and_a_file_keeps_the_layer(tmp_path):
    net = Stacked().eval()
    fast = optimize(net, *GIVEN)
    [report] = [one for one in fast.report.passes if one.name == "join_samples"]
    assert [site.applied for site in report.sites] == [True]
    torch.testing.assert_close(fast(*GIVEN), net(*GIVEN))
    save(fast, tmp_path / "samples.nhwc")
    torch.testing.assert_close(load(tmp_path / "samples.nhwc")(*GIVEN), net(*GIVEN))
