"""Three of transformers' vision models: a backbone, a segmenter and a detector.

python recipes/hugging_face.py
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from transformers import (
    DetrConfig,
    DetrForObjectDetection,
    Dinov2Config,
    Dinov2Model,
    ResNetConfig,
    SegformerConfig,
    SegformerForSemanticSegmentation,
)

import nhwc
from telling import small_asked, tell_audit, tell_gain


def models(small: bool) -> dict[str, tuple[nn.Module, int]]:
    """Models with random weights, and the sides of their images; from_pretrained gives others."""
    if small:
        few = {"num_hidden_layers": 1, "num_attention_heads": 2}
        dino = Dinov2Config(hidden_size=16, image_size=28, patch_size=14, **few)
        former = SegformerConfig(depths=[1] * 4, hidden_sizes=[8] * 4, decoder_hidden_size=8)
        body = ResNetConfig(depths=[1] * 4, hidden_sizes=[8] * 4, embedding_size=8)
        sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "num_queries": 4}
        heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    else:
        dino = Dinov2Config(hidden_size=384, num_attention_heads=6, image_size=224, patch_size=14)
        former, body, sizes, heads = SegformerConfig(), ResNetConfig(), {}, {}
    body.out_features = ["stage4"]
    backbone = {"use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None}
    detr = DetrConfig(backbone_config=body, **backbone, **sizes, **heads)
    return {
        "DINOv2": (Dinov2Model(dino), 28 if small else 224),
        "SegFormer": (SegformerForSemanticSegmentation(former), 32 if small else 512),
        "DETR": (DetrForObjectDetection(detr), 32 if small else 320),
    }


def main(argv: Sequence[str] | None = None) -> int:
    small = small_asked(__doc__, argv)
    torch.manual_seed(0)
    return max(_tried(name, *found) for name, found in models(small).items())


def _tried(name: str, model: nn.Module, side: int) -> int:
    """Audit and optimize one model, and hold what comes out of its file against it."""
    model.eval()
    image = torch.rand(1, 3, side, side)
    tell_audit(name, nhwc.audit(model, image))
    fast = nhwc.optimize(model, image)
    tell_gain(name, fast)

    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        wanted, found = model(image), fast(image)
        same = torch.allclose(found[0], wanted[0], rtol=1e-3, atol=1e-3)
        print(f"  {type(found).__name__} with {', '.join(found)}: answers alike: {same}")
        try:
            nhwc.save(fast, Path(folder, "model.nhwc"))
        except nhwc.NhwcError as error:
            print(f"  not saved: {error}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
