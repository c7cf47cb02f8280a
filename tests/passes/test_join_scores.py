"""Attention spelled as products and a softmax, joined into one layer, or left alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from nhwc.graph.modules.mended import SpelledAttention
from nhwc.passes.join_scores import join_scores

from ..fusing import rewrite, script


class Spelled(nn.Module):
    """Attention as Swin, LeViT and their kin write it; what a case changes is a method."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.bias = nn.Parameter(torch.randn(1, 4, 9, 9))

    def forward(self, q, k, v):
        return self.mixed(self.weights(self.scores(q, k)), v)

    def scores(self, q, k):
        return q @ k.transpose(-2, -1) * 0.3 + self.bias

    def weights(self, scores):
        return scores.softmax(dim=-1)

    def mixed(self, weights, v):
        return weights @ v


class QueriesScaled(Spelled):
    def scores(self, q, k):
        return self.bias + torch.matmul(q * 0.3, k.transpose(-2, -1)) / 2


class Plain(Spelled):
    def scores(self, q, k):
        return q.matmul(k.mT)

    def weights(self, scores):
        return F.softmax(scores, dim=-1, _stacklevel=3, dtype=None)


class Windows(Spelled):
    """Windows that were shifted, as Swin has them: two in each image, with masks of their own."""

    images, together = 1, -1

    def __init__(self):
        super().__init__()
        masks = torch.rand(2, 9, 9, generator=torch.Generator().manual_seed(3)) < 0.3
        self.register_buffer("masks", masks.float() * -100.0)

    def weights(self, scores):
        apart = scores.view(self.images, 2, 4, 9, 9) + self.masks.unsqueeze(1).unsqueeze(0)
        return apart.view(self.together, 4, 9, 9).softmax(-1)


class WindowsWithoutBias(Windows):
    images, together = -1, -1

    def scores(self, q, k):
        return q @ k.transpose(-2, -1)


def parts(*shape):
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(2, 4, 9, 6, generator=generator) for _ in range(3)]


@pytest.mark.parametrize("kind", [Spelled, QueriesScaled, Plain, Windows, WindowsWithoutBias])
def test_spelled_attention_is_one_layer(kind):
    model = kind().eval()
    changed, (report,) = rewrite(model, join_scores)
    assert [site.applied for site in report.sites] == [True]
    assert any(isinstance(part, SpelledAttention) for part in changed.modules())
    assert "softmax" not in changed.code.replace("softmax_joined", "")
    with torch.no_grad():
        torch.testing.assert_close(changed(*parts()), model(*parts()))
        torch.testing.assert_close(script(changed)(*parts()), model(*parts()))


class OverQueries(Spelled):
    def weights(self, scores):
        return scores.softmax(-2)


class WeightsRead(Spelled):
    def mixed(self, weights, v):
        return weights @ v + weights.sum()


class ScoresRead(Spelled):
    def weights(self, scores):
        return scores.softmax(-1) * scores


class NoProduct(Spelled):
    def scores(self, q, k):
        return (q - k).repeat(1, 1, 1, 2)[..., :9]


class Values(Spelled):
    def mixed(self, weights, v):
        return v.transpose(-2, -1) @ weights


class Squashed(Spelled):
    def scores(self, q, k):
        return torch.tanh(q @ k.transpose(-2, -1)) + self.bias


class BiasScaled(Spelled):
    def scores(self, q, k):
        return torch.add(q @ k.transpose(-2, -1), self.bias, alpha=2)


class OtherHeads(Windows):
    def weights(self, scores):
        apart = scores.view(1, 2, 2, 18, 9) + self.masks.repeat(1, 2, 1).unsqueeze(1)
        return apart.view(2, 4, 9, 9).softmax(-1)


class Multiplied(Windows):
    def weights(self, scores):
        return (scores.view(1, 2, 4, 9, 9) * self.masks.unsqueeze(1)).view(2, 4, 9, 9).softmax(-1)


class ApartRead(Windows):
    def weights(self, scores):
        apart = scores.view(1, 2, 4, 9, 9)
        return ((apart + self.masks.unsqueeze(1)) * apart.mean()).view(2, 4, 9, 9).softmax(-1)


class QueriesOverwritten(Spelled):
    def forward(self, q, k, v):
        q = q.exp()
        scores = self.scores(q, k)
        q.view(-1).zero_()
        return self.mixed(self.weights(scores), v) + q


@pytest.mark.parametrize(
    "kind",
    [
        *(QueriesOverwritten, OverQueries, WeightsRead, ScoresRead, NoProduct, Values, Squashed),
        *(BiasScaled, OtherHeads, Multiplied, ApartRead),
    ],
)
def test_what_is_no_attention_is_left_alone(kind):
    model = kind().eval()
    changed, (report,) = rewrite(model, join_scores)
    assert not report.applied
    with torch.no_grad():
        torch.testing.assert_close(changed(*parts()), model(*parts()))
