"""A U-Net of segmentation-models-pytorch: image in, a class for each pixel out, from one file.

python recipes/segment.py
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import segmentation_models_pytorch as smp
import torch

import nhwc
from telling import small_asked, tell_audit, tell_gain


def main(argv: Sequence[str] | None = None) -> int:
    small = small_asked(__doc__, argv)
    torch.manual_seed(0)
    depth, widths, side = (3, (16, 8, 8), 32) if small else (5, (256, 128, 64, 32, 16), 256)
    model = smp.Unet(
        "resnet18", encoder_weights=None, encoder_depth=depth, decoder_channels=widths, classes=3
    ).eval()
    image = torch.rand(1, 3, side, side)

    tell_audit("U-Net", nhwc.audit(model, image))
    fast = nhwc.optimize(model, image)
    tell_gain("U-Net", fast)

    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        file = Path(folder, "unet.nhwc")
        nhwc.save(fast, file)
        found, wanted = nhwc.load(file)(image).argmax(1), model(image).argmax(1)
        share = (found == wanted).float().mean().item()
        print(f"saved and loaded: {share:.2%} of the pixels have the same class")
    return 0 if share > 0.999 else 1


if __name__ == "__main__":
    sys.exit(main())
