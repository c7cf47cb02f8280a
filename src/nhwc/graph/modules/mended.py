"""Operators that lose channels last, written so that they keep it.

Each looks at the strides of what it is given: in any other format it does what torch does. The
NHWC way is the same arithmetic on the permuted tensor, which is dense there.

A new one goes into `graph.layers.LAYERS`, so that files may hold it; one that may return a view of
its input also into `operators.kinds`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .leaf import Leaf


def channel_is_densest(x: Tensor) -> bool:
    """Whether `x` lies in memory as channels last, or is a slice of the channels of such a tensor.

    >>> x = torch.empty(2, 8, 4, 4).contiguous(memory_format=torch.channels_last)
    >>> channel_is_densest(x[:, :4]), channel_is_densest(x.contiguous())
    (True, False)
    """
    return x.dim() >= 4 and x.size(1) > 1 and x.stride(1) == 1


def fits_both(x: Tensor) -> bool:
    """Whether `x` has one channel or one pixel, so that it lies in memory as either format has it.

    >>> fits_both(torch.empty(2, 8, 1, 1)), fits_both(torch.empty(2, 8, 1, 2))
    (True, False)
    """
    return x.dim() >= 4 and (x.size(1) == 1 or has_one_pixel(x))


def has_one_pixel(x: Tensor) -> bool:
    """Whether there is no more than one number in each channel of each image, or no image."""
    return x.numel() == x.size(0) * x.size(1)


class Cat(Leaf):
    """`torch.cat` along the channels. torch's takes the format of its first input, and that of a
    slice of channels is none. Here the format in which more of the channels lie decides: each input
    is read once and written once in either. Counted from the end, `dim` may be another in volumes.
    """

    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, tensors: list[Tensor]) -> Tensor:
        last, others = 0, 0
        for tensor in tensors:
            rank = tensor.dim()
            # torch leaves out an empty tensor of one dimension, wherever it stands.
            if rank < 4 or rank != tensors[0].dim() or self.dim % rank != 1:
                return torch.cat(tensors, self.dim)
            if channel_is_densest(tensor):
                last += tensor.size(1)
            elif not fits_both(tensor):
                others += tensor.size(1)
        if last == 0 or others > last:
            return torch.cat(tensors, self.dim)
        return torch.cat([tensor.movedim(1, -1) for tensor in tensors], -1).movedim(-1, 1)


class ChannelShuffle(Leaf):
    """Channels g*i + j become j*groups + i."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape[:4]
        groups = self.groups
        if x.dim() == 4 and channel_is_densest(x):
            last = x.permute(0, 2, 3, 1).reshape(n, h, w, groups, c // groups)
            return last.transpose(3, 4).reshape(n, h, w, c).permute(0, 3, 1, 2)
        grouped = x.reshape(n, groups, c // groups, h, w)
        return grouped.transpose(1, 2).reshape(n, c, h, w)


class Interleave(Leaf):
    """The channels of several tensors in turns: `cat` and `channel_shuffle` in one go."""

    def forward(self, tensors: list[Tensor]) -> Tensor:
        first = tensors[0]
        alike = True
        for tensor in tensors:
            alike = alike and tensor.shape == first.shape and channel_is_densest(tensor)
        if alike and first.dim() == 4:
            last = [tensor.permute(0, 2, 3, 1) for tensor in tensors]
            return torch.stack(last, 4).flatten(3).permute(0, 3, 1, 2)
        joined = torch.cat(tensors, 1)
        n, c, h, w = joined.shape[:4]
        grouped = joined.reshape(n, len(tensors), c // len(tensors), h, w)
        return grouped.transpose(1, 2).reshape(n, c, h, w)


class CircularPad(Leaf):
    """`F.pad(mode="circular")` of images and volumes; torch's allocates its result in NCHW."""

    def __init__(self, padding: tuple[int, ...]) -> None:
        super().__init__()
        self.padding = padding

    def forward(self, x: Tensor) -> Tensor:
        given = list(self.padding)
        if x.dim() * 2 != len(given) + 4 or not channel_is_densest(x):
            return F.pad(x, given, mode="circular")
        if x.dim() == 4:
            # As a volume of depth H, height W and width C the data is contiguous already.
            volume = x.permute(0, 2, 3, 1).unsqueeze(1)
            ends = [0, 0, given[0], given[1], given[2], given[3]]
            return F.pad(volume, ends, mode="circular").squeeze(1).permute(0, 3, 1, 2)
        # A row of W pixels is W*C numbers in a row: a pixel more of it is C numbers more.
        c = x.size(1)
        given[0], given[1] = given[0] * c, given[1] * c
        rows = x.permute(0, 2, 3, 4, 1).flatten(3).unsqueeze(1)
        padded = F.pad(rows, given, mode="circular").squeeze(1)
        volumes: Tensor = padded.unflatten(3, (-1, c))
        return volumes.permute(0, 4, 1, 2, 3)


class InstanceNorm(Leaf):
    """An instance norm without running statistics; torch's copies to NCHW and stays there."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm
        self.eps: float = norm.eps  # type: ignore[assignment]
        # What has so many dimensions is one image, whose channels come first.
        self.single: int = norm._get_no_batch_dim()  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        # Half precision is left to torch, which keeps the statistics in float32.
        wide = x.dtype == torch.float32 or x.dtype == torch.float64
        plain = not wide or x.dim() == self.single
        if plain or not channel_is_densest(x) or has_one_pixel(x):
            return self.norm(x)  # type: ignore[no-any-return]
        var, mean = torch.var_mean(x, list(range(2, x.dim())), correction=0, keepdim=True)
        scale = torch.rsqrt(var + self.eps)
        weight, bias = self.norm.weight, self.norm.bias
        if weight is not None:
            scale = scale * weight.reshape(scale[:1].shape)  # type: ignore[operator]
        shift = -mean * scale
        if bias is not None:
            shift = shift + bias.reshape(scale[:1].shape)  # type: ignore[operator]
        return torch.addcmul(shift, x, scale)


class GroupNorm(Leaf):
    """A group norm that is as exact in channels last as torch's is in NCHW.

    torch's takes the squares' mean less the mean's square there: where the mean is thirty times the
    deviation, three digits are left.
    """

    def __init__(self, norm: nn.GroupNorm) -> None:
        super().__init__()
        self.norm = norm
        self.groups = norm.num_groups
        self.eps = norm.eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.dtype == torch.float32 or x.dtype == torch.float64
        if not wide or not channel_is_densest(x) or has_one_pixel(x):
            return self.norm(x)  # type: ignore[no-any-return]
        sizes = [self.groups, x.size(1) // self.groups]
        apart = x.unflatten(1, sizes)
        var, mean = torch.var_mean(apart, list(range(2, apart.dim())), correction=0)
        scale = torch.rsqrt(var + self.eps)
        shift = -mean * scale
        # With three dimensions these are no images, whose format a reader could mistake.
        scale, shift = (one[:, :, None].expand(-1, -1, sizes[1]) for one in (scale, shift))
        weight, bias = self.norm.weight, self.norm.bias
        if weight is not None:
            scale, shift = scale * weight.view(sizes), shift * weight.view(sizes)
        if bias is not None:
            shift = shift + bias.view(sizes)
        each = [x.size(0), x.size(1)] + [1] * (x.dim() - 2)
        return torch.addcmul(shift.reshape(each), x, scale.reshape(each))


class ChannelNorm(Leaf, nn.LayerNorm):
    """Layer norm over the channels of each pixel of N, C, H, W."""

    def forward(self, input: Tensor) -> Tensor:
        last = input.permute(0, 2, 3, 1)
        normed = F.layer_norm(last, self.normalized_shape, self.weight, self.bias, self.eps)
        return normed.permute(0, 3, 1, 2)


class SpelledNorm(Leaf):
    """Layer norm over one dimension, as models spell it, with weights of the shapes that they have.

    How it is spelled decides in which type autocast computes: the variance is that of `var`, or of
    squares by `pow` or by `mul`; what is centred is divided by a root, or multiplied by an inverse.
    """

    def __init__(
        self,
        dim: int,
        eps: float,
        variance: str = "pow",
        inverse: bool = False,
        weighed: Sequence[int] | None = None,
        shifted: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.eps = eps
        self.variance = variance
        self.inverse = inverse
        self.weighed = None if weighed is None else list(weighed)
        self.shifted = None if shifted is None else list(shifted)
        for name, shape in (("weight", self.weighed), ("bias", self.shifted)):
            held = None if shape is None else nn.Parameter(torch.zeros(shape))
            self.register_parameter(name, held)

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(self.dim, keepdim=True)
        if self.variance == "var":
            variance = x.var(self.dim, unbiased=False, keepdim=True)
        else:
            squares = centred * centred if self.variance == "mul" else centred.pow(2)
            variance = squares.mean(self.dim, keepdim=True)
        total = variance + self.eps
        y = centred * torch.rsqrt(total) if self.inverse else centred / torch.sqrt(total)
        weight, bias = self.weight, self.bias
        if weight is not None:
            y = y * weight  # type: ignore[operator]
        if bias is not None:
            y = y + bias  # type: ignore[operator]
        return y


class GlobalResponse(Leaf):
    """Global response norm: each channel by its size in the image beside the mean size of all.

    Of N, C, H, W, or of N, H, W, C where channels are `last`. `dims` are those of the pixels and
    that of the channels, as they were spelled: counted from the end, they are others in volumes.
    Weights that are `batched` make a batch of a single image.
    """

    def __init__(
        self,
        channels: int,
        eps: float = 1e-6,
        last: bool = False,
        dims: Sequence[int] | None = None,
        batched: bool = False,
    ) -> None:
        super().__init__()
        self.channels = channels
        self.eps = eps
        self.last = last
        self.batched = batched
        self.dims = list(dims or ((1, 2, 3) if last else (2, 3, 1)))
        self.weight = nn.Parameter(torch.zeros(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        size = torch.linalg.vector_norm(x, 2, self.dims[:2], True)
        size = size / (size.mean(self.dims[2], True) + self.eps)
        each = [self.channels] if self.last else [self.channels, 1, 1]
        if self.batched:
            each = [1] * (4 - len(each)) + each
        weight, bias = self.weight.reshape(each), self.bias.reshape(each)
        return x + torch.addcmul(bias, weight, x * size)


class Attention(Leaf):
    """Attention of tokens whose rows hold queries, keys and values of all heads, side by side.

    As one layer it needs no copy of the heads: our kernel reads them where they lie. If nobody
    reads what others ask, it is for the `first` tokens alone.
    """

    def __init__(self, heads: int, batch_first: bool = True, first: int | None = None) -> None:
        super().__init__()
        self.heads = heads
        self.batch_first = batch_first
        self.first = first

    def forward(self, rows: Tensor) -> Tensor:
        apart = rows.unflatten(-1, [3, self.heads, rows.size(-1) // (3 * self.heads)])
        # The sequence's place in [batch, sequence, 3, heads, channels], and where it returns to.
        query, key, value = apart.movedim(-4 if self.batch_first else 0, -2).unbind(-4)
        mixed = F.scaled_dot_product_attention(query[..., : self.first, :], key, value)
        return mixed.movedim(-2, -3 if self.batch_first else 0).flatten(-2)


class SpelledAttention(Leaf):
    """Attention that a model spelled as products and a softmax, whose keys are transposed.

    Unlike torch's own, a query whose scores are all minus infinity gives NaN. Windows of an image
    may have masks of their own, which are added to scores of this `shape`: images, windows of each,
    heads, queries, keys.
    """

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale

    def forward(
        self,
        query: Tensor,
        keys: Tensor,
        value: Tensor,
        bias: Tensor | None = None,
        masks: Tensor | None = None,
        shape: list[int] | None = None,
    ) -> Tensor:
        scores = query @ keys
        if self.scale != 1.0:
            scores = scores * self.scale
        if bias is not None:
            scores = scores + bias
        if masks is not None and shape is not None:
            scores = (scores.view(shape) + masks).flatten(0, 1)
        return scores.softmax(-1) @ value


class Pixel(Leaf):
    """`F.interpolate` of images of one pixel, as a view in which every pixel is that one.

    torch cannot tell the format of such an image, and takes it for NCHW.
    """

    def forward(self, x: Tensor, size: list[int]) -> Tensor:
        return x.expand([x.size(0), x.size(1), size[0], size[1]])


class FromTokens(Leaf):
    """`reshape` of tokens to images. One image of channels last gets the strides that say so: torch
    reads that of the batch, which is that of the tokens otherwise, and takes it for NCHW."""

    def forward(self, x: Tensor, shape: list[int]) -> Tensor:
        images = x.reshape(shape)
        if images.dim() != 4 or images.size(0) != 1 or not channel_is_densest(images):
            return images
        return images[0].permute(1, 2, 0).unsqueeze(0).permute(0, 3, 1, 2)


class GridSample(Leaf):
    """Bilinear `F.grid_sample` of images as a sum of four weighted rows of NHWC per pixel."""

    def __init__(self, padding_mode: str, align_corners: bool) -> None:
        super().__init__()
        self.padding_mode = padding_mode
        self.align_corners = align_corners

    def forward(self, x: Tensor, grid: Tensor) -> Tensor:
        if x.dim() != 4 or not channel_is_densest(x) or x.dtype != grid.dtype:
            return F.grid_sample(x, grid, "bilinear", self.padding_mode, self.align_corners)
        n, c, h, w = x.shape
        column, row = self._place(grid[..., 0], w), self._place(grid[..., 1], h)
        left, top = column.floor(), row.floor()
        right_share, bottom_share = column - left, row - top
        index, share = [], []
        start = torch.arange(n, device=x.device).reshape(n, 1, 1) * (h * w)
        for dy in (0, 1):
            for dx in (0, 1):
                at_x, at_y = left.long() + dx, top.long() + dy
                inside = (at_x >= 0) & (at_x < w) & (at_y >= 0) & (at_y < h)
                part_x = right_share if dx == 1 else 1 - right_share
                part_y = bottom_share if dy == 1 else 1 - bottom_share
                place = start + at_y.clamp(0, h - 1) * w + at_x.clamp(0, w - 1)
                index.append(torch.where(inside, place, n * h * w))
                share.append(part_x * part_y * inside)
        # Outside is a row of zeros: an infinite pixel times a share of nothing would be NaN.
        rows = F.pad(x.permute(0, 2, 3, 1).reshape(n * h * w, c), (0, 0, 0, 1))
        indices, shares = torch.stack(index, -1).reshape(-1, 4), torch.stack(share, -1)
        shares = shares.reshape(-1, 4).to(x.dtype)
        found = F.embedding_bag(indices, rows, mode="sum", per_sample_weights=shares)
        return found.reshape(n, grid.size(1), grid.size(2), c).permute(0, 3, 1, 2)

    def _place(self, coordinate: Tensor, size: int) -> Tensor:
        if self.align_corners:
            place = (coordinate + 1) / 2 * (size - 1)
        else:
            place = ((coordinate + 1) * size - 1) / 2
        if self.padding_mode == "border":
            held = torch.nan_to_num(place).clamp(0, size - 1)
            # On the border torch's gradient of the place is 0, where that of clamp is 1.
            return torch.where((place > 0) & (place < size - 1), place, held.detach())
        # An infinite place is none: what is taken from itself leaves NaN.
        return place.clamp(-2, size + 1) + (place - place)


class WeightedSamples(Leaf):
    """The sum of bilinear samples of several images, each times a number: deformable attention.

    Images are N, C, H, W, places N, Q, P, 2 for each, and `weights` N, 1, Q and all P together; the
    result is N, C, Q.
    """

    def __init__(self, padding_mode: str, align_corners: bool) -> None:
        super().__init__()
        self.padding_mode = padding_mode
        self.align_corners = align_corners

    def forward(self, images: list[Tensor], grids: list[Tensor], weights: Tensor) -> Tensor:
        found = [
            F.grid_sample(x, grid, "bilinear", self.padding_mode, self.align_corners)
            for x, grid in zip(images, grids, strict=True)
        ]
        return (torch.cat(found, -1) * weights).sum(-1)


class Recurrent(Leaf):
    """The sequence of states that an LSTM or a GRU makes; nobody reads those that it ends in."""

    def __init__(self, recurrent: nn.RNNBase) -> None:
        super().__init__()
        self.recurrent = recurrent

    def forward(self, x: Tensor) -> Tensor:
        return self.recurrent(x)[0]  # type: ignore[no-any-return]
