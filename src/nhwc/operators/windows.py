"""Count the places of a window on an image: the size of a convolution's or pooling's result."""

from __future__ import annotations

from typing import Any

from torch.nn.modules.conv import _ConvNd

_SIDES = ("stride", "padding", "dilation", "output_padding")


def places(
    length: Any,
    size: int,
    *,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    ceil_mode: bool = False,
) -> Any:
    """The number of places of a window of `size` along a side of `length`, an int or a symbol.

    >>> places(224, 7, stride=2, padding=3), places(112, 3, stride=2, ceil_mode=True)
    (112, 56)

    With `ceil_mode` a last window may reach past the end if it begins before the padding there.
    """
    free = length + 2 * padding - dilation * (size - 1) - 1
    if not ceil_mode:
        return free // stride + 1
    count = (free + stride - 1) // stride + 1
    return count - 1 if (count - 1) * stride >= length + padding else count


def sides_of(given: Any, count: int) -> tuple[int, ...]:
    """A number for each side of an image, of which torch takes one for all, alone or in a list.

    >>> sides_of([2], 2), sides_of(2, 2), sides_of((1, 2), 2)
    ((2, 2), (2, 2), (1, 2))
    """
    sides = tuple(given) if isinstance(given, (tuple, list)) else (given,)
    return sides * count if len(sides) == 1 else sides


def tell_sides(layer: _ConvNd) -> None:
    """Set a convolution to a number for each side.

    A pad that is no zeros goes by numbers of its own, which one number means otherwise.
    """
    for name in _SIDES:
        given = getattr(layer, name)
        if not isinstance(given, str) and (name != "padding" or layer.padding_mode == "zeros"):
            setattr(layer, name, sides_of(given, len(layer.kernel_size)))
