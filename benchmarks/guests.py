"""Models of packages that nhwc does not depend on, each raced where its package is installed; and
CRNN, which reads text and has many packages of its own.

    python -m benchmarks.guests -o benchmarks/results/guests.json

    pip install ultralytics diffusers transformers segmentation-models-pytorch

Ultralytics' package is AGPL. Weights are random, as in every suite; what the file holds is kept.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nhwc.cli import main as nhwc

GUESTS = {
    "yolo11n": ("ultralytics", "1x3x320x320"),
    "yolo26n": ("ultralytics", "1x3x320x320"),
    "unet_resnet34": ("segmentation_models_pytorch", "1x3x256x256"),
    "segformer_b0": ("transformers", "1x3x256x256"),
    "dinov2_small": ("transformers", "1x3x224x224"),
    "detr": ("transformers", "1x3x320x320"),
    "deformable_detr": ("transformers", "1x3x320x320"),
    "mask2former": ("transformers", "1x3x256x256"),
    "qwen_tower": ("transformers", "1x3x224x224"),
    "siglip2_tower": ("transformers", "1x3x256x256"),
    "vae_decoder": ("diffusers", "1x4x32x32"),
    "crnn": ("torch", "1x1x32x200"),
}
"""By the name of the function that builds it: its package, and its input."""


def yolo11n() -> nn.Module:
    return _yolo("yolo11n.yaml")


def yolo26n() -> nn.Module:
    return _yolo("yolo26n.yaml")


def _yolo(name: str) -> nn.Module:
    """The network as its package exports it: boxes out, and no dict of what a loss would read."""
    from ultralytics.nn.tasks import DetectionModel

    model = DetectionModel(name, verbose=False).eval()
    model.model[-1].export = True
    return model


def unet_resnet34() -> nn.Module:
    from segmentation_models_pytorch import Unet

    model: nn.Module = Unet("resnet34", encoder_weights=None).eval()
    return model


def segformer_b0() -> nn.Module:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    return SegformerForSemanticSegmentation(SegformerConfig()).eval()


def dinov2_small() -> nn.Module:
    from transformers import Dinov2Config, Dinov2Model

    config = Dinov2Config(hidden_size=384, num_attention_heads=6, image_size=224)
    return Dinov2Model(config).eval()


def detr() -> nn.Module:
    from transformers import DetrConfig, DetrForObjectDetection

    return DetrForObjectDetection(DetrConfig(**_backbone("stage4"))).eval()


def deformable_detr() -> nn.Module:
    from transformers import DeformableDetrConfig, DeformableDetrForObjectDetection

    stages = ("stage2", "stage3", "stage4")
    return DeformableDetrForObjectDetection(DeformableDetrConfig(**_backbone(*stages))).eval()


def _backbone(*stages: str) -> dict[str, Any]:
    """ResNet-50 of transformers' own; the default one is timm's."""
    from transformers import ResNetConfig

    config = ResNetConfig(out_features=[*stages])
    absent = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
    return {**absent, "backbone_config": config}


def mask2former() -> nn.Module:
    from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation

    return Mask2FormerForUniversalSegmentation(Mask2FormerConfig()).eval()


class OfOneImage(nn.Module):
    """A tower that takes rows of patches and a grid, given one square image."""

    def __init__(self, tower: nn.Module, patches: int) -> None:
        super().__init__()
        self.tower = tower
        self.register_buffer("grid", torch.tensor([[1, patches, patches]]))


class QwenTower(OfOneImage):
    """A still image is two pictures that are alike; patches come in squares of four."""

    def forward(self, image: Tensor) -> Tensor:
        squares = image.unflatten(3, (-1, 2, 14)).unflatten(2, (-1, 2, 14))
        patches = squares[0].permute(1, 4, 2, 5, 0, 3, 6).flatten(0, 3)
        pictures = patches[:, :, None].expand(-1, -1, 2, -1, -1)
        seen: Tensor = self.tower(pictures.flatten(1), grid_thw=self.grid).pooler_output
        return seen


class Siglip2Tower(OfOneImage):
    def forward(self, image: Tensor) -> Tensor:
        patches = image.unflatten(3, (-1, 16)).unflatten(2, (-1, 16)).permute(0, 2, 4, 3, 5, 1)
        rows = patches.flatten(3).flatten(1, 2)
        every = torch.ones(rows.shape[:2], dtype=torch.int64)
        seen: Tensor = self.tower(rows, every, self.grid[:, 1:]).pooler_output
        return seen


def qwen_tower() -> nn.Module:
    """Four of the 32 blocks of Qwen2.5-VL's tower."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel

    vision = {"hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "depth": 4}
    text = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    text |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
    config = Qwen2_5_VLConfig(text_config=text, vision_config=vision | {"out_hidden_size": 2048})
    return QwenTower(Qwen2_5_VLModel(config).visual, 16).eval()


def siglip2_tower() -> nn.Module:
    from transformers import Siglip2VisionConfig, Siglip2VisionModel

    return Siglip2Tower(Siglip2VisionModel(Siglip2VisionConfig()), 16).eval()


def vae_decoder() -> nn.Module:
    """The decoder of Stable Diffusion's autoencoder."""
    from diffusers import AutoencoderKL

    sizes = (128, 256, 512, 512)
    whole = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=sizes,
        layers_per_block=2,
    )
    decoder: nn.Module = whole.decoder.eval()
    return decoder


class TextReader(nn.Module):
    """CRNN: columns of what convolutions see in a line of text are steps of two LSTMs."""

    def __init__(self, letters: int = 37) -> None:
        super().__init__()
        sides = ((1, 64, 3), (64, 128, 3), (128, 256, 3), (256, 256, 3))
        deep = ((256, 512, 3), (512, 512, 3), (512, 512, 2))
        flat = lambda: nn.MaxPool2d((2, 2), (2, 1), (0, 1))
        first, second, third, fourth = (self._seen(*one, norm=False) for one in sides)
        fifth, sixth, last = (self._seen(*one, norm=True) for one in deep)
        self.seen = nn.Sequential(
            *(first, nn.MaxPool2d(2), second, nn.MaxPool2d(2), third, fourth, flat()),
            *(fifth, sixth, flat(), last),
        )
        self.forth_and_back = nn.LSTM(512, 256, bidirectional=True)
        self.between = nn.Linear(512, 256)
        self.again = nn.LSTM(256, 256, bidirectional=True)
        self.letters = nn.Linear(512, letters)

    @staticmethod
    def _seen(width: int, filters: int, size: int, *, norm: bool) -> nn.Sequential:
        conv = nn.Conv2d(width, filters, size, padding=size // 2 if size == 3 else 0)
        return nn.Sequential(conv, *[nn.BatchNorm2d(filters)] * norm, nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        y = self.seen(x).squeeze(2).permute(2, 0, 1)
        y, _ = self.forth_and_back(y)
        y, _ = self.again(self.between(y))
        found: Tensor = self.letters(y)
        return found


def crnn() -> nn.Module:
    return TextReader().eval()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="default: all whose package is installed")
    parser.add_argument("--variants", default="eager,channels_last,optimized,onnxruntime,openvino")
    parser.add_argument("--seconds", default="1")
    parser.add_argument("-o", "--output", type=Path, required=True)
    args = parser.parse_args(argv)
    status = 0
    for name, (package, shape) in GUESTS.items():
        if find_spec(package) is None or (args.names and name not in args.names):
            continue
        where = f"{Path(__file__).relative_to(Path.cwd())}:{name}"
        rest = ["--input", shape, "--variants", args.variants, "--seconds", args.seconds]
        rest += ["--resume", "-o", str(args.output), "--format", "json"]
        status = max(status, nhwc(["bench", where, *rest]))
    return status


if __name__ == "__main__":
    raise SystemExit(main())
