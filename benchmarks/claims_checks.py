"""Small programs for what no verb shows alone: `python -m benchmarks.claims --show NAME`.

Each returns in words what it saw, and raises where the claim does not hold.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

import torch
from torch import Tensor, fx, nn

import nhwc
from nhwc import Format, format_of
from nhwc.zoo import load_model

LAST = torch.channels_last


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Hidden(nn.Module):
    """Convolutions and batch norms of which some stand in a Sequential and one in a wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)
        self.second = nn.Conv2d(4, 4, 1)
        self.rest = nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1))
        self.last = Wrapped(nn.BatchNorm2d(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.rest(self.second(self.norm(self.first(x)))))


def hidden() -> nn.Module:
    torch.manual_seed(0)
    model = Hidden()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, 1, 0.1)
            nn.init.normal_(module.bias)
            nn.init.normal_(module.running_mean)
            nn.init.uniform_(module.running_var, 0.5, 2)
    return model.eval()


def norms_in(graph: fx.Graph, modules: dict[str, nn.Module]) -> int:
    return sum(
        isinstance(modules.get(str(node.target)), nn.modules.batchnorm._BatchNorm)
        for node in graph.nodes
        if node.op == "call_module"
    )


def strides() -> str:
    x = torch.empty(10, 3, 16, 16).to(memory_format=LAST)
    assert x.stride() == (768, 1, 48, 3)
    return f"{x.stride()}"


def permuted() -> str:
    x = torch.rand(4, 1, 8, 8).permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    assert x.stride() == (64, 64, 8, 1)
    assert x.to(memory_format=LAST).stride() == (64, 1, 8, 1)
    return f"permuted {x.stride()}, by `.to` {x.to(memory_format=LAST).stride()}"


def marked() -> str:
    told = []
    for shape in ((4, 1, 8, 8), (4, 8, 1, 1)):
        x = nhwc.to_format(torch.rand(shape), Format.CHANNELS_LAST)
        assert x.stride() == torch.rand(shape).to(memory_format=LAST).stride()
        assert format_of(x) is Format.AMBIGUOUS
        assert format_of(x, hint=Format.CHANNELS_LAST) is Format.CHANNELS_LAST
        told.append(f"{shape} {x.stride()}")
    return (
        "`nhwc.format_of` calls it ambiguous and takes a hint, `nhwc.to_format` marks it, the "
        f"audit names who misreads it: {', '.join(told)}"
    )


def converted() -> str:
    model = load_model("resnet18").eval().to(memory_format=LAST)
    seen = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(lambda m, i, y: seen.append(format_of(y)))
    with torch.inference_mode():
        for _ in range(2):
            model(torch.rand(2, 3, 64, 64).to(memory_format=LAST))
    assert len(seen) == 40
    assert all(format is Format.CHANNELS_LAST for format in seen)
    return "resnet18, two batches: all 40 results of convolutions are channels last"


def raises() -> str:
    x = torch.rand(2, 3, 8, 8).to(memory_format=LAST)
    before = {name: getattr(torch, name) for name in dir(torch)}
    try:
        with nhwc.strict():
            torch.tril(x)
    except nhwc.FormatLost as error:
        text = str(error)
    assert "tril lost channels last" in text
    assert all(getattr(torch, name) is value for name, value in before.items())
    return "torch.tril raises FormatLost; nothing of torch was replaced"


def inputs() -> str:
    x = torch.rand(2, 3, 8, 8).to(memory_format=LAST)
    with nhwc.strict():
        try:
            nn.Conv2d(4, 4, 3)(x)
        except RuntimeError as error:
            text = "\n".join([str(error), *getattr(error, "__notes__", ())])
    assert re.search(r"conv2d raised at .*shape \(2, 3, 8, 8\) strides \(192, 1, 24, 3\)", text)
    assert "float32" in text
    return "operator, line, shapes, strides, formats and types of all inputs"


def script_and_fx() -> str:
    model = load_model("resnet18").eval().to(memory_format=LAST)
    x = torch.rand(2, 3, 64, 64).to(memory_format=LAST)
    graph = fx.symbolic_trace(nn.Sequential(*list(model.children())[:-2]))
    with torch.inference_mode():
        for way in (graph, torch.jit.script(graph)):
            assert format_of(way(x)) is Format.CHANNELS_LAST
    return "resnet18 as an FX graph, and that scripted: channels last out"


def found() -> str:
    fused = nhwc.fuse(hidden())
    applied = [site.what for site in fused.report.sites if site.applied]
    assert applied
    return ", ".join(applied) + " folded"


def training() -> str:
    model = hidden().train()
    try:
        fused = nhwc.fuse(model)
    except nhwc.NhwcError as error:
        return f"a model in training is refused: {error}"
    assert not any(site.applied for site in fused.report.sites)
    return f"left alone: {fused.report.sites[0].reason}"


def graph() -> str:
    traced = fx.symbolic_trace(hidden())
    targets = [str(node.target) for node in traced.graph.nodes if node.op == "call_module"]
    assert targets == ["first", "norm", "second", "rest.0", "rest.1", "last.inner"]
    return "calls in order: " + ", ".join(targets)


def baked() -> str:
    model = hidden()
    fused = nhwc.fuse(model)
    before = {str(n.target) for n in fx.symbolic_trace(model).graph.nodes}
    after = {str(n.target) for n in fused.graph.nodes if n.op == "call_function"}
    assert not after - before
    return "no operator is in the fused graph that was not in the model"


def same() -> str:
    model, x = hidden(), torch.randn(5, 3, 8, 8)
    torch.testing.assert_close(nhwc.fuse(model)(x), model(x))
    both = copy.deepcopy(model).double()
    error = (nhwc.fuse(model)(x).double() - both(x.double())).abs().max().item()
    return f"largest difference from a float64 run {error:.0e}"


def gone() -> str:
    fused = nhwc.fuse(hidden())
    left = norms_in(fused.graph, dict(fused.named_modules()))
    assert left == 0
    assert "batch_norm" not in fused.code
    return (
        f"0 of {norms_in(fx.symbolic_trace(hidden()).graph, dict(hidden().named_modules()))} left"
    )


def users() -> str:
    class Twice(Hidden):
        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            return self.norm(y) + y

    model, x = Twice().eval(), torch.randn(2, 3, 4, 4)
    fused = nhwc.fuse(model)
    torch.testing.assert_close(fused(x), model(x))
    site = next(site for site in fused.report.sites if not site.applied)
    return f"left alone: {site.reason}"


def ranks() -> str:
    kinds = (
        (nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4), (2, 3, 8)),
        (nn.Conv3d(3, 4, 1), nn.BatchNorm3d(4), (2, 3, 4, 4, 4)),
        (nn.ConvTranspose2d(3, 4, 1), nn.BatchNorm2d(4), (2, 3, 4, 4)),
        (nn.Linear(3, 4), nn.BatchNorm1d(4), (2, 3)),
    )
    for layer, norm, shape in kinds:
        model, x = nn.Sequential(layer, norm).eval(), torch.randn(shape)
        fused = nhwc.fuse(model)
        assert norms_in(fused.graph, dict(fused.named_modules())) == 0
        torch.testing.assert_close(fused(x), model(x))
    return "also 1-D, 3-D and transposed convolutions, and linear layers"


def linted() -> str:
    fused = nhwc.fuse(hidden())
    fused.graph.lint()
    code = fused.code
    fused.recompile()
    assert fused.code == code
    return "`graph.lint()` passes, and the code is that of the graph"


def untouched() -> str:
    model = hidden()
    before = copy.deepcopy(model.state_dict())
    nhwc.fuse(model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    return "all tensors of the model are as they were"


def scripted() -> str:
    model, x = load_model("resnet18").eval(), torch.rand(2, 3, 64, 64)
    fused = nhwc.fuse(model)
    with torch.inference_mode():
        torch.testing.assert_close(torch.jit.script(fused)(x), model(x), rtol=1e-3, atol=1e-4)
    return "resnet18, fused and scripted, answers as before"


CHECKS: tuple[Callable[[], str], ...] = (
    strides,
    permuted,
    marked,
    converted,
    raises,
    inputs,
    script_and_fx,
    found,
    training,
    graph,
    baked,
    same,
    gone,
    users,
    ranks,
    linted,
    untouched,
    scripted,
)
