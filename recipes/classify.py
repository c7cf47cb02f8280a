"""A classifier of timm's, optimized for one image and for four, and saved for where no timm is.

python recipes/classify.py
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import timm
import torch

import nhwc
from telling import small_asked, tell_audit, tell_gain


def main(argv: Sequence[str] | None = None) -> int:
    name, side = ("resnet10t", 64) if small_asked(__doc__, argv) else ("resnet50d", 224)
    torch.manual_seed(0)
    model = timm.create_model(name).eval()  # with pretrained=True it knows something
    image, four = torch.rand(1, 3, side, side), torch.rand(4, 3, side, side)

    tell_audit(name, nhwc.audit(model, image))
    fast = nhwc.optimize(model, image, also=[four])
    tell_gain(name, fast)

    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        file = Path(folder, "model.nhwc")
        nhwc.save(fast, file)
        again = nhwc.load(file)  # no timm, no class, no pickle
        same = torch.allclose(again(four), model(four), rtol=1e-3, atol=1e-4)
        print(f"saved in {file.stat().st_size / 1e6:.0f} MB; loaded, it answers alike: {same}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
