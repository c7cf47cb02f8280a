"""torch.fx's own `optimize_for_inference`: batch norm folded, stretches in oneDNN's layout."""

from __future__ import annotations

from torch import Tensor, nn

from .engine import Engine, Prepared


def prepare(model: nn.Module, inputs: tuple[Tensor, ...]) -> Prepared:
    from torch.fx.experimental.optimization import optimize_for_inference

    return optimize_for_inference(model), inputs


ENGINE = Engine("fx", "torch.fx for inference", prepare, cuda=False)
