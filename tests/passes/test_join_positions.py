"""Positions of keys that are added to scores become channels, or are left alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nhwc import optimize
from nhwc.graph import capture
from nhwc.graph.report import PassReport
from nhwc.graph.tracing.sized import capture_sized
from nhwc.passes import PASSES
from nhwc.passes.join_positions import join_positions
from nhwc.passes.join_scores import join_scores
from nhwc.passes.mend_writes import mend_writes

HEIGHT, WIDTH, HEADS, DEPTH = 5, 7, 3, 4
TOKENS = HEIGHT * WIDTH


class Spelled(nn.Module):
    """Attention as SAM's encoder and ViTDet write it; what a case changes is a method."""

    classes = 0

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        tokens = TOKENS + self.classes
        self.qkv = nn.Linear(HEADS * DEPTH, 3 * HEADS * DEPTH)
        self.by_row = nn.Parameter(torch.randn(HEIGHT, HEIGHT, DEPTH))
        self.by_column = nn.Parameter(torch.randn(WIDTH, WIDTH, DEPTH))
        self.bias = nn.Parameter(torch.randn(HEADS, tokens, tokens))

    def forward(self, x):
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, HEADS, DEPTH).permute(2, 0, 3, 1, 4)
        y = self.mixed(*(one.flatten(0, 1) for one in (q, k, v)))
        return y.reshape(batch, HEADS, tokens, DEPTH).transpose(1, 2).flatten(2)

    def positions(self, q):
        images = q[:, self.classes :].reshape(-1, HEIGHT, WIDTH, DEPTH)
        rows = torch.einsum("bhwc,hkc->bhwk", images, self.by_row)
        columns = torch.einsum("bhwc,wkc->bhwk", images, self.by_column)
        return rows, columns

    def mixed(self, q, k, v):
        return self.scores(q, k).softmax(-1) @ v

    def scores(self, q, k):
        rows, columns = self.positions(q)
        scores = (q * 0.5) @ k.transpose(-2, -1)
        images = scores.view(-1, HEIGHT, WIDTH, HEIGHT, WIDTH)
        images = images + rows[:, :, :, :, None] + columns[:, :, :, None, :]
        return images.view(-1, TOKENS, TOKENS)

    def both(self, q):
        rows, columns = self.positions(q)
        return rows[..., :, None] + columns.unsqueeze(-2)


class ScaledBehind(Spelled):
    def scores(self, q, k):
        scores = torch.bmm(q, k.mT) / 4
        return self.both(q).reshape_as(scores) + scores


class TypeSaid(Spelled):
    def mixed(self, q, k, v):
        return F.softmax(self.scores(q, k), dim=-1, dtype=torch.float32).to(q.dtype) @ v


class Called(Spelled):
    scale = None

    def mixed(self, q, k, v):
        bias = self.both(q).reshape(-1, TOKENS, TOKENS)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=self.scale)


class CalledWithScale(Called):
    scale = 0.3


class HeadsApart(Spelled):
    def mixed(self, q, k, v):
        bias = self.both(q).reshape(-1, TOKENS, TOKENS)
        q, k, v, bias = (one.unflatten(0, (-1, HEADS)) for one in (q, k, v, bias))
        return F.scaled_dot_product_attention(q, k, v, bias).flatten(0, 1)


class RowsAlone(Spelled):
    """The numbers of the first column's queries serve all of their row."""

    def mixed(self, q, k, v):
        rows, columns = self.positions(q)
        shared = rows[:, :, :1, :, None]
        bias = (shared + columns[..., None, :]).reshape(-1, TOKENS, TOKENS)
        return F.scaled_dot_product_attention(q, k, v, bias)


class WithClass(Spelled):
    """A class token has no position, as in MViT."""

    classes = 1

    def scores(self, q, k):
        scores = q @ k.transpose(-2, -1)
        scores[:, 1:, 1:] += self.both(q).reshape(-1, TOKENS, TOKENS)
        return scores


def joined(model, x):
    """The model with sizes known, after the pass; and how often it applied."""
    graph, _ = capture_sized(capture(model).module, [x])
    mend_writes(graph)
    report = join_positions(graph)
    return graph, sum(site.applied for site in report.sites)


def image(model, batch=2):
    generator = torch.Generator().manual_seed(2)
    return torch.randn(batch, TOKENS + model.classes, HEADS * DEPTH, generator=generator)


JOINED = (Spelled, ScaledBehind, TypeSaid, Called, CalledWithScale, HeadsApart, RowsAlone)


@pytest.mark.parametrize("kind", [*JOINED, WithClass])
def test_positions_become_channels(kind):
    model = kind().eval()
    x = image(model)
    graph, count = joined(model, x)
    assert count == 1
    join_scores(graph)
    largest = max(numbers_of(node) for node in graph.graph.nodes)
    assert largest < 2 * HEADS * TOKENS * TOKENS, "a matrix of scores is left"
    with torch.no_grad():
        torch.testing.assert_close(graph(x), model(x), rtol=1e-5, atol=1e-5)


def numbers_of(node):
    seen = node.meta.get("seen")
    return torch.Size(seen.shape).numel() if seen else 0


class FullBias(Spelled):
    def both(self, q):
        rows, columns = self.positions(q)
        sums = rows[..., :, None] + columns[..., None, :]
        return sums + self.bias.repeat(2, 1, 1).view(-1, HEIGHT, WIDTH, HEIGHT, WIDTH)

    def mixed(self, q, k, v):
        bias = self.both(q).reshape(-1, TOKENS, TOKENS)
        return F.scaled_dot_product_attention(q, k, v, bias)


class Masked(Spelled):
    """A part may be minus infinity, which is no number to multiply by zero."""

    def mixed(self, q, k, v):
        rows, columns = self.positions(q)
        rows = rows.masked_fill(rows > 2, float("-inf"))
        bias = (rows[..., :, None] + columns[..., None, :]).reshape(-1, TOKENS, TOKENS)
        return F.scaled_dot_product_attention(q, k, v, bias)


class Overwritten(Spelled):
    """As the channels of queries, rows would be read when they are something else."""

    def mixed(self, q, k, v):
        rows, columns = self.positions(q)
        bias = (rows[..., :, None] + columns[..., None, :]).reshape(-1, TOKENS, TOKENS)
        rows.transpose(0, 1).zero_()
        return F.scaled_dot_product_attention(q, k, v, bias) + rows.sum()


class QueriesOverwritten(Spelled):
    def mixed(self, q, k, v):
        scores = self.scores(q, k)
        q.view(-1).zero_()
        return scores.softmax(-1) @ v + q.sum()


class Causal(Spelled):
    def mixed(self, q, k, v):
        bias = self.both(q).reshape(-1, TOKENS, TOKENS)
        kept = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, k, v, bias.masked_fill(~kept, float("-inf")))


class Shifted(WithClass):
    """What is added to the scores is not what was in their place."""

    def scores(self, q, k):
        scores = q @ k.transpose(-2, -1)
        scores[:, 1:, 1:] = scores[:, :-1, :-1] + self.both(q).reshape(-1, TOKENS, TOKENS)
        return scores


class IntoOthers(WithClass):
    def scores(self, q, k):
        scores = q @ k.transpose(-2, -1)
        others = self.bias.repeat(2, 1, 1)
        others[:, 1:, 1:] = scores[:, 1:, 1:] + self.both(q).reshape(-1, TOKENS, TOKENS)
        return others


class BeforeTheLast(WithClass):
    def scores(self, q, k):
        scores = q @ k.transpose(-2, -1)
        scores[:, 1:, :-1] += self.both(q).reshape(-1, TOKENS, TOKENS)
        return scores


class OverQueries(Spelled):
    def mixed(self, q, k, v):
        return self.scores(q, k).softmax(-2) @ v


class Turned(Spelled):
    """Keys by columns, queries by rows: the reshape makes other scores of the sum."""

    def scores(self, q, k):
        turned = self.both(q).transpose(-2, -1).reshape(-1, TOKENS, TOKENS)
        return q @ k.transpose(-2, -1) + turned


class SharedKeys(Spelled):
    """All heads of all images look at the keys of the first."""

    def scores(self, q, k):
        return super().scores(q, k[:1])


LEFT = (FullBias, Masked, Causal, Shifted, IntoOthers, BeforeTheLast, OverQueries, Turned)
LEFT += (Overwritten, QueriesOverwritten)


@pytest.mark.parametrize("kind", [*LEFT, SharedKeys])
def test_what_is_no_position_is_left_alone(kind):
    model = kind().eval()
    x = image(model)
    graph, count = joined(model, x)
    assert not count
    with torch.no_grad():
        torch.testing.assert_close(graph(x), model(x), rtol=1e-5, atol=1e-5)


def test_without_sizes_nothing_is_joined():
    model = Called().eval()
    graph = capture(model).module
    assert not join_positions(graph).sites


class Asked(Called):
    """A model whose sizes are known only once it is planned."""

    def positions(self, q):
        if q.shape[0] % HEADS:
            return q
        return super().positions(q)


def test_an_optimized_model_has_no_matrix_of_scores():
    model = Asked().eval()
    x = image(model, batch=1)
    fast = optimize(model, x)
    done = {one.name: len(one.applied) for plan in fast.report.plans for one in plan.passes}
    assert done["join_positions"] == 1
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)


def test_an_exact_plan_multiplies_no_infinite_position_by_zero():
    model = Asked().eval()
    x = image(model, batch=1)
    x[0, 3] = 3e38
    ran = []

    def own(graph):
        ran.append(graph)
        return PassReport("own")

    fast = optimize(model, image(model, batch=1), exact=True, passes=(*PASSES, own))
    assert ran, "a pass of the user's own was left out"
    assert not any(one.applied for plan in fast.report.plans for one in plan.passes)
    with torch.no_grad():
        expected = model(x)
        known = expected.isfinite()  # From torch 2.15 on, its own attention loses whole queries.
        torch.testing.assert_close(fast(x)[known], expected[known], rtol=1e-4, atol=1e-5)
    assert known.any()
    assert not known.all()
