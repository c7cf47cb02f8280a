"""The vision tower of a language model: Qwen2.5-VL's, which counts by the grids of its images.

python recipes/language.py
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLModel

import nhwc
from telling import small_asked, tell_gain

PATCH = 14
"""The side of a patch in pixels; each holds two pictures, of which a still image has twice one."""


def language_model(small: bool) -> Qwen2_5_VLModel:
    """A model with random weights; Qwen2_5_VLModel.from_pretrained gives others."""
    sizes = {"hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "depth": 8}
    if small:
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "depth": 2}
    text = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
    vision = {**sizes, "out_hidden_size": 64, "fullatt_block_indexes": [1]}
    return Qwen2_5_VLModel(Qwen2_5_VLConfig(text_config=text | heads, vision_config=vision))


def picture(height: int, width: int) -> tuple[Tensor, Tensor]:
    """Patches as transformers' processor makes them of one image, and their grid."""
    return torch.randn(height * width, 3 * 2 * PATCH**2), torch.tensor([[1, height, width]])


def main(argv: Sequence[str] | None = None) -> int:
    side = 8 if (small := small_asked(__doc__, argv)) else 24
    torch.manual_seed(0)
    model = language_model(small).eval()
    wide, high, other = picture(side, 2 * side), picture(2 * side, side), picture(side, side)
    pictures = {"wide": wide, "high": high, "another": other}
    with torch.inference_mode():
        wanted = {name: features(model, *one) for name, one in pictures.items()}

    tower = model.visual
    fast = nhwc.optimize(tower, *wide, also=[high])
    tell_gain("tower", fast)
    tower.forward = fast.forward  # The model goes on to ask the tower for its settings.

    alike = True
    with torch.inference_mode():
        for name, one in pictures.items():
            same = torch.allclose(features(model, *one), wanted[name], rtol=1e-3, atol=1e-3)
            planned = "planned" if fast.serves(one) else "without a plan"
            print(f"  {name}, {planned}: the same features in the model: {same}")
            alike = alike and same
    return 0 if alike else 1


def features(model: Qwen2_5_VLModel, patches: Tensor, grid: Tensor) -> Tensor:
    return torch.cat(model.get_image_features(patches, grid).pooler_output)


if __name__ == "__main__":
    sys.exit(main())
