"""Layers with what came after them folded in, that give what both gave for any input.

A batch norm scales dimension 1 of its input. In a batch that is the channels; in a single signal
(C, L) it is the positions, which the folded weights do not scale. So these layers use the folded
weights for batches, and for any other input undo the fold and then apply the batch norm.

Under autocast a layer returns half precision, and a sum or product with a float32 tensor is float32
again. A layer into which one of these is folded returns that type, too.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .leaf import Leaf


def undone(
    product: Tensor, layer: tuple[Tensor, Tensor, Tensor], channels: int, dims: int
) -> Tensor:
    """Return the result of layer and norm, given the folded weights' product without the bias.

    `layer` holds the scale, the shift and the bias before the fold; `channels` is the dimension of
    the channels. TorchScript assumes that `product` has a batch, so `dims` comes from the input.
    """
    scale, shift, bias = layer
    own = [1] * dims
    own[channels] = -1
    along = [1] * dims
    along[1] = -1
    plain = product / scale.view(own) + bias.view(own)
    return plain * scale.view(along) + shift.view(along)


class Folded(Leaf):
    """A layer that keeps, beside the folded weights, the tensors needed to undo the fold."""

    scale: Tensor
    shift: Tensor
    bias_before: Tensor

    def reset_parameters(self: Any) -> None:
        """Register the buffers: the constructor of each layer calls this method at its end."""
        super().reset_parameters()  # type: ignore[misc]
        outputs = self.out_features if isinstance(self, nn.Linear) else self.out_channels
        for name in ("scale", "shift", "bias_before"):
            self.register_buffer(name, torch.zeros(outputs))


class FoldedLinear(Folded, nn.Linear):
    """The fold serves (N, C); in (N, L, C) the batch norm scales L, not C."""

    def forward(self, input: Tensor) -> Tensor:
        if input.dim() == 2:
            return F.linear(input, self.weight, self.bias)
        product, dims = F.linear(input, self.weight), input.dim()
        return undone(product, (self.scale, self.shift, self.bias_before), dims - 1, dims)


class FoldedConv(Folded):
    """The `forward` that the convolutions share."""

    def forward(self: Any, input: Tensor) -> Tensor:
        batch = input.dim() == self.weight.dim()
        result: Tensor = self._conv_forward(input, self.weight, self.bias if batch else None)
        if batch:
            return result
        return undone(result, (self.scale, self.shift, self.bias_before), 0, input.dim())


class FoldedConv1d(FoldedConv, nn.Conv1d):
    """The fold serves (N, C, L); in (C, L) the batch norm scales L."""


class FoldedConv2d(FoldedConv, nn.Conv2d):
    """The fold serves (N, C, H, W); in (C, H, W) the batch norm scales H."""


class FoldedConv3d(FoldedConv, nn.Conv3d):
    """The fold serves (N, C, D, H, W); in (C, D, H, W) the batch norm scales D."""


class Transposing(Leaf):
    """What the transposed convolutions share."""

    def convolved(self: Any, image: Tensor, bias: Tensor | None, more: list[int]) -> Tensor:
        """The convolution of `image`, so many rows and columns `more` than it must have."""
        rest = (self.stride, self.padding, more, self.groups, self.dilation)
        # Autocast knows these by name, and not what they call.
        if self.weight.dim() == 3:
            return torch.conv_transpose1d(image, self.weight, bias, *rest)
        if self.weight.dim() == 4:
            return torch.conv_transpose2d(image, self.weight, bias, *rest)
        return torch.conv_transpose3d(image, self.weight, bias, *rest)


class FoldedConvTranspose(Transposing, Folded):
    """The `forward` that the transposed convolutions share."""

    def forward(self: Any, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        dims = self.weight.dim()
        batch = input.dim() == dims
        more = self._output_padding(
            input, output_size, self.stride, self.padding, self.kernel_size, dims - 2, self.dilation
        )
        image = input if batch else input.unsqueeze(0)
        result: Tensor = self.convolved(image, self.bias if batch else None, more)
        if batch:
            return result
        layer = (self.scale, self.shift, self.bias_before)
        return undone(result.squeeze(0), layer, 0, input.dim())


class FoldedConvTranspose1d(FoldedConvTranspose, nn.ConvTranspose1d):
    """The fold serves (N, C, L); in (C, L) the batch norm scales L."""


class FoldedConvTranspose2d(FoldedConvTranspose, nn.ConvTranspose2d):
    """The fold serves (N, C, H, W); in (C, H, W) the batch norm scales H."""


class FoldedConvTranspose3d(FoldedConvTranspose, nn.ConvTranspose3d):
    """The fold serves (N, C, D, H, W); in (C, D, H, W) the batch norm scales D."""


class FrozenConv2d(Leaf, nn.Conv2d):
    """A convolution with a FrozenBatchNorm2d folded in: it returns one image as a batch of one."""

    def forward(self, input: Tensor) -> Tensor:
        result: Tensor = self._conv_forward(input, self.weight, self.bias)
        return result if input.dim() == 4 else result.unsqueeze(0)


def promoted(result: Tensor, like: Tensor) -> Tensor:
    """`result` in the type that its sum with `like` has."""
    return result.to(torch.promote_types(result.dtype, like.dtype))


class PromotedFrozenConv2d(Leaf, nn.Conv2d):
    """A FrozenConv2d whose result has the type of the norm, if that is wider."""

    def forward(self, input: Tensor) -> Tensor:
        result = promoted(self._conv_forward(input, self.weight, self.bias), self.weight)
        return result if input.dim() == 4 else result.unsqueeze(0)


class SummedConv2d(Leaf, nn.Conv2d):
    """A convolution into which its input was summed: the result has that type, if it is wider."""

    def forward(self, input: Tensor) -> Tensor:
        return promoted(self._conv_forward(input, self.weight, self.bias), input)


class PromotedLinear(Leaf, nn.Linear):
    """A linear layer with a tensor folded in: the result has its type, if that is wider."""

    def forward(self, input: Tensor) -> Tensor:
        return promoted(F.linear(input, self.weight, self.bias), self.weight)


class PromotedConv(Leaf):
    """The `forward` of convolutions whose result has the type of what was folded in."""

    def forward(self: Any, input: Tensor) -> Tensor:
        return promoted(self._conv_forward(input, self.weight, self.bias), self.weight)


class PromotedConv1d(PromotedConv, nn.Conv1d):
    """For signals."""


class PromotedConv2d(PromotedConv, nn.Conv2d):
    """For images."""


class PromotedConv3d(PromotedConv, nn.Conv3d):
    """For volumes."""


class PromotedConvTranspose(Transposing):
    """The `forward` of transposed convolutions whose result has the type of what was folded in."""

    def forward(self: Any, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        more = self._output_padding(
            input,
            output_size,
            self.stride,
            self.padding,
            self.kernel_size,
            self.weight.dim() - 2,
            self.dilation,
        )
        return promoted(self.convolved(input, self.bias, more), self.weight)


class PromotedConvTranspose1d(PromotedConvTranspose, nn.ConvTranspose1d):
    """For signals."""


class PromotedConvTranspose2d(PromotedConvTranspose, nn.ConvTranspose2d):
    """For images."""


class PromotedConvTranspose3d(PromotedConvTranspose, nn.ConvTranspose3d):
    """For volumes."""


PROMOTED: tuple[type[nn.Module], ...] = (
    PromotedConv1d,
    PromotedConv2d,
    PromotedConv3d,
    PromotedConvTranspose1d,
    PromotedConvTranspose2d,
    PromotedConvTranspose3d,
    PromotedFrozenConv2d,
    PromotedLinear,
)
"""Those whose result is at least of the type of their weights."""

FOLDED: tuple[type[nn.Module], ...] = (
    FoldedConv1d,
    FoldedConv2d,
    FoldedConv3d,
    FoldedConvTranspose1d,
    FoldedConvTranspose2d,
    FoldedConvTranspose3d,
    FoldedLinear,
    FrozenConv2d,
    PromotedFrozenConv2d,
)
"""Those that give another result for an input without a batch than torch's layer would."""
