"""YOLO from Ultralytics' package, which is AGPL and no dependency of nhwc: picture in, boxes out.

python recipes/yolo.py
nhwc bench recipes/yolo.py:build --input 1x3x640x640 --variants optimized,onnxruntime,openvino
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from ultralytics import YOLO
from ultralytics.nn.tasks import DetectionModel

import nhwc
from telling import small_asked, tell_audit, tell_gain

SMALL = {
    "nc": 3,
    "backbone": [
        [-1, 1, "Conv", [8, 3, 2]],
        [-1, 1, "Conv", [16, 3, 2]],
        [-1, 1, "C2f", [16, True]],
        [-1, 1, "SPPF", [16, 5]],
    ],
    "head": [[[2, 3], 1, "Detect", ["nc"]]],
}
"""A network of YOLO's own parts, as its YAML files describe one."""


def build(small: bool = False) -> nn.Module:
    """Return a network with random weights; YOLO("yolo11n.pt").model is one that knows things."""
    return DetectionModel(SMALL if small else "yolo11n.yaml", verbose=False).eval()


def main(argv: Sequence[str] | None = None) -> int:
    small = small_asked(__doc__, argv)
    torch.manual_seed(0)
    model, side = build(small), 64 if small else 640

    image = torch.rand(1, 3, side, side)
    tell_audit("YOLO", nhwc.audit(model, image))
    fast = nhwc.optimize(model, image)
    tell_gain("YOLO", fast)

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "yolo.nhwc")
        nhwc.save(fast, file)
        loaded = nhwc.load(file)
    # The class names are all that YOLO wants of a network besides its answers.
    loaded.names = model.names

    yolo = YOLO("yolo11n.yaml")
    picture = torch.randint(256, (side, side * 3 // 4, 3), dtype=torch.uint8).numpy()
    boxes = []
    for yolo.model in (model, loaded):
        yolo.predictor = None  # It would keep the network of the first call.
        # Without `rect=False` pictures that are no squares are padded less, to another shape.
        asked = {"imgsz": side, "rect": False, "conf": 0.0, "max_det": 5, "verbose": False}
        boxes.append(yolo.predict(picture, **asked)[0].boxes.data)
    same = torch.allclose(*boxes, rtol=1e-3, atol=1e-2)
    print(f"saved, loaded, in YOLO's own predict: {len(boxes[1])} boxes, the same: {same}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
