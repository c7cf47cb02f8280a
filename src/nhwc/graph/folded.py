"""Layers with the batch norm after them folded in, where the graph does not prove a batch.

Some batch norms take whatever they are given and scale its second dimension. In a batch that is
the channels; in one signal alone, (C, L), it is the positions. Here the folded weights serve
batches, and of anything else the fold is undone and the norm done as it would have been.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def undone(
    product: Tensor, layer: tuple[Tensor, Tensor, Tensor], channels: int, dims: int
) -> Tensor:
    """What layer and norm give, from the product of the input with the folded weights, no bias.

    `layer` is the scale, the shift and the bias before the fold, and `channels` the dimension they
    were folded along. TorchScript takes `product` to have a batch, so `dims` comes from the input.
    """
    scale, shift, bias = layer
    own = [1] * dims
    own[channels] = -1
    along = [1] * dims
    along[1] = -1
    plain = product / scale.view(own) + bias.view(own)
    return plain * scale.view(along) + shift.view(along)


class Folded(nn.Module):
    """Keeps, beside the folded weights, what it takes to undo the fold."""

    scale: Tensor
    shift: Tensor
    bias_before: Tensor

    def reset_parameters(self: Any) -> None:
        """Called at the end of each layer's constructor, which it thereby extends."""
        super().reset_parameters()  # type: ignore[misc]
        outputs = self.out_features if isinstance(self, nn.Linear) else self.out_channels
        for name in ("scale", "shift", "bias_before"):
            self.register_buffer(name, torch.zeros(outputs))


class FoldedLinear(Folded, nn.Linear):
    """Given (N, C); of (N, L, C) the batch norm scaled L, not C."""

    def forward(self, input: Tensor) -> Tensor:
        if input.dim() == 2:
            return F.linear(input, self.weight, self.bias)
        product, dims = F.linear(input, self.weight), input.dim()
        return undone(product, (self.scale, self.shift, self.bias_before), dims - 1, dims)


class FoldedConv(Folded):
    """What the convolutions share."""

    def forward(self: Any, input: Tensor) -> Tensor:
        batch = input.dim() == self.weight.dim()
        result: Tensor = self._conv_forward(input, self.weight, self.bias if batch else None)
        if batch:
            return result
        return undone(result, (self.scale, self.shift, self.bias_before), 0, input.dim())


class FoldedConv1d(FoldedConv, nn.Conv1d):
    """Given (N, C, L); of (C, L) the batch norm scaled L."""


class FoldedConv2d(FoldedConv, nn.Conv2d):
    """Given (N, C, H, W); of (C, H, W) the batch norm scaled H."""


class FoldedConv3d(FoldedConv, nn.Conv3d):
    """Given (N, C, D, H, W); of (C, D, H, W) the batch norm scaled D."""


class FoldedConvTranspose(Folded):
    """What the transposed convolutions share."""

    def forward(self: Any, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        dims = self.weight.dim()
        batch = input.dim() == dims
        more = self._output_padding(
            input, output_size, self.stride, self.padding, self.kernel_size, dims - 2, self.dilation
        )
        result = torch.convolution(
            input if batch else input.unsqueeze(0),
            self.weight,
            self.bias if batch else None,
            self.stride,
            self.padding,
            self.dilation,
            True,
            more,
            self.groups,
        )
        if batch:
            return result
        layer = (self.scale, self.shift, self.bias_before)
        return undone(result.squeeze(0), layer, 0, input.dim())


class FoldedConvTranspose1d(FoldedConvTranspose, nn.ConvTranspose1d):
    """Given (N, C, L); of (C, L) the batch norm scaled L."""


class FoldedConvTranspose2d(FoldedConvTranspose, nn.ConvTranspose2d):
    """Given (N, C, H, W); of (C, H, W) the batch norm scaled H."""


class FoldedConvTranspose3d(FoldedConvTranspose, nn.ConvTranspose3d):
    """Given (N, C, D, H, W); of (C, D, H, W) the batch norm scaled D."""


class FrozenConv2d(nn.Conv2d):
    """With a FrozenBatchNorm2d folded in, which made one image alone a batch of one."""

    def forward(self, input: Tensor) -> Tensor:
        result: Tensor = self._conv_forward(input, self.weight, self.bias)
        return result if input.dim() == 4 else result.unsqueeze(0)


FOLDED: tuple[type[nn.Module], ...] = (
    FoldedConv1d,
    FoldedConv2d,
    FoldedConv3d,
    FoldedConvTranspose1d,
    FoldedConvTranspose2d,
    FoldedConvTranspose3d,
    FoldedLinear,
    FrozenConv2d,
)
"""All of them."""
