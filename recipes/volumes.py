"""A 3-D U-Net of MONAI's, window by window through a scan that is larger than the network's input.

python recipes/volumes.py
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from monai.inferers import sliding_window_inference
from monai.networks.nets import UNet

import nhwc
from telling import small_asked, tell_audit, tell_gain


def main(argv: Sequence[str] | None = None) -> int:
    small = small_asked(__doc__, argv)
    torch.manual_seed(0)
    widths, side = ((4, 8, 16), 16) if small else ((16, 32, 64, 128), 64)
    strides = (2,) * (len(widths) - 1)
    model = UNet(3, 1, 2, channels=widths, strides=strides, num_res_units=1).eval()
    window = torch.rand(1, 1, side, side, side)

    tell_audit("3-D U-Net", nhwc.audit(model, window))
    fast = nhwc.optimize(model, window)
    tell_gain("3-D U-Net", fast)

    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        file = Path(folder, "unet3d.nhwc")
        nhwc.save(fast, file)
        scan = torch.rand(1, 1, side, side, 2 * side)
        # One window a call: the plan is for one.
        found, wanted = (
            sliding_window_inference(scan, (side,) * 3, 1, network, overlap=0.25)
            for network in (nhwc.load(file), model)
        )
        same = torch.allclose(found, wanted, rtol=1e-3, atol=1e-4)
        print(f"a scan of {side}x{side}x{2 * side}, from the file, window by window: same {same}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
