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

import nhwc

from ..optimize.test_optimize import force

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
    torch._dynamo.reset()
    loaded = saved(force(model, *given), tmp_path / "model.nhwc")
    used = USES[use](loaded, given, tmp_path)
    torch.testing.assert_close(used(*given), model(*given), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:The TorchScript type system")
@pytest.mark.parametrize("use", ["call", "script", "trace", "pickle"])
@torch.no_grad()
def test_what_it_was_not_saved_for_is_refused_everywhere(use: str, tmp_path: Path) -> None:
    loaded = saved(force(Sized().eval(), X, None, 2.0), tmp_path / "model.nhwc")
    used = USES[use](loaded, (X, None, 2.0), tmp_path)
    for other in [(X, None, 3.0), (X[..., :7], None, 2.0)]:
        with pytest.raises((nhwc.InputError, torch.jit.Error, RuntimeError), match="saved for"):
            used(*other)
