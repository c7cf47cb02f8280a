"""torch's transformer layers are traced through, and so are saved like any other code."""

import pytest
import torch
from torch import nn

import nhwc
from nhwc.graph import capture

from ..fusing import Block, script
from ..optimizing import force


def layer(**options):
    return nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, **options)


def decoder_layer():
    return nn.TransformerDecoderLayer(16, 2, 32, batch_first=True)


def tokens(*lengths):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, length, 16, generator=generator) for length in lengths]


class Eyes(nn.Module):
    """A small vision transformer."""

    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, 4)
        self.encoder = nn.TransformerEncoder(layer(norm_first=True, activation="gelu"), 2)
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        return self.head(self.encoder(self.patch(x).flatten(2).transpose(1, 2)).mean(1))


WHOLE = {
    "layer": (layer(), 1),
    "layer without biases": (layer(norm_first=True, activation="gelu", bias=False), 1),
    "layer of own activation": (layer(activation=lambda x: x.clamp(-1, 1)), 1),
    "encoder": (nn.TransformerEncoder(layer(), 2, nn.LayerNorm(16)), 1),
    "decoder layer": (decoder_layer(), 2),
    "decoder": (nn.TransformerDecoder(decoder_layer(), 2), 2),
    "both": (nn.Transformer(16, 2, 1, 1, 32, batch_first=True), 2),
    "in a container": (nn.Sequential(layer(), nn.LayerNorm(16)), 1),
}


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("name", WHOLE)
def test_each_is_a_graph_for_all_sizes_and_comes_back_from_a_file(name, tmp_path):
    model, count = WHOLE[name]
    kinds = [type(module) for module in model.eval().modules()]
    captured = capture(model)
    assert not captured.opaque
    assert [type(module) for module in model.modules()] == kinds
    nhwc.save(nhwc.fuse(model), tmp_path / "m.nhwc")
    loaded = nhwc.load(tmp_path / "m.nhwc")
    for lengths in ((5, 7), (9, 4)):
        inputs = tokens(*lengths)[:count]
        torch.testing.assert_close(loaded(*inputs), model(*inputs), rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_a_vision_transformer_is_planned_saved_and_scripted(tmp_path):
    model, x = Eyes().eval(), torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    fast = force(model, x)
    assert not fast.report.opaque
    nhwc.save(fast, tmp_path / "m.nhwc")
    other = torch.randn(1, 3, 24, 16)
    loaded = nhwc.load(tmp_path / "m.nhwc")
    for ours in (fast, loaded, script(nhwc.fuse(model))):
        for image in (x, other):
            torch.testing.assert_close(ours(image), model(image), rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_under_masks_torchs_own_code_runs():
    def forward(self, x):
        padded = torch.zeros(2, 5, dtype=torch.bool)
        padded[0, 3:] = True
        return self.encoder(self.first(x), src_key_padding_mask=padded)

    model = Block(forward, first=nn.Linear(16, 16), encoder=nn.TransformerEncoder(layer(), 1))
    captured = capture(model.eval())
    assert [part.path for part in captured.opaque] == ["encoder"]
    assert type(captured.module.encoder) is nn.TransformerEncoder
    [x] = tokens(5)
    assert torch.equal(captured.module(x), model(x))


@torch.no_grad()
def test_an_encoder_alone_is_scripted_whatever_the_types_of_its_optional_arguments():
    model = nn.TransformerEncoder(layer(), 1, enable_nested_tensor=False).eval()
    [x] = tokens(5)
    torch.testing.assert_close(script(nhwc.fuse(model))(x), model(x), rtol=1e-4, atol=1e-5)
