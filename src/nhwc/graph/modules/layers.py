"""The modules of ours that a rewritten graph may hold. Each runs as it is, in any format.

Every layer keeps each argument of its constructor under that argument's name, so that it can be
built again from its attributes.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.overrides import handle_torch_function, has_torch_function

from ...errors import InputError, of_kind
from ...models.places import without_unset
from ...operators.spelled import SPELLED
from ..plain import as_plain
from .folded import FOLDED, PROMOTED, SummedConv2d
from .frames import FromFrames, ToFrames
from .leaf import Leaf
from .mended import (
    Attention,
    Cat,
    ChannelNorm,
    ChannelShuffle,
    CircularPad,
    FromTokens,
    GlobalResponse,
    GridSample,
    GroupNorm,
    InstanceNorm,
    Interleave,
    Pixel,
    Recurrent,
    SpelledAttention,
    SpelledNorm,
    WeightedSamples,
)
from .ordered import Reduced, Repeat, Softmax


def assert_none(value: Tensor | None, message: str) -> None:
    """Stop where an argument is passed that the graph has fixed to None; in a trace a call."""
    if has_torch_function((value,)):
        handle_torch_function(assert_none, (value,), value, message)
    elif value is not None:
        raise AssertionError(message)


RAISED = {
    error.__name__: error
    for error in (IndexError, NotImplementedError, RuntimeError, TypeError, ValueError)
}
"""The errors with which code refuses sizes, besides AssertionError."""


def assert_holds(holds: bool, error: str, message: str) -> None:
    """Raise an error, by its name in `RAISED`, unless this holds; in a trace a call.

    >>> assert_holds(False, "ValueError", "an odd height")
    Traceback (most recent call last):
    ValueError: an odd height
    """
    if has_torch_function((holds,)):
        handle_torch_function(assert_holds, (holds,), holds, error, message)
    elif torch.jit.is_scripting():  # type: ignore[attr-defined]
        assert holds, message
    elif not holds:
        raise RAISED.get(error, AssertionError)(message)


def assert_sizes(value: Tensor | None, sizes: list[int], dtype: torch.dtype) -> Tensor:
    """Return an input if it is what the graph was made for, or stop; in a trace a call."""
    if has_torch_function((value,)):
        return handle_torch_function(assert_sizes, (value,), value, sizes, dtype)  # type: ignore[no-any-return]
    if torch.jit.is_scripting():  # type: ignore[attr-defined]
        assert value is not None, "this model was saved for an input that is left out"
        assert list(value.shape) == sizes, "this model was saved for an input of other sizes"
        assert value.dtype == dtype, "this model was saved for an input of another type"
        return value
    if torch._C._is_tracing():
        return _kept(assert_sizes)(value, sizes, dtype)
    return _of_sizes(value, sizes, dtype)


def _of_sizes(value: object, sizes: list[int], dtype: torch.dtype) -> Tensor:
    # The graph has lost what the code does with types: `x.float()` of float32 is no call in it.
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise InputError(
            f"this model was saved for calls without autocast, in {dtype}: its code computes with "
            "sizes. Call it under torch.autocast(..., enabled=False)."
        )
    if isinstance(value, Tensor) and list(value.shape) == sizes and value.dtype == dtype:
        return value
    given = f"{list(value.shape)} and {value.dtype}" if isinstance(value, Tensor) else _named(value)
    raise InputError(
        f"this model was saved for an input of {sizes} and {dtype}, not {given}: "
        "its code computes with sizes. Optimize and save it for yours."
    )


def _kept(check: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A check as a trace of torch.jit keeps it, which forgets what Python does."""
    return torch.jit.script(check)  # type: ignore[no-any-return]


def assert_value(value: Any, expected: Any) -> None:
    """Stop where an input is not the value that the graph was made for; in a trace a call."""
    if has_torch_function((value,)):
        handle_torch_function(assert_value, (value,), value, expected)
    elif torch.jit.is_scripting():  # type: ignore[attr-defined]
        assert str(value) == str(expected), "this model was saved for another value"
    else:
        _check_value(value, expected)


def _check_value(value: object, expected: object) -> None:
    if repr(as_plain(value)) != repr(expected):
        raise InputError(
            f"this model was saved for {expected!r} in the place of {_named(value)}: its code "
            "computes with sizes. Optimize and save it for yours."
        )


def _named(value: object) -> str:
    """What was given, in a few words: a list of tensors prints as all of their numbers."""
    if isinstance(value, Tensor | list | tuple | dict):
        return of_kind(value)
    return repr(as_plain(value))


def assert_numbers(value: Tensor, numbers: list[int]) -> Tensor:
    """Return an input if it has the numbers that the graph was made for, or stop; in a trace a
    call."""
    if has_torch_function((value,)):
        return handle_torch_function(assert_numbers, (value,), value, numbers)  # type: ignore[no-any-return]
    if torch.jit.is_scripting():  # type: ignore[attr-defined]
        same = torch.equal(value.flatten(), torch.tensor(numbers, dtype=value.dtype))
        assert same, "this model was saved for an input with other numbers"
    elif torch.compiler.is_compiling() and value.numel() == len(numbers):
        alike = value.flatten() == torch.tensor(numbers, dtype=value.dtype)
        torch._assert_async(alike.all(), "this model was saved for an input with other numbers")
    elif torch._C._is_tracing():
        return _kept(assert_numbers)(value, numbers)
    else:
        _check_numbers(value, numbers)
    return value


def _check_numbers(value: Tensor, expected: list[int]) -> None:
    # A file may name the numbers of an input that is as large as an image.
    count = value.numel()
    given = value.flatten().tolist() if count == len(expected) else f"one with {count} numbers"
    if given != expected:
        raise InputError(
            f"this model was saved for an input with the numbers {expected}, not {given}: its code "
            "counts by them. Optimize and save it for yours."
        )


def assert_length(value: Any, length: int) -> None:
    """Stop where what holds inputs holds more or fewer than expected; in a trace a call."""
    if has_torch_function((value,)):
        handle_torch_function(assert_length, (value,), value, length)
        return
    held = len(value) if isinstance(value, (list, tuple, dict)) else None
    if held != length:
        given = _named(value) if held is None else held
        raise InputError(
            f"this model was saved for {length} inputs in a list, tuple or dict, not {given}: its "
            "code computes with sizes. Optimize and save it for yours."
        )


def assert_keys(value: Any, keys: list[Any]) -> None:
    """Stop where a dict of inputs has other keys, or in another order; in a trace a call."""
    if has_torch_function((value,)):
        handle_torch_function(assert_keys, (value,), value, keys)
        return
    given = list(value) if isinstance(value, dict) else of_kind(value)
    if given != keys:
        raise InputError(
            f"this model was saved for a dict of {keys}, in this order, not for {given}: its code "
            "may go through it in order. Optimize and save it for yours."
        )


def as_elements(value: Tensor, like: Tensor) -> Tensor:
    """`value` as it is stored in `like[...] = value`; in a trace a call of its own."""
    if has_torch_function((value, like)):
        stored: Tensor = handle_torch_function(as_elements, (value, like), value, like)
        return stored
    while value.dim() > like.dim() and value.size(0) == 1:
        value = value[0]
    # In memory of its own: graphs write into the one and go on to read the other.
    return torch.empty_like(like).copy_(value)


class Spread(nn.Module):
    """Calls `module` with arguments that come as a tuple and a dict of unknown lengths.

    Those named in `nones` are left out where they are None.
    """

    def __init__(self, module: nn.Module, nones: Collection[str] = ()) -> None:
        super().__init__()
        self.module = module
        self.nones = tuple(sorted(nones))

    def forward(
        self,
        args: tuple[Any, ...],
        more: tuple[Any, ...],
        kwargs: dict[str, Any],
        more_kwargs: dict[str, Any],
    ) -> Any:
        return self.module(*args, *more, **without_unset(kwargs, self.nones), **more_kwargs)


class BatchNorm(_BatchNorm):
    """Batch norm for any number of dimensions, as `F.batch_norm` has it."""

    def _check_input_dim(self, input: Tensor) -> None:
        pass


class StatisticsNorm(Leaf, BatchNorm):
    """An instance norm by running statistics: a batch norm that takes one image alone as well.

    What has as many dimensions as `single` is given a batch of its own. Statistics without weights
    are of the input's type.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        device: Any = None,
        *,
        single: int,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, device=device)
        self.single = single

    def forward(self, input: Tensor) -> Tensor:
        if input.dim() == self.single:
            return self._normed(input.unsqueeze(0)).squeeze(0)
        return self._normed(input)

    def _normed(self, images: Tensor) -> Tensor:
        mean, var = self.running_mean, self.running_var
        assert mean is not None
        assert var is not None
        if self.weight is None:
            mean, var = mean.to(images.dtype), var.to(images.dtype)
        return F.batch_norm(images, mean, var, self.weight, self.bias, eps=self.eps)


class PlainInstanceNorm(_InstanceNorm):
    """Instance norm of any number of dimensions, as `F.instance_norm` has it: never a single image.

    Without weights it takes any number of channels, and `num_features` is 0.
    """

    def __init__(
        self, num_features: int, eps: float = 1e-5, affine: bool = False, device: Any = None
    ) -> None:
        super().__init__(num_features, eps, affine=affine, device=device)

    def forward(self, input: Tensor) -> Tensor:
        normed: Tensor = self._apply_instance_norm(input)
        return normed

    def _get_no_batch_dim(self) -> int:
        return 0


class Fused(nn.Module):
    """`activation(op(x) + residual)`: what one kernel can do, written as one call.

    `op` is a convolution, a linear layer or a batch norm; without `activation` or `residual` that
    step is left out. The inputs are never written to. Where the residual and what `op` returns lie
    otherwise in memory, the sum lies as the first of both does: the residual if `residual_first`.
    Where the model adds `in_place`, the sum keeps the type and the shape of what `op` returns.

    >>> import torch
    >>> layer = Fused(nn.Conv2d(4, 4, 1), nn.ReLU())
    >>> x = torch.randn(1, 4, 2, 2)
    >>> torch.equal(layer(x, x), torch.relu(layer.op(x) + x))
    True
    """

    def __init__(
        self,
        op: nn.Module,
        activation: nn.Module | None,
        residual_first: bool = False,
        in_place: bool = False,
    ) -> None:
        super().__init__()
        self.op = op
        self.activation = activation
        self.residual_first = residual_first
        self.in_place = in_place

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y: Tensor = self.op(x)
        if residual is not None:
            if self.in_place:
                y = y.add_(residual)
            else:
                y = residual + y if self.residual_first else y + residual
        if self.activation is not None:
            y = self.activation(y)
        return y


LAYERS: tuple[type[nn.Module], ...] = (
    Attention,
    BatchNorm,
    Cat,
    ChannelNorm,
    ChannelShuffle,
    CircularPad,
    FromFrames,
    FromTokens,
    Fused,
    GlobalResponse,
    GridSample,
    GroupNorm,
    InstanceNorm,
    Interleave,
    Pixel,
    PlainInstanceNorm,
    Recurrent,
    Reduced,
    Repeat,
    Softmax,
    SpelledAttention,
    SpelledNorm,
    Spread,
    StatisticsNorm,
    ToFrames,
    SummedConv2d,
    WeightedSamples,
    *dict.fromkeys((*FOLDED, *PROMOTED)),
    *SPELLED,
)
"""All of them, for whoever stores a graph and builds it again."""
