"""The values of a stretch of our layers: buffers, or tensors that were moved on paper."""

from __future__ import annotations

from typing import Any

from torch import fx

from ...formats import Format
from ...kernels.programs.builder import Buffer, Builder
from ...kernels.programs.moved import (
    Moved,
    as_image,
    as_rows,
    rows_of,
    settled,
    settled_rows,
)
from ..implementation import Implementation
from ..recording import Record

_OF_BUFFERS = (2, 3, 4, 5)
"""The dimensions that a buffer's tensor may have: rows, rows in batches, images, volumes."""


class Values:
    """What each node of a stretch returned, in the form in which it was returned."""

    def __init__(self, record: Record, builder: Builder) -> None:
        self._record, self._builder = record, builder
        self._found: dict[fx.Node, Any] = {}
        self._makers: dict[fx.Node, Implementation] = {}
        self._images: dict[fx.Node, Buffer] = {}
        """What was put in order for a kernel that wants images, and serves the next one, too."""

    def __contains__(self, node: fx.Node) -> bool:
        return node in self._found

    def take(self, node: fx.Node, *, contiguous: bool) -> None:
        """Make the value of `node` the program's next input; `contiguous` if it is to stay so."""
        shape = self._record.values[node].shape
        if self._has_rows(node, contiguous):
            self._found[node] = as_rows(self._builder.input(rows_of(shape)), shape)
        else:
            self._found[node] = self._builder.input(shape)

    def put(self, node: fx.Node, maker: Implementation, value: Any) -> None:
        """Note what `maker` returned."""
        self._found[node], self._makers[node] = value, maker

    def drop(self, node: fx.Node) -> None:
        """Forget a value that nobody reads any more."""
        del self._found[node]
        self._images.pop(node, None)

    def given(self, node: fx.Node, reader: Implementation) -> Any:
        """The value as `reader` wants it; several at once are handed on as they are."""
        value = self._found[node]
        if isinstance(value, Buffer) and reader.moved:
            return as_image(value, self._record.values[node].shape)
        if isinstance(value, Moved) and not reader.moved:
            if node not in self._images:
                self._images[node] = settled(self._builder, value)
            return self._images[node]
        return value

    def give(self, node: fx.Node) -> None:
        """Make the value of `node` the program's next output."""
        value, shape = self._found[node], self._record.values[node].shape
        if not isinstance(value, Moved):
            self._builder.output(value, shape, Format.CHANNELS_LAST)
        elif len(shape) not in _OF_BUFFERS or self._makers[node].writes is Format.CONTIGUOUS:
            self._builder.output(settled_rows(self._builder, value), shape, Format.CONTIGUOUS)
        else:
            self._builder.output(settled(self._builder, value), shape, Format.CHANNELS_LAST)

    def _has_rows(self, node: fx.Node, contiguous: bool) -> bool:
        """Whether the last dimension of an input is that of its channels, though it has four."""
        rank = len(self._record.values[node].shape)
        # An image of the caller's goes on to a convolution, sooner or later.
        rows = contiguous and node.op != "placeholder"
        return rank not in _OF_BUFFERS or (rank > 3 and (rows or node in self._record.tokens))
