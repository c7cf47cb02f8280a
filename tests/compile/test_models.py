"""Models of others behind torch.compile, judged by torch's own rule with float64 for a truth."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import same
from torch.utils._pytree import tree_map

import nhwc
from nhwc.models.vision import mend_torchvision


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    torch.manual_seed(0)
    mend_torchvision()
    yield
    torch.compiler.reset()


class Body(nn.Sequential):
    """A backbone as torchvision's detectors want one."""

    out_channels = 8

    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 8, 3, 4, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True)
        )


def detector():
    detection = pytest.importorskip("torchvision.models.detection")
    anchors = detection.anchor_utils.AnchorGenerator(((8, 16),), ((1.0,),))
    return detection.RetinaNet(Body(), 3, 32, 32, anchor_generator=anchors), (
        [torch.rand(3, 32, 32)],
    )


def segmenter():
    segmentation = pytest.importorskip("torchvision.models.segmentation")
    feature = pytest.importorskip("torchvision.models._utils").IntermediateLayerGetter
    head = segmentation.fcn.FCNHead(8, 3)
    body = feature(Body(), {"2": "out"})
    return segmentation.FCN(body, head), (torch.randn(1, 3, 32, 32),)


def unet():
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.UNet2DConditionModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(8, 16),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=8,
        attention_head_dim=4,
        norm_num_groups=4,
    )
    return model, (torch.randn(1, 4, 8, 8), torch.tensor(7), torch.randn(1, 5, 8))


def vae():
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.AutoencoderKL(block_out_channels=(8,), norm_num_groups=4, sample_size=16)
    return model, (torch.randn(1, 3, 16, 16),)


def dinov2():
    transformers = pytest.importorskip("transformers")
    config = transformers.Dinov2Config(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8
    )
    return transformers.Dinov2Model(config), (torch.randn(1, 3, 16, 16),)


def segformer():
    transformers = pytest.importorskip("transformers")
    config = transformers.SegformerConfig(
        num_encoder_blocks=1,
        depths=[1],
        sr_ratios=[2],
        hidden_sizes=[8],
        num_attention_heads=[2],
        patch_sizes=[7],
        strides=[4],
        mlp_ratios=[2],
        decoder_hidden_size=8,
    )
    return transformers.SegformerForSemanticSegmentation(config), (torch.randn(1, 3, 32, 32),)


def doubled(inputs):
    wide = lambda x: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
    return tree_map(wide, inputs)


def plain(result):
    return dict(result) if hasattr(result, "keys") else result


@pytest.mark.parametrize("made", [detector, segmenter, unet, vae, dinov2, segformer])
@pytest.mark.filterwarnings("ignore")  # the packages' own
def test_answers_as_torch_asks_of_a_backend(made):
    model, inputs = made()
    model.eval()
    backend = nhwc.backend()
    with torch.no_grad():
        wanted = plain(model(*inputs))
        wide = plain(copy.deepcopy(model).double()(*doubled(inputs)))
        compiled = torch.compile(model, backend=backend)
        for _ in range(2):
            assert same(wanted, plain(compiled(*inputs)), wide)
    assert any(graph.reports for graph in backend.graphs)
    assert all(one.verification.passed for graph in backend.graphs for one in graph.reports)
