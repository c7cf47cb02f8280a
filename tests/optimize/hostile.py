"""Models that do what a model may do and a tool seldom expects."""

from __future__ import annotations

import random
from collections import OrderedDict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

Verbs = dict[str, str]


def image(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*(shape or (2, 3, 12, 10)), generator=torch.Generator().manual_seed(seed))


class Halve(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x / 2

    @staticmethod
    def backward(ctx, grad):
        return grad / 2


@dataclass(frozen=True)
class Case:
    """A model, what to call it with, and which verbs refuse it with what words."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Any, ...]] = lambda: (image(),)
    refused: Verbs = field(default_factory=dict)
    kwargs: Callable[[], dict[str, Any]] = dict


def block(channels: int = 3, out: int = 4) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()
    )


class Does(nn.Module):
    """A block, and what else a forward does, given as a function of (self, block's output, x)."""

    def __init__(self, does: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.block = block()
        for name, part in parts.items():
            setattr(self, name, part)
        self.does = does

    def forward(self, x: Tensor) -> Any:
        return self.does(self, self.block(x), x)


class Unsaid(Does):
    def __repr__(self) -> str:
        return self.loaded_from  # type: ignore[no-any-return]


class UnsaidNorm(nn.BatchNorm2d):
    def extra_repr(self) -> str:
        return self.loaded_from  # type: ignore[return-value]


class Anything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = block()

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        y = self.block(args[0])
        for extra in (*args[1:], *kwargs.values()):
            y = y + extra
        return y


class Pair(NamedTuple):
    features: Tensor
    pooled: Tensor


Plain = namedtuple("Plain", "features pooled")


@dataclass
class Outputs:
    features: Tensor
    pooled: Tensor


class Attributes(OrderedDict):
    """As transformers' ModelOutput: a dict whose items are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Twice(nn.Module):
    """One module under two names, one of them called in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = block()
        self.one = block(4, 4)
        self.two = self.one
        self.inner = nn.ModuleList([self.one, block(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        return self.inner[1](self.two(self.one(self.stem(x))))


class Shared(nn.Module):
    """Two convolutions with one weight, behind one of them a batch norm; a tied decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.again = nn.Conv2d(3, 4, 3, padding=1)
        self.again.weight = self.encode.weight
        self.decode = nn.ConvTranspose2d(4, 3, 3, padding=1)
        self.decode.weight = self.encode.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.norm(self.encode(x)) + self.again(x))


class Picture:
    """It says whether it is equal by its pixels, which a tensor does not say in one word."""

    def __init__(self, pixels: Tensor) -> None:
        self.pixels = pixels

    def __eq__(self, other: object) -> bool:
        return bool(self.pixels == other.pixels)


class Counting(nn.Module):
    """Its buffers change at every call, and so do its answers."""

    def __init__(self) -> None:
        super().__init__()
        self.block = block()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(x)
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean((0, 2, 3))
        return y * self.calls - self.mean[:, None, None]


class Remembering(nn.Module):
    """It keeps what it saw, in plain attributes and lists."""

    def __init__(self) -> None:
        super().__init__()
        self.block = block()
        self.seen: list[Tensor] = []
        self.last: Tensor | None = None
        self.times = 0

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(x)
        if self.last is not None:
            y = y + self.last
        self.last = y.detach()
        self.seen.append(y.detach())
        self.times += 1
        return y


class Recursive(nn.Module):
    """It calls itself on ever smaller images."""

    def __init__(self) -> None:
        super().__init__()
        self.block = block(3, 3)

    def forward(self, x: Tensor, depth: int = 0) -> Tensor:
        if depth == 3 or x.shape[-1] < 4:
            return x
        return self.block(x) + F.interpolate(self(x[..., ::2, ::2], depth + 1), x.shape[-2:])


class Holding(nn.Module):
    """A child that knows its parent, hidden from torch in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.block = block()
        self.child = nn.Identity()
        self.child.parent = [self]

    def forward(self, x: Tensor) -> Tensor:
        return self.child.parent[0].block(x)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.stem, self.body, self.reentrant = block(), block(4, 4), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, self.stem(x), use_reentrant=self.reentrant)


class Floating(nn.Module):
    """Makes numbers of bytes, as a preprocessing step would."""

    def forward(self, x: Tensor) -> Tensor:
        return x.float().div(255) if x.dtype == torch.uint8 else x


class Classed(nn.Module):
    """An image, and a class whose embedding is added."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.embed = block(), nn.Embedding(3, 4)

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        return self.block(x) + self.embed(kind)[:, :, None, None]


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = block()

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.block(x.masked_fill(mask, 0.0))


class Taking(nn.Module):
    """Takes an image out of what it is given in, and leaves another."""

    def __init__(self, place: Any, new: Any) -> None:
        super().__init__()
        self.block, self.place, self.new = block(), place, new

    def forward(self, images: Any) -> Tensor:
        y = self.block(images.pop(self.place))
        if isinstance(images, dict):
            images[self.new] = y
        else:
            images.append(y)
        return y * 2


class Raising(nn.Module):
    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.block, self.error = block(), error

    def forward(self, x: Tensor) -> Tensor:
        self.block(x)
        raise self.error


class Own(Exception):
    """An error that needs arguments, and speaks in several lines."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(f"code {code}\n  {text}\n")


def hooked(**hooks: Callable[..., Any]) -> nn.Module:
    model = nn.Sequential(block(), block(4, 4), nn.Conv2d(4, 2, 1))
    for kind, hook in hooks.items():
        getattr(model[0][0], f"register_{kind}")(hook)
        getattr(model[1], f"register_{kind}")(hook)
    return model


def parametrized(wrap: Callable[[nn.Module], Any]) -> nn.Module:
    model = nn.Sequential(block(), block(4, 4))
    wrap(model[0][0])
    wrap(model[1][0])
    return model


def frozen() -> nn.Module:
    return block().requires_grad_(False)


def with_gradients() -> nn.Module:
    model = block()
    model(image()).sum().backward()
    return model


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.ReLU())


def lazy_but_run() -> nn.Module:
    model = lazy()
    model(image())
    return model


def quantized() -> nn.Module:
    model = nn.Sequential(block(), nn.Flatten(), nn.Linear(480, 5))
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear})


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return block()


def dropped_out(self: Any, y: Tensor, x: Tensor) -> Tensor:
    return F.dropout(y, 0.5, True)


def prints(self: Any, y: Tensor, x: Tensor) -> Tensor:
    print("mean", float(y.mean()))
    return y


def writes_to_its_input(self: Any, y: Tensor, x: Tensor) -> Tensor:
    x.add_(1)
    return y + x.mean()


def draws(self: Any, y: Tensor, x: Tensor) -> Tensor:
    return y * random.random() * 0 + y


def masked(self: Any, y: Tensor, x: Tensor) -> Tensor:
    y = y.clone()
    y[y > 0.5] = 0
    return y


def complexly(self: Any, y: Tensor, x: Tensor) -> Tensor:
    return torch.fft.fft2(y)


def nested(self: Any, y: Tensor, x: Tensor) -> Tensor:
    rows = torch.nested.nested_tensor([y[0, :, :3, 0], y[1, :, :2, 0].contiguous()])
    return torch.nested.to_padded_tensor(rows, 0.0)


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def compiled_in_place() -> nn.Module:
    model = block()
    model.compile(backend="eager")
    return model


def partly_compiled() -> nn.Module:
    return nn.Sequential(compiled(block()), block(4, 4))


def masks() -> tuple[Any, ...]:
    return (image(), image(1) > 0)


class Both(tuple):
    """A tuple of a class of its own, which no list of items makes."""

    def __new__(cls, first, second):
        return super().__new__(cls, (first, second))


class Branching(nn.Module):
    def forward(self, x):
        return Both(x * 2, x + 1) if x.sum() > -1e9 else Both(x, x)


class InTheMidst(nn.Module):
    """A part that cannot be traced hands such a tuple on to layers."""

    def __init__(self):
        super().__init__()
        self.first, self.part, self.last = block(), Branching(), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        both = self.part(self.first(x))
        return self.last(both[0]) + self.last(both[1])


META = {"audit": "meta device", "optimize": "meta device"}
LAZY = {"audit": "lazy", "optimize": "lazy", "fuse": "lazy"}

CASES: dict[str, Case] = {
    "any arguments": Case(Anything, lambda: (image(), torch.ones(4, 1, 1))),
    "a dict": Case(lambda: Does(lambda s, y, x: {"out": y, "aux": [y.mean(), {"n": 3}]})),
    "an OrderedDict": Case(lambda: Does(lambda s, y, x: OrderedDict(out=y, aux=y.mean((2, 3))))),
    "a dict with attributes": Case(lambda: Does(lambda s, y, x: Attributes(out=y))),
    "a NamedTuple": Case(lambda: Does(lambda s, y, x: Pair(y, y.mean((2, 3))))),
    "a namedtuple": Case(lambda: Does(lambda s, y, x: Plain(y, y.mean((2, 3))))),
    "a tuple of its own class in the midst": Case(InTheMidst),
    "a field of what torch returns": Case(
        lambda: Does(lambda s, y, x: torch.stack([y, y * 2]).max(0).values + y.sort(1).values)
    ),
    "a dataclass": Case(lambda: Does(lambda s, y, x: Outputs(y, y.mean((2, 3))))),
    "arrays": Case(lambda: Does(lambda s, y, x: (y.mean((2, 3)).numpy(), y.argmax(1).numpy()))),
    "an array's number": Case(lambda: Does(lambda s, y, x: {"mean": y.mean().numpy()[()]})),
    "an array of texts": Case(lambda: Does(lambda s, y, x: (y, numpy.array(["a", "b"])))),
    "a deque": Case(lambda: Does(lambda s, y, x: deque([y, y.mean((2, 3))]))),
    "a namespace": Case(lambda: Does(lambda s, y, x: SimpleNamespace(out=y, size=3))),
    "what cannot be compared": Case(lambda: Does(lambda s, y, x: Picture(y))),
    "None and numbers": Case(lambda: Does(lambda s, y, x: (y, None, 3, "text"))),
    "nothing at all": Case(lambda: Does(lambda s, y, x: None)),
    "a module registered twice": Case(Twice),
    "shared parameters": Case(Shared),
    "a text that fails": Case(lambda: Unsaid(lambda s, y, x: y)),
    "a text of a part that fails": Case(lambda: nn.Sequential(block(), UnsaidNorm(4))),
    "a hook that changes the output": Case(lambda: hooked(forward_hook=lambda m, a, y: y * 2)),
    "a pre-hook that changes the input": Case(
        lambda: hooked(forward_pre_hook=lambda m, a: (a[0] + 1,))
    ),
    "a hook that only looks": Case(lambda: hooked(forward_hook=lambda m, a, y: None)),
    "a backward hook": Case(lambda: hooked(full_backward_hook=lambda m, a, b: None)),
    "weight norm": Case(lambda: parametrized(parametrizations.weight_norm)),
    "spectral norm": Case(lambda: parametrized(parametrizations.spectral_norm)),
    "spectral norm by hooks": Case(lambda: parametrized(torch.nn.utils.spectral_norm)),
    "pruned": Case(lambda: parametrized(lambda m: prune.l1_unstructured(m, "weight", 0.5))),
    "lazy": Case(lazy, refused=LAZY),
    "lazy, but run once": Case(lazy_but_run),
    "buffers that change": Case(Counting),
    "attributes that change": Case(Remembering),
    "an input that is written to": Case(lambda: Does(writes_to_its_input)),
    "a list that changes": Case(lambda: Taking(0, 0), lambda: ([image(), image(seed=2)],)),
    "a dict that changes": Case(lambda: Taking("x", "y"), lambda: ({"x": image()},)),
    "an in-place first layer": Case(lambda: nn.Sequential(nn.ReLU(inplace=True), block())),
    "an output that is the input": Case(lambda: Does(lambda s, y, x: (x, y))),
    "an output that views the input": Case(lambda: Does(lambda s, y, x: (x[:, :1], x.mT, y))),
    "a size as an output": Case(lambda: Does(lambda s, y, x: (y, y.shape, [x.size()]))),
    "two outputs that share memory": Case(lambda: Does(lambda s, y, x: (y, y[0], y.flatten(1)))),
    "a parameter as an output": Case(lambda: Does(lambda s, y, x: (y, s.block[0].weight))),
    "no convolution": Case(nn.Flatten),
    "no parameter": Case(lambda: nn.Sequential(nn.AvgPool2d(2), nn.ReLU())),
    "an identity": Case(nn.Identity),
    "complex output": Case(lambda: Does(complexly)),
    "complex input": Case(
        lambda: nn.Conv2d(3, 4, 3, dtype=torch.complex64),
        lambda: (torch.complex(image(), image(seed=2)),),
    ),
    "integer input": Case(
        lambda: Does(lambda s, y, x: y, block=nn.Sequential(Floating(), block())),
        lambda: (image().mul(50).to(torch.uint8),),
    ),
    "an extra integer input": Case(Classed, lambda: (image(), torch.tensor([1, 0]))),
    "a boolean input": Case(Masked, masks),
    "double precision": Case(lambda: block().double(), lambda: (image().double(),)),
    "half precision": Case(lambda: block().bfloat16(), lambda: (image().bfloat16(),)),
    "compiled": Case(lambda: compiled(block())),
    "compiled in place": Case(compiled_in_place),
    "partly compiled": Case(partly_compiled),
    "quantized": Case(quantized),
    "on the meta device": Case(on_meta, lambda: (image().to("meta"),), META),
    "frozen": Case(frozen),
    "with gradients": Case(with_gradients),
    "checkpointed": Case(lambda: Checkpointed(False)),
    "checkpointed, reentrant": Case(lambda: Checkpointed(True)),
    "nested tensors": Case(lambda: Does(nested)),
    "recursive": Case(Recursive),
    "a child that knows its parent": Case(Holding),
    "masked writes": Case(lambda: Does(masked)),
    "a sparse output": Case(lambda: Does(lambda s, y, x: y.to_sparse())),
    "quantized inside": Case(
        lambda: Does(lambda s, y, x: torch.quantize_per_tensor(y, 0.1, 0, torch.qint8).dequantize())
    ),
    "bounds that are the same": Case(lambda: Does(lambda s, y, x: F.hardtanh(y, 0.5, 0.5))),
    "random numbers": Case(lambda: Does(dropped_out)),
    "Python's random numbers": Case(lambda: Does(draws)),
    "printing": Case(lambda: Does(prints)),
}
