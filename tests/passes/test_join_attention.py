"""Attention that models spell out, joined into one layer: the same answers, or left alone."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nhwc
from nhwc.graph.modules.mended import Attention
from nhwc.passes.join_attention import join_attention
from nhwc.passes.lift_functional import lift_functional

from ..fusing import rewrite, script


class Tokens(nn.Module):
    """Attention as timm writes it; what a case changes is an attribute or a method."""

    order, ending, options = (2, 0, 3, 1, 4), "reshape", {}

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.qkv = nn.Linear(24, 72)

    def parts(self, x):
        return self.qkv(x)

    def forward(self, x):
        images, tokens, _ = x.shape
        apart = self.parts(x).reshape(images, tokens, 3, 4, 6).permute(*self.order)
        q, k, v = apart.unbind(0)
        q, k, v = self.arranged(q, k, v)
        y = F.scaled_dot_product_attention(q, k, v, **self.options).transpose(1, 2)
        return y.flatten(2) if self.ending == "flatten" else y.reshape(images, tokens, 24)

    def arranged(self, q, k, v):
        return q, k, v


class Flat(Tokens):
    ending, options = "flatten", {"attn_mask": None, "dropout_p": 0.0, "is_causal": False}


class ByKeyword(Tokens):
    def forward(self, x):
        images, tokens, _ = x.shape
        apart = self.qkv(input=x).reshape(images, tokens, 3, 4, 6)
        q, k, v = torch.unbind(input=torch.permute(input=apart, dims=self.order), dim=0)
        y = F.scaled_dot_product_attention(q, k, v)
        return y.transpose(1, 2).reshape(images, tokens, 24)


class Overwritten(Tokens):
    def forward(self, x):
        images, tokens, _ = x.shape
        rows = self.qkv(x)
        q, k, v = rows.reshape(images, tokens, 3, 4, 6).permute(*self.order).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v)
        rows.view(-1).zero_()
        return y.transpose(1, 2).reshape(images, tokens, 24) + rows.sum()


@pytest.mark.parametrize("kind", [Tokens, Flat, ByKeyword, Overwritten])
@pytest.mark.parametrize("shape", [(2, 9, 24), (1, 1, 24)])
def test_packed_attention_is_one_layer(kind, shape):
    model, x = kind().eval(), torch.randn(shape)
    changed, (report,) = rewrite(model, join_attention)
    assert [site.applied for site in report.sites] == [True]
    assert any(isinstance(part, Attention) for part in changed.modules())
    assert not any(name in changed.code for name in ("scaled_dot", "permute", "unbind"))
    with torch.no_grad():
        torch.testing.assert_close(changed(x), model(x))
        torch.testing.assert_close(script(changed)(x), model(x))


class Causal(Tokens):
    options = {"is_causal": True}  # noqa: RUF012


class Scaled(Tokens):
    options = {"scale": 2.0}  # noqa: RUF012


class Swapped(Tokens):
    def arranged(self, q, k, v):
        return k, q, v


class Normed(Tokens):
    def arranged(self, q, k, v):
        return F.normalize(q, dim=-1), k, v


class Regrouped(Tokens):
    """Images and tokens are other ones than those of the linear layer's rows."""

    def forward(self, x):
        apart = self.qkv(x).reshape(6, 3, 3, 4, 6).permute(2, 0, 3, 1, 4)
        q, k, v = apart.unbind(0)
        y = F.scaled_dot_product_attention(q, k, v)
        return y.transpose(1, 2).reshape(6, 3, 24)


class Wide(Tokens):
    """The rows are not what a linear layer made."""

    def parts(self, x):
        return torch.cat((x, x, x), 2)


class OtherParts(Tokens):
    """What is taken apart by keyword are heads, of which there are three as well."""

    def forward(self, x):
        images, tokens, _ = x.shape
        apart = self.qkv(x).reshape(images, tokens, 3, 3, 8).permute(*self.order)
        q, k, v = apart.unbind(dim=2)
        y = F.scaled_dot_product_attention(q, k, v)
        return y.transpose(1, 2).reshape(images, tokens, 24)


class LikeTokens(Tokens):
    """No number says what shape the result has."""

    def forward(self, x):
        images, tokens, _ = x.shape
        apart = self.qkv(x).reshape(images, tokens, 3, 4, 6).permute(*self.order)
        q, k, v = apart.unbind(0)
        y = F.scaled_dot_product_attention(q, k, v)
        return y.transpose(1, 2).reshape(x.shape)


class Learned(Tokens):
    """Nothing made the heads: they are a parameter."""

    def __init__(self):
        super().__init__()
        self.heads = nn.Parameter(torch.randn(2, 9, 3, 4, 6))

    def forward(self, x):
        q, k, v = self.heads.permute(*self.order).unbind(0)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 9, 24) + x


@pytest.mark.parametrize(
    "kind", [Causal, Scaled, Swapped, Normed, Regrouped, Wide, OtherParts, LikeTokens, Learned]
)
def test_other_attention_is_left_alone(kind):
    model, x = kind().eval(), torch.randn(2, 9, 24)
    changed, (_, report) = rewrite(model, lift_functional, join_attention)
    assert [site.applied for site in report.sites] == [False]
    with torch.no_grad():
        torch.testing.assert_close(changed(x), model(x))


@torch.no_grad()
def test_a_block_of_a_transformer_is_one_program(tmp_path):
    class Block(Tokens):
        def __init__(self):
            super().__init__()
            self.norm, self.out = nn.LayerNorm(24), nn.Linear(24, 24)
            self.mlp = nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 96), nn.GELU())
            self.last = nn.Linear(96, 24)

        def forward(self, x):
            x = x + self.out(super().forward(self.norm(x)))
            return x + self.last(self.mlp(x))

    model, x = Block().eval(), torch.randn(2, 70, 24)
    fast = nhwc.optimize(model, x)
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    kernels = {layer.name: layer.kernels for layer in fast.report.plans[0].layers}
    joined = next(name for name in kernels if name.endswith("joined"))
    assert "nhwc" in [one.kernel for one in kernels[joined]]
    nhwc.save(fast, tmp_path / "block.nhwc")
    torch.testing.assert_close(nhwc.load(tmp_path / "block.nhwc")(x), fast(x))
