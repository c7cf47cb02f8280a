"""Clips of a video through a 3-D network of torchvision's, without a copy to lay them out.

    python recipes/video.py

A decoder writes frame after frame, each pixel by pixel: T, H, W, C. That is channels last already.
Viewed as N, C, T, H, W it needs no copy of its layout.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torchvision.models.video.resnet import BasicBlock, BasicStem, Conv3DSimple, VideoResNet

import nhwc
from telling import small_asked, tell_audit, tell_gain

MEAN, DEVIATION = torch.tensor([0.432, 0.395, 0.376]), torch.tensor([0.228, 0.221, 0.217])


def clip_of(frames: Tensor) -> Tensor:
    """Normalize frames as they are decoded, T, H, W, C in bytes, and view them as N, C, T, H, W."""
    numbers = (frames.float() / 255 - MEAN) / DEVIATION
    return numbers.permute(3, 0, 1, 2).unsqueeze(0)


def main(argv: Sequence[str] | None = None) -> int:
    small = small_asked(__doc__, argv)
    torch.manual_seed(0)
    blocks, length, side = ([1, 0, 0, 0], 4, 32) if small else ([2, 2, 2, 2], 16, 112)
    model = VideoResNet(BasicBlock, [Conv3DSimple] * 4, blocks, BasicStem, 400)
    if small:
        model.layer2 = model.layer3 = model.layer4 = torch.nn.Identity()
        model.fc = torch.nn.Linear(64, 400)
    model.eval()
    video = torch.randint(0, 256, (4 * length, side, side, 3), dtype=torch.uint8)

    clip = clip_of(video[:length])
    print(f"a clip, as it was decoded: {nhwc.format_of(clip).name}")
    nhwc.convert_(model)  # the clip is channels last already; so shall the weights be
    tell_audit("3-D ResNet", nhwc.audit(model, clip))
    fast = nhwc.optimize(model, clip)
    tell_gain("3-D ResNet", fast)

    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        file = Path(folder, "video.nhwc")
        nhwc.save(fast, file)
        again = nhwc.load(file)
        clips = [clip_of(frames) for frames in video.split(length)]
        same = all(torch.allclose(again(one), model(one), rtol=1e-3, atol=1e-4) for one in clips)
        print(f"{len(clips)} clips, from the file: answers alike: {same}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
