"""YOLO from Ultralytics' package, which is AGPL and no dependency of nhwc: image in, boxes out.

python recipes/yolo.py
nhwc bench recipes/yolo.py:build --input 1x3x640x640 --variants optimized,onnxruntime,openvino
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from ultralytics.nn.tasks import DetectionModel
from ultralytics.utils.nms import non_max_suppression

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


class Network(nn.Module):
    """The network as a function of an image: its own `forward` takes any number of arguments."""

    def __init__(self, model: DetectionModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        return self.model.predict(image)


def build(small: bool = False) -> nn.Module:
    """Return a network with random weights; YOLO("yolo11n.pt").model is one that knows things."""
    return Network(DetectionModel(SMALL if small else "yolo11n.yaml", verbose=False)).eval()


def main(argv: Sequence[str] | None = None) -> int:
    small = small_asked(__doc__, argv)
    torch.manual_seed(0)
    model, side = build(small), 64 if small else 640
    image = torch.rand(1, 3, side, side)

    tell_audit("YOLO", nhwc.audit(model, image))
    fast = nhwc.optimize(model, image)
    tell_gain("YOLO", fast)

    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        file = Path(folder, "yolo.nhwc")
        nhwc.save(fast, file)
        found, wanted = nhwc.load(file)(image)[0], model(image)[0]
        same = torch.allclose(found, wanted, rtol=1e-3, atol=1e-2)
        boxes = non_max_suppression(found, conf_thres=0.0, max_det=5)[0]
        print(f"saved, loaded, and it answers alike: {same}; {len(boxes)} boxes after suppression")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
