"""Frames of volumes as a batch of images, and back: views of channels-last memory either way.

A video model computes on (N, C, T, H, W) and on (N*T, C, H, W) in turns. In channels last frames
lie one after the other, each an image, so neither call moves data.
"""

from __future__ import annotations

from torch import Tensor

from .leaf import Leaf


class ToFrames(Leaf):
    """`x.permute(0, 2, 1, 3, 4).reshape(shape)`; without a shape, `.flatten(0, 1)`."""

    def forward(self, x: Tensor, shape: list[int] | None = None) -> Tensor:
        frames = x.permute(0, 2, 1, 3, 4)
        return frames.flatten(0, 1) if shape is None else frames.reshape(shape)


class FromFrames(Leaf):
    """`x.reshape(shape).permute(0, 2, 1, 3, 4)`."""

    def forward(self, x: Tensor, shape: list[int]) -> Tensor:
        return x.reshape(shape).permute(0, 2, 1, 3, 4)
