"""Our kernels for operators without weights, by what a node calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from operator import getitem
from typing import Any

import torch
from torch import fx, nn

from ...graph.frames import FromFrames, ToFrames
from ...graph.mended import (
    Cat,
    ChannelNorm,
    ChannelShuffle,
    GlobalResponse,
    GroupNorm,
    InstanceNorm,
    Interleave,
)
from ...graph.ordered import Repeat, Softmax
from ...kernels.convolutions.transposed import (
    Transposed,
    pack_transposed,
    transposed_steps,
)
from ...kernels.layers.copies import interleave_steps, nchw_step, shuffle_steps
from ...kernels.layers.elementwise import (
    activation_step,
    add_step,
    affine_step,
    multiply_step,
    prelu_step,
)
from ...kernels.layers.group_norm import group_norm_steps, pieces_of
from ...kernels.layers.normalize import layer_norm_step, softmax_step
from ...kernels.layers.pooling import adaptive_avgpool_step, global_mean_step
from ...kernels.layers.response import response_steps
from ...kernels.layers.unit import unit_step
from ...kernels.programs.builder import Buffer, Builder, Shape, four
from ...kernels.tape.steps import Step, View
from ...operators.activations import FUNCTIONS, NamedActivation, of_module
from ...operators.kinds import arithmetic_of
from ..implementation import Emit, Implementation
from ..recording import Record, Seen
from ..specs import Layer
from .pixels import (
    PixelMove,
    each_repeated,
    emit_joined,
    emit_moved,
    flipped,
    nearest,
    pad_arguments,
    padded,
    repeated,
    sliced,
)
from .weighted import in_ours, ours
from .windows import (
    ARGUMENTS,
    MODULES,
    Given,
    Make,
    average_pool,
    is_neutral,
    max_pool,
    of_frames,
    of_pixels,
    resize,
)

OF_NAME = {
    getattr(function, "__name__", function): of_module(kind())
    for function, kind in FUNCTIONS.items()
}
"""The activations of functions and methods that are given nothing but a tensor."""


_UNIT = ("input", "p", "dim", "eps", "out")
"""The arguments of `F.normalize`."""


def operator(graph: fx.GraphModule, record: Record, layer: Layer) -> tuple[Implementation, ...]:
    """Our kernel for a layer without weights, if there is one."""
    found = OperatorCall(graph, record, layer)
    emit = found.emit()
    return (ours("nhwc", emit, free=found.free),) if emit else ()


class OperatorCall:
    """The call that a node makes, and our kernel for it; `free` as long as that adds no step."""

    def __init__(self, graph: fx.GraphModule, record: Record, layer: Layer) -> None:
        self.record, self.layer, self.node = record, layer, layer.node
        self.free = True
        target = self.node.target
        self.module: Any = None
        if self.node.op == "call_module":
            self.module = graph.get_submodule(str(target))
        self.name = target if isinstance(target, str) else getattr(target, "__name__", "")

    def emit(self) -> Emit | None:
        if self.module is not None:
            return self._module()
        if self.node.op == "call_function" and self.node.target is getitem:
            return self._item()
        named = {
            "add": self._add,
            "mul": self._multiply,
            "sub": self._subtract,
            "div": lambda: self._affine(power=-1),
            **dict.fromkeys(("cat", "concat", "concatenate"), self._cat),
            **dict.fromkeys(("chunk", "split", "tensor_split"), self._parts),
            **dict.fromkeys(("flatten", "view", "reshape"), self._flatten),
            "mean": self._mean,
            **dict.fromkeys(("pow", "square"), self._square),
            **dict.fromkeys(("max_pool2d", "max_pool3d"), lambda: self._called(max_pool)),
            **dict.fromkeys(("avg_pool2d", "avg_pool3d"), lambda: self._called(average_pool)),
            "interpolate": self._interpolate,
            **dict.fromkeys(("pad", "flip", "repeat", "repeat_interleave"), self._moved),
            "softmax": self._softmax,
            "normalize": self._normalize,
            **dict.fromkeys(("to", "float", "type_as", "clone"), self._same),
            **dict.fromkeys(("adaptive_avg_pool2d", "adaptive_avg_pool3d"), self._adaptive_pool),
        }
        find = named.get(arithmetic_of(self.name) or self.name)
        if find is not None:
            return find()
        return self._activation(OF_NAME.get(self.name) if self.alone() else None)

    def alone(self) -> bool:
        """Whether the node takes one tensor and no numbers."""
        flags = all(type(value) is bool for value in self.node.args[1:])
        named = self.node.kwargs.keys() <= {"input", "inplace"}
        return flags and named and len(self.node.all_input_nodes) == 1

    def _module(self) -> Emit | None:
        module = self.module
        if module._forward_hooks or module._forward_pre_hooks:
            return None
        for kind, make in MODULES.items():
            if isinstance(module, kind):
                volume = self._nearest_of_volumes(vars(module)) if make is resize else None
                return volume or self._windows(make, vars(module))
        if isinstance(module, (nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)):
            return self._adaptive_pool()
        if isinstance(module, nn.Flatten):
            return self._flatten()
        if isinstance(module, Cat):
            return self._cat()
        if isinstance(module, Interleave):
            return self._made(lambda *views: interleave_steps(views[:-1], views[-1]))
        if type(module) is Repeat or pad_arguments(module) is not None:
            return self._moved()
        if isinstance(module, (ToFrames, FromFrames)):
            return self._frames()
        if isinstance(module, ChannelShuffle):
            return self._made(lambda x, y: shuffle_steps(x, y, module.groups))
        if isinstance(module, Softmax) and self._is_channels(module.dim) and not module.logarithm:
            return self._pixelwise(softmax_step)
        if type(module) in (nn.ConvTranspose2d, nn.ConvTranspose3d):
            return self._transposed()
        if type(module) is nn.PReLU:
            weight = module.weight
            return self._pixelwise(lambda x, y: prelu_step(x, y, weight))
        if type(module) is ChannelNorm:
            return self._made(norm_step(module))
        if type(module) is nn.LayerNorm:
            return self._layer_norm()
        if type(module) in (nn.GroupNorm, GroupNorm, InstanceNorm):
            return self._group_norm()
        if type(module) is GlobalResponse:
            return None if module.last else self._response()
        if type(module) in (nn.Identity, nn.Dropout, nn.Dropout2d, nn.Dropout3d):
            return lambda builder, constants, x: x
        return self._activation(of_module(module))

    def _called(self, make: Callable[[Given], Make | None]) -> Emit | None:
        return self._windows(make, bound(self.node, ARGUMENTS[make]))

    def _interpolate(self) -> Emit | None:
        return self._nearest_of_volumes(bound(self.node, ARGUMENTS[resize])) or self._called(resize)

    def _nearest_of_volumes(self, given: Given) -> Emit | None:
        shape, wanted = self._seen(0).shape, self._out.shape
        return self._of_pixels(nearest(given, shape, wanted)) if len(shape) == 5 else None

    def _frames(self) -> Emit | None:
        """A volume as a batch of its frames, or back: the same memory."""
        shapes = self._seen(0).shape, self._out.shape
        volume, images = shapes if isinstance(self.module, ToFrames) else shapes[::-1]
        if len(volume) != 5 or images != (volume[0] * volume[2], volume[1], *volume[3:]):
            return None
        return lambda builder, constants, x: builder.reshaped(x, shapes[1])

    def _same(self) -> Emit | None:
        """A conversion to the type it has already, or a copy: no step writes into its input."""
        if self._seen(0).shape != self._out.shape or len(self._out.shape) not in (4, 5):
            return None
        first = self.layer.inputs.index(nodes_in(self.node.args)[0])
        return lambda builder, constants, *buffers: buffers[first]

    def _normalize(self) -> Emit | None:
        eps = self.unit_eps()
        if eps is None or not self._is_channels(bound(self.node, _UNIT).get("dim", 1)):
            return None
        return self._pixelwise(lambda x, y: unit_step(x, y, eps=eps))

    def unit_eps(self) -> float | None:
        """The least length that `F.normalize` divides by, if it divides by lengths as we do."""
        given = bound(self.node, _UNIT)
        plain = given.get("p", 2.0) == 2 and given.get("out") is None
        eps = given.get("eps", 1e-12)
        return eps if plain and type(eps) is float else None

    def _moved(self) -> Emit | None:
        """Padding, repetition and reversal of frames, lines and columns."""
        shape = self._seen(0).shape
        if len(shape) not in (4, 5) or len(self.layer.inputs) != 1:
            return None
        if type(self.module) is Repeat or self.name == "repeat":
            return self._of_pixels(repeated(_numbers(self.node), shape))
        if self.module is not None:
            return self._of_pixels(padded(pad_arguments(self.module) or {}, shape))
        if self.name == "pad":
            given = bound(self.node, ("input", "pad", "mode", "value"))
            given["pad"] = fx.node.map_arg(given.get("pad"), self.record.values.get)
            return self._of_pixels(padded(given, shape))
        if self.name == "flip":
            return self._of_pixels(flipped(_numbers(self.node), shape))
        given = bound(self.node, ("input", "repeats", "dim"))
        return self._of_pixels(each_repeated(given.get("repeats"), given.get("dim"), shape))

    def _of_pixels(self, moved: PixelMove | None) -> Emit | None:
        shape, wanted = self._seen(0).shape, self._out.shape
        if moved is None or tuple(map(len, moved.sides))[5 - len(shape) :] != wanted[2:]:
            return None
        self.free = False
        return emit_moved(moved, shape, wanted)

    def _windows(self, make: Callable[[Given], Make | None], given: Given) -> Emit | None:
        if len(self._seen(0).shape) != 5:
            return self._made(make(given))
        return self._of_volumes(make, given) if len(self._out.shape) == 5 else None

    def _of_volumes(self, make: Callable[[Given], Make | None], given: Given) -> Emit | None:
        """Windows over each frame, and then over the frames of each pixel."""
        n, c, d, h, w = self._seen(0).shape
        *_, deep, high, wide = self._out.shape
        frames, pixels = of_frames(given), of_pixels(given)
        one, two = make(frames), make(pixels)
        if one is None or two is None:
            return None
        steps = [
            (one, frames, (n * d, c, h, w), (n * d, c, high, wide)),
            (two, pixels, (n, c, d, high * wide), (n, c, deep, high * wide)),
        ]
        needed = [s for s in steps if s[2] != s[3] or not is_neutral(s[1])] or steps[:1]
        self.free = False

        def emit(builder: Builder, constants: None, x: Buffer) -> Buffer:
            for number, (step, _, before, after) in enumerate(needed, 1):
                depth = d if number < len(needed) else deep
                y = builder.buffer((n, c, depth, high, wide))
                builder.add(partial(_reshaped, step, before, after), x, y)
                x = y
            return x

        return emit

    def _made(self, make: Make | None) -> Emit | None:
        images = len(self._seen(0).shape) == len(self._out.shape) == 4
        return self._steps(make) if make and images else None

    def _pixelwise(self, make: Make) -> Emit | None:
        """What treats each pixel alone serves volumes as well."""
        volumes = len(self._seen(0).shape) == len(self._out.shape) == 5
        return self._steps(make) if volumes else self._made(make)

    def _is_channels(self, dim: Any) -> bool:
        rank = len(self._out.shape)
        return rank in (4, 5) and dim in (1, 1 - rank)

    def _transposed(self) -> Emit | None:
        """A transposed convolution whose filters are neither grouped nor dilated."""
        module, x, y = self.module, self._seen(0).shape, self._out.shape
        alone = len(self.node.args) == 1 and not self.node.kwargs
        plain = module.groups == 1 and {*module.dilation} == {1}
        if not alone or not plain or len(x) != module.weight.ndim:
            return None
        image = (1,) if len(x) == 4 else ()
        spec = Transposed(
            _deep(x),
            _deep(y),
            size=(*image, *module.kernel_size),
            stride=(*image, *module.stride),
            padding=(*(0 for _ in image), *module.padding),
        )
        self.free = False

        def emit(builder: Builder, constants: None, x: Buffer) -> Buffer:
            weight = module.weight if module.weight.ndim == 5 else module.weight.unsqueeze(2)
            packed = pack_transposed(spec, weight, module.bias)
            stacked, result = builder.buffer(spec.stacked), builder.buffer(y)
            builder.add(partial(transposed_steps, spec, packed), x, stacked, result)
            return result

        return emit

    def _adaptive_pool(self) -> Emit | None:
        x, out = self._seen(0).shape, self._out.shape
        if len(x) != 5 or len(out) != 5:
            return self._made(adaptive_avgpool_step)
        if out[2:] == (1, 1, 1):
            return self._steps(global_mean_step)
        # The parts are even in each direction, so the mean of the means is the mean.
        return self._of_volumes(_adaptive, {})

    def _layer_norm(self) -> Emit | None:
        """Normalize over the last dimension, which holds the channels of each row."""
        module, shape = self.module, self._out.shape
        if len(shape) > 3 or tuple(module.normalized_shape) != shape[-1:]:
            return None
        return self._steps(norm_step(module))

    def _group_norm(self) -> Emit | None:
        """Group norm, or instance norm, which has a group for each channel."""
        shape = self._out.shape
        norm = self.module if type(self.module) is nn.GroupNorm else self.module.norm
        n, c, h, w = four(shape)
        groups = norm.num_groups if isinstance(norm, nn.GroupNorm) else c
        # torch refuses to normalize a single number.
        if len(shape) not in (4, 5) or h * w * (c // groups) == 1:
            return None
        self.free = False
        steps = partial(
            group_norm_steps, groups=groups, weight=norm.weight, bias=norm.bias, eps=norm.eps
        )

        def emit(builder: Builder, constants: None, x: Buffer) -> Buffer:
            pieces = builder.buffer((n * pieces_of(c, h * w), 2 * c))
            means, y = builder.buffer((n, 2 * c)), builder.buffer(shape)
            builder.add(steps, x, pieces, means, y)
            return y

        return emit

    def _response(self) -> Emit | None:
        """Global response norm."""
        shape, module = self._out.shape, self.module
        n, c, h, w = shape
        self.free = False
        steps = partial(response_steps, weight=module.weight, bias=module.bias, eps=module.eps)

        def emit(builder: Builder, constants: None, x: Buffer) -> Buffer:
            pieces = builder.buffer((n * pieces_of(c, h * w), c))
            factors, y = builder.buffer((n, c)), builder.buffer(shape)
            builder.add(steps, x, pieces, factors, y)
            return y

        return emit

    def _mean(self) -> Emit | None:
        given = bound(self.node, ("input", "dim", "keepdim"))
        dims, rank = given.get("dim"), len(self._seen(0).shape)
        if not isinstance(dims, (tuple, list)) or rank not in (4, 5):
            return None
        over_all = sorted(d % rank for d in dims) == [*range(2, rank)]
        return self._steps(global_mean_step) if over_all else None

    def _softmax(self) -> Emit | None:
        given = bound(self.node, ("input", "dim"))
        over_channels = self._is_channels(given.get("dim")) and given.keys() <= {"input", "dim"}
        return self._pixelwise(softmax_step) if over_channels else None

    def _activation(self, activation: NamedActivation | None) -> Emit | None:
        make = activating(activation)
        return self._steps(make) if make else None

    def _affine(self, *, power: int = 0, sign: int = 0) -> Emit | None:
        make = self.with_number(power=power, sign=sign)
        return self._steps(make) if make else None

    def with_number(self, *, power: int = 0, sign: int = 0) -> Make | None:
        """x * number**power + sign * number, where the other operand is a number."""
        args = self.node.args
        if len(args) != 2 or self.node.kwargs:
            return None
        number: Any = next((arg for arg in args if type(arg) in (int, float)), None)
        swapped = number is args[0] and min(power, sign) < 0
        if number is None or swapped or not _is_ordinary(number) or (power < 0 and not number):
            return None
        scale, shift = number**power, 1.0 * sign * number

        def make(x: View, y: View) -> Step:
            every = lambda number: torch.full(x.shape[1:2], number)
            return affine_step(x, y, every(float(scale)), every(shift))

        return make

    def _add(self) -> Emit | None:
        if not self.two():
            return self._affine(sign=1)
        if self._seen(0).shape != self._seen(1).shape:
            return None
        return self._steps(add_step)

    def _subtract(self) -> Emit | None:
        if not self.two():
            return self._affine(sign=-1)
        if self._seen(0).shape != self._seen(1).shape or len(self._out.shape) not in (4, 5):
            return None
        minus = -torch.ones(self._out.shape[1])
        return self._steps(lambda x, other, y: affine_step(other, y, minus, residual=x))

    def _multiply(self) -> Emit | None:
        if not self.two():
            return self._affine(power=1)
        (a, b), out = (self._seen(0).shape, self._seen(1).shape), self._out.shape
        gate = (*out[:2], *[1] * (len(out) - 2)) if len(out) > 3 else (*out[:2], 1, 1)
        # The first operand is the factor only if it has another shape than the result.
        first = a != out
        whole, factor = (b, a) if first else (a, b)
        shared = len(out) > 3 and factor in (gate[1:], (1, *gate[1:]))
        if whole != out or not (shared or factor in (out, gate)):
            return None

        def make(one: View, other: View, y: View) -> Step:
            x, factor = (other, one) if first else (one, other)
            return multiply_step(x, _pixel(factor) if shared else factor, y)

        return self._steps(make)

    def _square(self) -> Emit | None:
        make = self.squaring()
        return self._steps(make) if make else None

    def squaring(self) -> Make | None:
        """The step of `x ** 2` or `x.square()`."""
        power = self.node.args[1:] if self.name == "pow" else (2,)
        plain = power in ((2,), (2.0,)) and not self.node.kwargs and len(self.layer.inputs) == 1
        return (lambda x, y: multiply_step(x, x, y)) if plain else None

    def _cat(self) -> Emit | None:
        given = bound(self.node, ("tensors", "dim"))
        parts = given["tensors"]
        dim = 1 if self.module is not None else given.get("dim", 0)
        rank = len(self._out.shape)
        if not isinstance(parts, (tuple, list)) or rank == 3 or type(dim) is not int:
            return None
        if not all(isinstance(part, fx.Node) for part in parts) or dim % rank == 0:
            return None
        places = [self.layer.inputs.index(part) for part in parts]
        if dim % rank > 1:
            shapes = [self._seen(number).shape for number in range(len(parts))]
            if any(len(shape) != rank for shape in shapes):
                return None
            self.free = False
            join = emit_joined(shapes, dim % rank, self._out.shape)
            return lambda builder, constants, *buffers: join(
                builder, constants, *(buffers[i] for i in places)
            )
        return lambda builder, constants, *buffers: builder.cat([buffers[i] for i in places])

    def _parts(self) -> Emit | None:
        """`chunk` and `split` along the channels: slices, which cost nothing."""
        given = bound(self.node, ("input", "parts", "dim"))
        found = self.record.values[self.node]
        if given.get("dim", 0) != 1 or not isinstance(found, tuple) or len(found[0].shape) == 3:
            return None
        sizes = [seen.shape[1] for seen in found]

        def emit(builder: Builder, constants: None, x: Buffer) -> tuple[Buffer, ...]:
            ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
            pairs = zip(ends, sizes, strict=True)
            return tuple(builder.slice(x, end - size, end) for end, size in pairs)

        return emit

    def _item(self) -> Emit | None:
        index = self.node.args[1]
        if isinstance(self.record.values[self.layer.inputs[0]], tuple):
            if not isinstance(index, int):
                return None
            return lambda builder, constants, parts: parts[index]
        shape = self._seen(0).shape
        if len(shape) in (4, 5) and (moved := sliced(index, shape)) is not None:
            return self._of_pixels(moved)
        if not isinstance(index, tuple) or len(index) < 2:
            return None
        channels, others = index[1], (index[0], *index[2:])
        if any(one != slice(None) for one in others):
            return None
        if not isinstance(channels, slice) or channels.step not in (None, 1):
            return None
        if len(self._out.shape) == 3:
            return None
        if any(isinstance(end, fx.Node) for end in (channels.start, channels.stop)):
            return None
        begin, end, _ = channels.indices(self._seen(0).shape[1])
        return lambda builder, constants, x: builder.slice(x, begin, end)

    def _flatten(self) -> Emit | None:
        """Put all dimensions but the batch into one."""
        seen, out = self._seen(0), self._out
        if len(self.layer.inputs) != 1 or len(seen.shape) not in (4, 5) or len(out.shape) != 2:
            return None
        n, c, h, w = four(seen.shape)
        if out.shape != (n, c * h * w):
            return None
        return (lambda builder, constants, x: x) if h * w == 1 else self._steps(nchw_step)

    def _steps(self, make: Callable[..., Any]) -> Emit:
        """Add `make(*input views, output view)`, in the order of the node's own arguments."""
        self.free = False
        shape = self._out.shape
        given = nodes_in((self.node.args, self.node.kwargs))
        order = [node for node in given if node in self.layer.inputs]
        places = [self.layer.inputs.index(node) for node in order]

        def emit(builder: Builder, constants: None, *buffers: Buffer) -> Buffer:
            y = builder.buffer(shape)
            builder.add(make, *(buffers[i] for i in places), y)
            return y

        return emit

    def two(self) -> bool:
        """Whether the node takes two tensors and nothing else."""
        nodes = nodes_in(self.node.args)
        plain = len(self.node.args) == 2 and not self.node.kwargs
        # A number that the model is given is a node as well, but no input of the layer.
        return plain and len(nodes) == 2 and {*nodes} <= {*self.layer.inputs}

    def _seen(self, index: int) -> Seen:
        nodes = nodes_in((self.node.args, self.node.kwargs))
        found: Seen = self.record.values[nodes[index]]
        return found

    @property
    def _out(self) -> Seen:
        found: Seen = self.record.values[self.node]
        return found


def _adaptive(given: Given) -> Make:
    return adaptive_avgpool_step


def activating(activation: NamedActivation | None) -> Make | None:
    """The step of an activation; None for none, and for one that our kernels lack."""
    code = in_ours(activation) if activation else None
    return code and (lambda x, y: activation_step(x, y, code[0], slope=code[1]))


def norm_step(module: Any) -> Make:
    """The step of a layer norm over the channels."""
    norm, eps = (module.weight, module.bias), module.eps
    return lambda x, y: layer_norm_step(x, y, *norm, eps=eps)


def _deep(shape: tuple[int, ...]) -> Any:
    """The shape of a volume, or of an image as a volume of one frame."""
    return shape if len(shape) == 5 else (*shape[:2], 1, *shape[2:])


def _reshaped(make: Make, before: Shape, after: Shape, x: View, y: View) -> Any:
    """The steps of `make` on the same pixels, counted as images of other sizes."""
    return make(replace(x, shape=before), replace(y, shape=after))


def _is_ordinary(number: float) -> bool:
    """Whether 0 times it is 0, and multiplying by its reciprocal is as good as dividing by it."""
    return not number or 1e-37 < abs(number) < 1e37


def _pixel(view: View) -> View:
    """View numbers that lie without gaps as one pixel of as many channels."""
    count = view.pixels * view.shape[1]
    return View(view.buffer, (1, count, 1, 1), count, view.offset)


def nodes_in(value: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.node.map_arg(value, found.append)  # type: ignore[arg-type]
    return found


def _numbers(node: fx.Node) -> Any:
    """What `repeat` or `flip` is given behind the tensor, one by one or in a list."""
    given = node.args[1:] or tuple(node.kwargs.values())
    return given[0] if len(given) == 1 and isinstance(given[0], (list, tuple)) else given


def bound(node: fx.Node, names: Sequence[str]) -> dict[str, Any]:
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
