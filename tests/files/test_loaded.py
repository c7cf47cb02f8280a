"""A loaded model, whose arguments are fixed or checked, is a model like any other."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor

import nhwc
from nhwc import InputError

from ..optimizing import force, runs_program, won_by

X = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(1))


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
        y = self.norm(self.conv(x)) * scale
        return y if mask is None else y * mask


class Sized(Optional):
    """Decides by sizes, so that its file holds a graph for known ones, which checks them."""

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Tensor:
        y = super().forward(x, mask, scale)
        for row in range(y.shape[2]):
            y = y + row
        return y


class Behind(Sized):
    """Has a tensor behind what may be left out."""

    def forward(self, x: Tensor, scale: float = 1.0, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, mask, scale)


class Several(Optional):
    """Takes tensors in a list that may be left out, and decides by sizes."""

    def forward(self, x: Tensor, scale: float = 1.0, maps: list[Tensor] | None = None) -> Tensor:
        y = super().forward(x, None, scale)
        for row in range(y.shape[2]):
            y = y + row
        return y if maps is None else y + sum(maps)


def saved(model: nn.Module, path: Path) -> nn.Module:
    nhwc.save(model, path)
    return nhwc.load(path)


USES: dict[str, Callable[..., Any]] = {
    "call": lambda model, given, path: model,
    "optimize": lambda model, given, path: nhwc.optimize(model, *given),
    "fuse": lambda model, given, path: nhwc.fuse(model),
    "save": lambda model, given, path: saved(model, path / "again.nhwc"),
    "pickle": lambda model, given, path: pickle.loads(pickle.dumps(model)),
    "pickle a graph": lambda model, given, path: pickle.loads(pickle.dumps(nhwc.fuse(model))),
    "copy": lambda model, given, path: copy.deepcopy(model),
    "script": lambda model, given, path: torch.jit.script(model),
    "trace": lambda model, given, path: fx.symbolic_trace(model.portable),
    "export": lambda model, given, path: torch.export.export(model, given).module(),
    "compile": lambda model, given, path: torch.compile(model, backend="eager"),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    "given", [(X,), (X, None), (X, torch.tensor(2.0)), (X, None, 2.0)], ids=["x", "n", "t", "s"]
)
@pytest.mark.parametrize("kind", [Optional, Sized])
@pytest.mark.filterwarnings("ignore:The TorchScript type system")
@torch.no_grad()
def test_a_loaded_model_goes_everywhere(kind: Any, given: Any, use: str, tmp_path: Path) -> None:
    model = kind().eval()
    loaded = saved(force(model, *given), tmp_path / "model.nhwc")
    used = USES[use](loaded, given, tmp_path)
    torch.testing.assert_close(used(*given), model(*given), rtol=1e-4, atol=1e-4)


class Returning(Sized):
    """Returns an argument that may be left out."""

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0) -> Any:
        return super().forward(x, mask, scale), mask


@torch.no_grad()
def test_an_argument_that_is_returned_is_itself(tmp_path: Path) -> None:
    model, mask = Returning().eval(), torch.rand(1, 1, 8, 8).expand(1, 8, 8, 8)
    loaded = saved(force(model, X, mask), tmp_path / "model.nhwc")
    result, returned = loaded(X, mask)
    assert returned is mask
    torch.testing.assert_close(result, model(X, mask)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("use", USES)
@pytest.mark.filterwarnings("ignore:The TorchScript type system")
@torch.no_grad()
def test_a_tensor_behind_what_was_left_out_goes_everywhere(use: str, tmp_path: Path) -> None:
    model, mask = Behind().eval(), torch.rand(8, 8)
    loaded = saved(force(model, X, kwargs={"mask": mask}), tmp_path / "model.nhwc")
    used = USES[use](loaded, (X, 1.0, mask), tmp_path)
    torch.testing.assert_close(used(X, 1.0, mask), model(X, 1.0, mask), rtol=1e-4, atol=1e-4)
    if use not in ("trace", "export"):  # What these make takes every argument.
        torch.testing.assert_close(used(X, mask=mask), model(X, mask=mask), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "named"),
    [(Behind, {"mask": torch.rand(8, 8)}), (Several, {"maps": [X.new_ones(1, 8, 8, 8)]})],
)
@torch.no_grad()
def test_what_was_given_may_not_be_left_out(kind: Any, named: Any, tmp_path: Path) -> None:
    model = kind().eval()
    loaded = saved(force(model, X, kwargs=named), tmp_path / "model.nhwc")
    assert loaded.serves((X, 1.0, *named.values()))
    torch.testing.assert_close(loaded(X, **named), model(X, **named), rtol=1e-4, atol=1e-4)
    for wrong in ({}, {"scale": 2.0, **named}, {name: [X, X] for name in named}):
        with pytest.raises(nhwc.InputError, match="was saved for"):
            loaded(X, **wrong)


@torch.no_grad()
def test_what_no_call_gave_may_be_given_as_its_default(tmp_path: Path) -> None:
    model = Sized().eval()
    loaded = saved(force(model, X), tmp_path / "model.nhwc")
    for named in ({}, {"mask": None}, {"scale": 1.0}):
        torch.testing.assert_close(loaded(X, **named), model(X), rtol=1e-4, atol=1e-4)
    for wrong in ({"scale": 2.0}, {"mask": torch.tensor(2.0)}):
        with pytest.raises(nhwc.InputError, match="was saved for"):
            loaded(X, **wrong)


@pytest.mark.filterwarnings("ignore:The TorchScript type system")
@pytest.mark.parametrize("use", ["call", "script", "trace", "pickle"])
@torch.no_grad()
def test_what_it_was_not_saved_for_is_refused_everywhere(use: str, tmp_path: Path) -> None:
    loaded = saved(force(Sized().eval(), X, None, 2.0), tmp_path / "model.nhwc")
    used = USES[use](loaded, (X, None, 2.0), tmp_path)
    for other in [(X, None, 3.0), (X[..., :7], None, 2.0)]:
        with pytest.raises((nhwc.InputError, torch.jit.Error, RuntimeError), match="saved for"):
            used(*other)


@pytest.mark.parametrize("stage", ["plan", "graph", "input"])
def test_a_file_takes_what_the_example_gave_whatever_won(stage: str, tmp_path: Path) -> None:
    model = Optional().eval()
    loaded = saved(won_by(stage, model, X, kwargs={"scale": 3.0}), tmp_path / "model.nhwc")
    torch.testing.assert_close(loaded(X, scale=3.0), model(X, scale=3.0))


class LooksAtItsMask(nn.Module):
    """Answers otherwise if it cannot look whether all is to be seen, as code of others does."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        if not isinstance(mask, FakeTensor) and mask.all():
            return self.conv(x)
        return self.conv(x * mask) * 2


def test_a_graph_for_known_sizes_that_answers_otherwise_is_not_saved(tmp_path: Path) -> None:
    x, mask = torch.rand(1, 3, 8, 8), torch.ones(1, 1, 8, 8, dtype=torch.long)
    net = LooksAtItsMask().eval()
    optimized = nhwc.optimize(net, x, mask)
    torch.testing.assert_close(optimized(x, mask), net(x, mask))
    with pytest.raises(InputError, match="answers otherwise than its code does"):
        nhwc.save(optimized, tmp_path / "net.nhwc")


class Normed(nn.Module):
    """Computes in float32 what half precision cannot hold, where autocast gives it that."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        if y.shape[-1] % 2:
            y = y[..., :-1]
        norm = (y.float() * 1000).square().sum((2, 3), keepdim=True).rsqrt()
        return y * norm.type_as(y) * 1000


def test_a_graph_for_known_sizes_refuses_autocast(tmp_path: Path) -> None:
    net = Normed().eval()
    nhwc.save(force(net, X), tmp_path / "net.nhwc")
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        assert net(X).count_nonzero()
        loaded = nhwc.load(tmp_path / "net.nhwc")
        with pytest.raises(InputError, match="saved for calls without autocast"):
            loaded(X)
        with torch.autocast("cpu", enabled=False):
            torch.testing.assert_close(loaded(X), net(X))
    assert loaded.recipes


class Turned(nn.Module):
    """Makes an image of tokens, which torch lays out otherwise where there is one image alone."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 9, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.conv(x).flatten(2).chunk(3, dim=1)
        y = torch.softmax(q.transpose(1, 2) @ k * 0.5, dim=-1) @ v.transpose(1, 2)
        y = y.transpose(1, 2).reshape(x.shape)
        y = torch.cat([y[..., 1:], y[..., :1]], -1)
        return torch.cat([y.relu(), -y], -2)


@pytest.mark.parametrize("batch", [1, 2])
@torch.no_grad()
def test_a_plan_of_a_file_for_known_sizes_keeps_strides(batch: int, tmp_path: Path) -> None:
    net, x = Turned().eval(), X.repeat(batch, 1, 1, 1)
    loaded = saved(force(net, x), tmp_path / "net.nhwc")
    assert runs_program(loaded, x)
    assert loaded(x).stride() == net(x).stride()
    torch.testing.assert_close(loaded(x), net(x))
