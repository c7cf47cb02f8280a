"""A detector of torchvision's: the whole for this process, its backbone as a file for others.

    python recipes/detect.py

A detector decides by values how many boxes there are, so the whole is no graph. `optimize` plans
the parts between the decisions. Only a graph can be saved: the backbone, where the time goes.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torchvision.models import mobilenet_v3_large, mobilenet_v3_small
from torchvision.models.detection import RetinaNet
from torchvision.models.detection.anchor_utils import AnchorGenerator

import nhwc
from telling import small_asked, tell_audit, tell_gain


def detector(small: bool) -> RetinaNet:
    """A RetinaNet on the features of a MobileNet, with random weights."""
    side, whole = (64, mobilenet_v3_small()) if small else (320, mobilenet_v3_large())
    body = whole.features[:4] if small else whole.features
    body.out_channels = 24 if small else 960
    anchors = AnchorGenerator(((32, 64, 128),), ((0.5, 1.0, 2.0),))
    # Weights that know nothing are sure of nothing: every box may pass.
    return RetinaNet(
        body, 5, anchor_generator=anchors, min_size=side, max_size=side, score_thresh=0.0
    ).eval()


def main(argv: Sequence[str] | None = None) -> int:
    small = small_asked(__doc__, argv)
    torch.manual_seed(0)
    model = detector(small)
    side = 64 if small else 320
    images = [torch.rand(3, side, side)]

    tell_audit("detector", nhwc.audit(model, images))
    fast = nhwc.optimize(model, images)
    tell_gain("detector", fast)
    with torch.inference_mode():
        print(f"  {len(fast(images)[0]['boxes'])} boxes")
        wanted = model(images)[0]["boxes"]

    try:
        nhwc.save(fast, "detector.nhwc")
    except nhwc.NhwcError as error:
        print(f"not saved as a whole: {error}")

    backbone = nhwc.optimize(model.backbone, torch.rand(1, 3, side, side))
    tell_gain("backbone", backbone)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        file = Path(folder, "backbone.nhwc")
        nhwc.save(backbone, file)
        model.backbone = nhwc.load(file)
        boxes = model(images)[0]["boxes"]
        same = boxes.shape == wanted.shape and torch.allclose(boxes, wanted, atol=1e-2)
        print(f"with the backbone from its file, the boxes are the same: {same}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
