"""Calls on images and volumes that put numbers elsewhere and change none.

Some cost nothing in a program, which only notes that the numbers are a slice of others, lie side by
side or have another shape: slices and concatenations of channels, frames of a volume as images.
"""

from __future__ import annotations

from torch import fx

from ...graph import bound
from ...graph.modules.frames import ToFrames
from ...graph.modules.ordered import Repeat
from ...kernels.layers.copies import interleave_steps, nchw_step, shuffle_steps
from ...kernels.programs.builder import Buffer, Builder, four
from ..implementation import Implementation
from ..padding import pad_arguments
from ..recording import Record
from .calls import OperatorCall, computing, noting
from .pixels import (
    PixelMove,
    each_repeated,
    emit_joined,
    emit_moved,
    flipped,
    padded,
    repeated,
    sliced,
)


def cat(call: OperatorCall) -> Implementation | None:
    """Concatenate channels, for which each part is written where it belongs, or other sides."""
    given = bound(call.node, ("tensors", "dim"))
    parts = given["tensors"]
    dim = call.module.dim if call.module is not None else given.get("dim", 0)
    rank = len(call.out.shape)
    if not isinstance(parts, (tuple, list)) or rank == 3 or type(dim) is not int:
        return None
    if not all(isinstance(part, fx.Node) for part in parts) or dim % rank == 0:
        return None
    places = [call.layer.inputs.index(part) for part in parts]
    if dim % rank == 1:
        return noting(lambda builder, constants, *x: builder.cat([x[i] for i in places]))
    shapes = [call.seen(number).shape for number in range(len(parts))]
    if any(len(shape) != rank for shape in shapes):
        return None
    join = emit_joined(shapes, dim % rank, call.out.shape)
    return computing(lambda builder, constants, *x: join(builder, None, *(x[i] for i in places)))


def split(call: OperatorCall) -> Implementation | None:
    """`chunk` and `split` along the channels: slices, which cost nothing."""
    if not _splits_channels(call.record, call.node):
        return None
    sizes = [seen.shape[1] for seen in call.record.values[call.node]]

    def emit(builder: Builder, constants: None, x: Buffer) -> tuple[Buffer, ...]:
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        pairs = zip(ends, sizes, strict=True)
        return tuple(builder.slice(x, end - size, end) for end, size in pairs)

    return noting(emit)


def _splits_channels(record: Record, node: fx.Node) -> bool:
    given = bound(node, ("input", "parts", "dim"))
    found = record.values[node]
    return given.get("dim", 0) == 1 and isinstance(found, tuple) and len(found[0].shape) != 3


def item(call: OperatorCall) -> Implementation | None:
    """One of several results of a split along the channels, or a slice of a tensor."""
    index, source = call.node.args[1], call.layer.inputs[0]
    if isinstance(call.record.values[source], tuple):
        if not isinstance(index, int) or not _splits_channels(call.record, source):
            return None
        return noting(lambda builder, constants, parts: parts[index])
    shape = call.seen(0).shape
    if len(shape) in (4, 5) and (found := sliced(index, shape)) is not None:
        return of_pixels(call, found)
    return _channels(call, index)


def _channels(call: OperatorCall, index: object) -> Implementation | None:
    """`x[:, begin:end]`."""
    if not isinstance(index, tuple) or len(index) < 2 or len(call.out.shape) == 3:
        return None
    channels, others = index[1], (index[0], *index[2:])
    if any(one != slice(None) for one in others):
        return None
    if not isinstance(channels, slice) or channels.step not in (None, 1):
        return None
    if any(isinstance(end, fx.Node) for end in (channels.start, channels.stop)):
        return None
    begin, end, _ = channels.indices(call.seen(0).shape[1])
    return noting(lambda builder, constants, x: builder.slice(x, begin, end))


def moved(call: OperatorCall) -> Implementation | None:
    """Padding, repetition and reversal of frames, lines and columns."""
    shape = call.seen(0).shape
    if len(shape) not in (4, 5) or len(call.layer.inputs) != 1:
        return None
    return of_pixels(call, _found(call, shape))


def _found(call: OperatorCall, shape: tuple[int, ...]) -> PixelMove | None:
    if type(call.module) is Repeat or call.name == "repeat":
        return repeated(_numbers(call.node), shape)
    if call.module is not None:
        return padded(pad_arguments(call.module) or {}, shape)
    if call.name == "pad":
        given = bound(call.node, ("input", "pad", "mode", "value"))
        given["pad"] = fx.node.map_arg(given.get("pad"), call.record.values.get)
        return padded(given, shape)
    if call.name == "flip":
        return flipped(_numbers(call.node), shape)
    given = bound(call.node, ("input", "repeats", "dim"))
    return each_repeated(given.get("repeats"), given.get("dim"), shape)


def _numbers(node: fx.Node) -> object:
    """What `repeat` or `flip` is given behind the tensor, one by one or in a list."""
    given = node.args[1:] or tuple(node.kwargs.values())
    return given[0] if len(given) == 1 and isinstance(given[0], (list, tuple)) else given


def of_pixels(call: OperatorCall, found: PixelMove | None) -> Implementation | None:
    """The step that moves pixels so, if that gives the shape that torch's result has."""
    shape, wanted = call.seen(0).shape, call.out.shape
    if found is None or tuple(map(len, found.sides))[5 - len(shape) :] != wanted[2:]:
        return None
    return computing(emit_moved(found, shape, wanted))


def shuffle(call: OperatorCall) -> Implementation | None:
    groups = call.module.groups
    return call.on_images(lambda x, y: shuffle_steps(x, y, groups))


def interleave(call: OperatorCall) -> Implementation | None:
    return call.on_images(lambda *views: interleave_steps(views[:-1], views[-1]))


def frames(call: OperatorCall) -> Implementation | None:
    """A volume as a batch of its frames, or back: the same memory."""
    shapes = call.seen(0).shape, call.out.shape
    volume, images = shapes if isinstance(call.module, ToFrames) else shapes[::-1]
    if len(volume) != 5 or images != (volume[0] * volume[2], volume[1], *volume[3:]):
        return None
    return noting(lambda builder, constants, x: builder.reshaped(x, shapes[1]))


def flatten(call: OperatorCall) -> Implementation | None:
    """Put all dimensions but the batch into one."""
    seen, out = call.seen(0), call.out
    if len(call.layer.inputs) != 1 or len(seen.shape) not in (4, 5) or len(out.shape) != 2:
        return None
    n, c, h, w = four(seen.shape)
    if out.shape != (n, c * h * w):
        return None
    return unchanged(call) if h * w == 1 else call.steps(nchw_step)


def same(call: OperatorCall) -> Implementation | None:
    """A conversion to the type it has already, or a copy: no step writes into its input."""
    if call.seen(0).shape != call.out.shape or len(call.out.shape) not in (4, 5):
        return None
    first = call.layer.inputs.index(call.layer.given[0])
    return noting(lambda builder, constants, *buffers: buffers[first])


def unchanged(call: OperatorCall) -> Implementation | None:
    """A layer that returns what it is given, if that is one tensor and not a list of them."""
    given = call.node.args[:1]
    if given != call.layer.inputs or isinstance(call.record.values[call.node], tuple):
        return None
    return noting(lambda builder, constants, x: x)
