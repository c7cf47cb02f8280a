"""What a saved graph may call, by name. A file names operators from these tables, or it is refused.

The tables hold only what computes tensors from tensors: nothing that reads files, imports,
evaluates text or reaches into Python's own objects. A name this torch lacks is simply not known.
"""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..graph import layers
from ..graph.layers import LAYERS

_TORCH = """
    abs add addcmul addmm amax amin arange argmax argmin as_tensor avg_pool1d batch_norm baddbmm
    bmm broadcast_to cat channel_shuffle chunk clamp clip clone concat conv1d conv2d conv3d
    conv_transpose1d conv_transpose2d conv_transpose3d cos cumsum detach div dropout einsum
    empty empty_like eq erf exp eye flatten flip floor full full_like gather ge gelu gt hstack
    index_put index_select instance_norm group_norm is_floating_point layer_norm le linspace log
    logical_and logical_not logical_or lt masked_fill matmul max maximum mean meshgrid min
    minimum movedim mul multiply narrow ne neg nan_to_num norm numel ones ones_like permute
    pixel_shuffle pow prelu prod reciprocal relu relu_ repeat_interleave reshape roll rsqrt rsub
    complex conj imag polar real view_as_complex view_as_real
    scatter select select_scatter selu sigmoid sigmoid_ sign silu sin slice_scatter softmax
    split sqrt square squeeze stack std sub sum swapaxes t tan tanh tanh_ tensor tensor_split
    tile topk transpose tril triu true_divide unbind unflatten unfold_copy unsqueeze var
    var_mean vstack where zeros zeros_like _assert
"""

_FFT = """
    fft fft2 fftfreq fftn fftshift ifft ifft2 ifftn ifftshift irfft irfft2 irfftn rfft rfft2
    rfftfreq rfftn
"""

_FUNCTIONAL = """
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d
    adaptive_max_pool2d adaptive_max_pool3d affine_grid avg_pool1d avg_pool2d avg_pool3d
    batch_norm celu conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
    cosine_similarity dropout dropout2d elu embedding fold gelu glu grid_sample group_norm
    hardshrink hardsigmoid hardswish hardtanh instance_norm interpolate layer_norm leaky_relu
    linear local_response_norm log_softmax logsigmoid lp_pool2d max_pool1d max_pool2d
    max_pool3d mish multi_head_attention_forward normalize one_hot pad pixel_shuffle
    pixel_unshuffle prelu relu relu6 relu_ rms_norm scaled_dot_product_attention selu sigmoid
    silu softmax softplus softsign tanh threshold unfold upsample
"""

_METHODS = """
    abs add add_ amax amin argmax argmin bmm bool broadcast_to chunk clamp clamp_ clone conj
    contiguous cos cumsum detach dim div div_ double eq exp expand expand_as flatten flip
    float floor floor_divide gather ge gt half index_select int is_contiguous
    is_floating_point item le log long logical_and logical_not lt masked_fill masked_fill_
    matmul max mean min movedim mul mul_ narrow ne neg new_full new_ones new_zeros norm numel
    permute pow prod reciprocal relu relu_ repeat repeat_interleave reshape reshape_as roll
    round rsqrt select sigmoid sigmoid_ sign sin size softmax split sqrt square squeeze std
    stride sub sub_ sum swapaxes t tanh tanh_ tile to topk transpose type_as unbind unflatten unfold
    unsqueeze values var view view_as where
"""

_OPERATORS = """
    abs add and_ contains eq floordiv ge getitem gt iadd imul index invert isub itruediv le lt
    matmul mod mul ne neg not_ or_ pos pow sub truediv xor setitem
"""

_BUILTINS = "abs bool float getattr int len max min pow round slice sum tuple"

_MATH = "ceil floor log2 prod sqrt trunc"

ATTRIBUTES = frozenset(("device", "dtype", "imag", "is_cuda", "mT", "ndim", "real", "shape", "T"))
"""What `getattr` may be asked for."""

METHODS = frozenset(_METHODS.split())
"""The tensor methods a graph may call."""

_MODULES = """
    AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveMaxPool1d AdaptiveMaxPool2d
    AdaptiveMaxPool3d AlphaDropout AvgPool1d AvgPool2d AvgPool3d BatchNorm1d BatchNorm2d
    BatchNorm3d CELU ChannelShuffle ConstantPad1d ConstantPad2d Conv1d Conv2d Conv3d
    ConvTranspose1d ConvTranspose2d ConvTranspose3d Dropout Dropout1d Dropout2d Dropout3d ELU
    Embedding Flatten Fold GELU GLU GRU GroupNorm Hardshrink Hardsigmoid Hardswish Hardtanh
    Identity InstanceNorm1d InstanceNorm2d InstanceNorm3d LSTM LayerNorm LeakyReLU Linear
    LocalResponseNorm LogSigmoid LogSoftmax MaxPool1d MaxPool2d MaxPool3d Mish
    MultiheadAttention PReLU PixelShuffle PixelUnshuffle RMSNorm RNN RReLU ReLU ReLU6
    ReflectionPad1d ReflectionPad2d ReplicationPad1d ReplicationPad2d SELU SiLU Sigmoid
    Softmax Softmax2d Softplus Softshrink Softsign Tanh Tanhshrink Threshold Unflatten Unfold
    Upsample UpsamplingBilinear2d UpsamplingNearest2d ZeroPad1d ZeroPad2d
"""


@cache
def functions() -> dict[str, Callable[..., Any]]:
    """Every function a graph may call, by the name it has in a file."""
    rooms = (
        ("torch", torch, _TORCH),
        ("torch.fft", torch.fft, _FFT),
        ("torch.nn.functional", F, _FUNCTIONAL),
        ("operator", operator, _OPERATORS),
        ("builtins", builtins, _BUILTINS),
        ("math", math, _MATH),
        ("nhwc", layers, "as_elements assert_none assert_sizes"),
    )
    return {
        f"{room}.{name}": getattr(module, name)
        for room, module, names in rooms
        for name in names.split()
        if hasattr(module, name)
    }


@cache
def function_names() -> dict[Any, str]:
    """The reverse; a function with two names (`torch.concat`) has either."""
    return {function: name for name, function in functions().items()}


@cache
def modules() -> dict[str, type[nn.Module]]:
    """Every module class a graph may hold, by name."""
    known = {f"nn.{name}": getattr(nn, name) for name in _MODULES.split() if hasattr(nn, name)}
    return known | {f"nhwc.{layer.__name__}": layer for layer in LAYERS}


@cache
def module_names() -> dict[type, str]:
    return {kind: name for name, kind in modules().items()}


def enumerations() -> dict[str, dict[str, Any]]:
    """Torch's constants that stand in graphs as arguments."""
    kinds = {"dtype": torch.dtype, "memory_format": torch.memory_format, "layout": torch.layout}
    return {
        kind: {str(value): value for value in vars(torch).values() if isinstance(value, of)}
        for kind, of in kinds.items()
    }
