"""The memory formats of 4-D and 5-D tensors: name them, ask for them, convert modules to them."""

from __future__ import annotations

from enum import Enum
from typing import TypeVar

import torch
from torch import Tensor, fx, nn
from torch._C._functorch import peek_interpreter_stack
from torch.export import ExportedProgram

from ..errors import InputError, of_kind
from ..models.trees import has_strides
from .optimizers import optimizers_of, restride_state_
from .weights import check_memory, convolution_weights, packed_convolutions

Model = TypeVar("Model", nn.Module, ExportedProgram)


class Format(Enum):
    """How a tensor of logical shape N, C, (D,) H, W lies in memory.

    >>> image = torch.rand(2, 3, 8, 8)
    >>> format_of(image), format_of(image.to(memory_format=torch.channels_last))
    (<Format.CONTIGUOUS: 'contiguous'>, <Format.CHANNELS_LAST: 'channels_last'>)

    A tensor of one channel, or of one pixel, is both at once: `AMBIGUOUS`. A slice of the channels
    is neither: `OTHER`.

    >>> print(format_of(torch.rand(2, 1, 8, 8)), format_of(image[:, :2]))
    ambiguous other
    """

    CONTIGUOUS = "contiguous"
    CHANNELS_LAST = "channels_last"
    CHANNELS_LAST_3D = "channels_last_3d"
    AMBIGUOUS = "ambiguous"
    OTHER = "other"

    def __str__(self) -> str:
        return self.value

    @property
    def is_last(self) -> bool:
        """Whether the channels are densest, in two dimensions or in three."""
        return self in (Format.CHANNELS_LAST, Format.CHANNELS_LAST_3D)


CHANNELS_LAST_OF = {4: Format.CHANNELS_LAST, 5: Format.CHANNELS_LAST_3D}
"""The channels-last format, by a tensor's number of dimensions."""

MEMORY_FORMATS = {
    Format.CONTIGUOUS: torch.contiguous_format,
    Format.CHANNELS_LAST: torch.channels_last,
    Format.CHANNELS_LAST_3D: torch.channels_last_3d,
}
"""The formats that can be asked for, as torch has them."""


def format_of(tensor: Tensor, hint: Format | None = None) -> Format:
    """Return the memory format that the strides of `tensor` show.

    >>> x = torch.empty(2, 3, 8, 8)
    >>> format_of(x), format_of(x.to(memory_format=torch.channels_last))
    (<Format.CONTIGUOUS: 'contiguous'>, <Format.CHANNELS_LAST: 'channels_last'>)

    The strides of N1HW, NC11 and empty tensors are true of both formats: `AMBIGUOUS`. A caller who
    knows which one is meant passes it as `hint`, and gets it back wherever the strides admit it.

    >>> format_of(torch.empty(2, 1, 8, 8), hint=Format.CHANNELS_LAST)
    <Format.CHANNELS_LAST: 'channels_last'>
    """
    _check_tensor(tensor)
    if hint is not None:
        _check_target(hint)
    if not has_strides(tensor):
        return Format.OTHER
    plain = tensor.is_contiguous()
    last = CHANNELS_LAST_OF.get(tensor.ndim)
    if last is None:
        return Format.CONTIGUOUS if plain else Format.OTHER
    if tensor.numel() and not _lies_last(tensor):
        return Format.CONTIGUOUS if plain else Format.OTHER
    if not plain:
        return last
    return hint if hint in (Format.CONTIGUOUS, last) else Format.AMBIGUOUS


def _lies_last(tensor: Tensor) -> bool:
    """Whether the channels are densest; torch itself does not say so of a tensor inside of vmap."""
    step = 1
    for dim in (1, *range(tensor.ndim - 1, 1, -1), 0):
        size = tensor.shape[dim]
        if size != 1 and tensor.stride(dim) != step:
            return False
        step *= size
    return True


def strides_of(shape: torch.Size | tuple[int, ...], format: Format) -> tuple[int, ...]:
    """Return the strides that say `format` for a dense tensor of this shape.

    >>> strides_of((10, 3, 16, 16), Format.CHANNELS_LAST)
    (768, 1, 48, 3)
    """
    dims = list(range(len(shape)))
    if format is not Format.CONTIGUOUS:
        dims.append(dims.pop(1))
    strides, step = [0] * len(shape), 1
    for dim in reversed(dims):
        strides[dim] = step
        # For an empty tensor torch expects strides of at least 1 if contiguous, 0 if channels last.
        # Sizes that torch.jit traces are tensors, which `*=` would change in place.
        step = step * (max(shape[dim], 1) if format is Format.CONTIGUOUS else shape[dim])
    return tuple(strides)


def to_format(tensor: Tensor, format: Format) -> Tensor:
    """Return `tensor` with the strides of `format`, copying data only where data must move.

    Unlike `Tensor.contiguous`, this also rewrites the strides of size-1 dimensions, so that an
    ambiguous tensor (N1HW, NC11) shows its format to the next reader of its strides.

    >>> x = torch.empty(2, 1, 4, 4)
    >>> to_format(x, Format.CHANNELS_LAST).stride(), x.contiguous().stride()
    ((16, 1, 4, 1), (16, 16, 4, 1))
    >>> to_format(x, Format.CHANNELS_LAST).data_ptr() == x.data_ptr()
    True
    """
    if isinstance(tensor, fx.Proxy):
        # A graph knows no shapes. `to` restrides what `contiguous` leaves, but for C==H==W==1.
        _check_target(format)
        return tensor.to(memory_format=MEMORY_FORMATS[format])
    _check_format(tensor, format)
    dense = _dense(tensor, format)
    strides = strides_of(dense.shape, format)
    # Where a graph is made, tensors have no memory, and torch reckons strides for sizes of 1 that
    # the views of a run do not have.
    reckoned = 1 in dense.shape and torch.compiler.is_compiling()
    if dense.stride() == strides and not reckoned:
        return dense
    return dense.as_strided(dense.shape, strides)


def _dense(tensor: Tensor, format: Format) -> Tensor:
    """`tensor` without gaps in the order of `format`; sizes of 1 may have any strides."""
    if format is Format.CONTIGUOUS or peek_interpreter_stack() is None:
        return tensor.contiguous(memory_format=MEMORY_FORMATS[format])
    # Inside of vmap torch knows no channels last, but any order of dimensions. Dynamo can answer
    # whether anything is transformed, not whether this tensor is.
    return tensor.movedim(1, -1).contiguous().movedim(-1, 1)


def _check_format(tensor: Tensor, format: Format) -> None:
    _check_tensor(tensor)
    _check_target(format)
    if not has_strides(tensor):
        kind = "a nested tensor" if tensor.is_nested else f"a tensor of layout {tensor.layout}"
        way = ".to_padded_tensor(0)" if tensor.is_nested else ".to_dense()"
        raise InputError(f"{kind} has no memory format. Call {way} first.")
    if format is not Format.CONTIGUOUS and CHANNELS_LAST_OF.get(tensor.ndim) is not format:
        needed = 4 if format is Format.CHANNELS_LAST else 5
        raise InputError(
            f"a tensor of shape {tuple(tensor.shape)} has {tensor.ndim} dimensions; "
            f"{format} needs {needed}. Add the missing dimension, or ask for another format."
        )


def _check_tensor(tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise InputError(
            f"{of_kind(tensor)} has no memory format. Make a tensor of it: torch.as_tensor(x)."
        )


def _check_target(format: object) -> None:
    if format not in MEMORY_FORMATS:
        what = (
            "it describes strides that are found, none to ask for"
            if isinstance(format, Format)
            else "it is no nhwc.Format"
        )
        raise InputError(
            f"{format!s} cannot be asked for: {what}. "
            "Use Format.CONTIGUOUS, Format.CHANNELS_LAST or Format.CHANNELS_LAST_3D."
        )


def convert_(module: Model, format: Format = Format.CHANNELS_LAST) -> Model:
    """Give every 2-D and 3-D convolution of `module` weights in `format`, in place.

    `CHANNELS_LAST` means channels last in the weight's own number of dimensions: 5-D weights become
    `CHANNELS_LAST_3D`. `CHANNELS_LAST_3D` converts only those. `CONTIGUOUS` undoes either.

    >>> net = nn.Sequential(nn.Conv2d(8, 4, 3), nn.ReLU())
    >>> format_of(convert_(net)[0].weight)
    <Format.CHANNELS_LAST: 'channels_last'>

    Parameters keep their identity, so tied weights and state dicts stay as they are, and so do
    optimizers: what one remembers of a weight goes into the weight's new order with it. A state
    that is loaded later has the order in which it was saved, which torch's fused optimizers do not
    look at: load it before you convert.

    TorchScript (scripted, traced, frozen), graphs of torch.fx, exported programs and compiled
    models are converted too. In other code of your own a weight is found where the class itself
    hands it to a convolution, `F.conv2d(x, self.weight)`. A weight that goes through a function
    elsewhere stays as it is, and `nhwc.audit` names it. Weights packed for one kernel (quantized,
    `torch.jit.optimize_for_inference`) have no strides, and stay as they are.
    """
    _check_target(format)
    model: object = module.module() if isinstance(module, ExportedProgram) else module
    if not isinstance(model, nn.Module):
        raise InputError(
            f"cannot convert {of_kind(module)} in place: it is no torch.nn.Module. "
            "For a tensor there is nhwc.to_format(x, format)."
        )
    changed = restride_weights_(model, format)
    if not changed and (packed := packed_convolutions(model)) and not convolution_weights(model):
        raise InputError(
            f"every convolution of the {type(module).__name__} holds its weight packed for one "
            f"kernel ({packed[0] or 'the model itself'}): there is no format to change. "
            "Convert the model before it is quantized or optimized for inference."
        )
    for optimizer in optimizers_of(changed) if changed else ():
        restride_state_(optimizer)
    return module


def restride_weights_(model: nn.Module, format: Format) -> list[Tensor]:
    """Give the weights of convolutions this format; return those whose strides are others now.

    What optimizers remember of them stays in the order that it has.
    """
    weights = convolution_weights(model)
    check_memory(model, weights)
    before = [weight.tensor.stride() for weight in weights]
    # Two parameters over the same memory go on sharing it.
    moved: dict[object, Tensor] = {}
    for weight in weights:
        _restride_(weight.tensor, format, moved)
    together = zip(weights, before, strict=True)
    return [one.tensor for one, strides in together if one.tensor.stride() != strides]


def _restride_(weight: Tensor, format: Format, moved: dict[object, Tensor]) -> None:
    own = CHANNELS_LAST_OF[weight.ndim]
    if format is Format.CHANNELS_LAST:
        format = own
    if format in (own, Format.CONTIGUOUS):
        for tensor in (weight, *([] if weight.grad is None else [weight.grad])):
            memory = (tensor.untyped_storage()._cdata, tensor.storage_offset())
            place = (*memory, tensor.shape, tensor.stride())
            if place not in moved:
                moved[place] = to_format(tensor.data, format)
                if tensor.is_shared():
                    moved[place].share_memory_()
            tensor.data = moved[place]
